"""How a plan that is given divides its batch best: the micro-batch size and the shares that take least.

Every micro-batch size that divides the batch is looked at. For each of them the shares are found by bisection, so that
no others take less (`fasop.simulation.ranks.shares`). The times are those that `fasop.simulation.predict` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import ConfigError
from conf.schema.engine import EngineKind
from conf.schema.parallel import Parallel
from conf.schema.values.partition import Shares
from fasop.costs.layers import Basis
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.partition.exact_shares import Units, least_time
from fasop.search.shares.micro_batch_memory import fits, rooms_of_replicas
from fasop.search.space.candidates import MOST_MICRO_BATCHES, divisors
from fasop.simulation.islands import durations_of
from fasop.simulation.predict import Prediction, planned, predict_plan
from fasop.simulation.ranks.shares import best_shares, replicas_of

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment

SIZE, SHARES = "micro_batch_size", "shares"


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """What is chosen for the keys that were open."""

    values: dict[str, int | str | None]
    """Keys of `parallel` with their values."""
    seconds: float
    """Seconds of an iteration, as predicted."""
    sizes: tuple[int, ...]
    """Micro-batch sizes that were compared: all that divide the batch, keep the rules and fit into memory."""
    even: tuple[float, int] | None
    """Seconds with equal shares, and the micro-batch size that is then best; None where nothing divides the batch
    evenly."""
    basis: Basis

    def __str__(self) -> str:
        chosen = " ".join(f"parallel.{key}={'null' if one is None else one}" for key, one in self.values.items())
        found = f"{chosen} is predicted to be fastest, {self.seconds * 1e3:.1f} ms per iteration"
        if SIZE in self.values:
            found += f"; micro-batches of {', '.join(map(str, self.sizes))} were compared"
        if self.values.get(SHARES) is not None and self.even is not None:
            seconds, size = self.even
            with_size = f" (micro-batches of {size})" if SIZE in self.values else ""
            found += f"; equal shares would take {seconds * 1e3:.1f} ms{with_size}"
        if self.basis is not Basis.MEASURED:
            found += f"; some of the times are {self.basis}"
        return found


def provisional(parallel: Parallel) -> Iterator[dict[str, int | str | None]]:
    """Values for the keys of a plan that are open, such that its own rules hold: by micro-batch size, shares about
    equal."""
    batch, data = parallel.global_batch_size, parallel.layout.replicas[0]
    undecided = parallel.undecided
    for size in divisors(batch) if SIZE in undecided else (parallel.micro_batch_size,):
        values: dict[str, int | str | None] = {SIZE: size} if SIZE in undecided else {}
        if SHARES in undecided:
            count = batch // size
            if batch % size or count < data:
                continue
            if max(parallel.streams_of) > 1:
                counts = _of_streams([lambda number: number] * data, parallel.streams_of, count)
                if counts is None:
                    continue
                values[SHARES] = _in_proportion(counts)
            else:
                values[SHARES] = None if count % data == 0 else str(Shares.even(count, data))
        yield values


def best_division(experiment: Experiment, undecided: Parallel) -> BatchDivision:
    """The values that take least, for the open keys of a plan.

    Args:
        experiment: with values for them that keep all rules.
        undecided: the plan as it was given.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: nothing fits into memory, a profile has no costs for the tensor size, or does not know the model.
    """
    placed = planned(experiment)
    rooms = rooms_of_replicas(placed, experiment.ranks_per_node())
    room = None if None in rooms else min(one for one in rooms if one is not None)
    found: list[tuple[float, dict[str, int | str | None], Basis]] = []
    even: list[tuple[float, int]] = []
    too_large: list[str] = []
    for values in provisional(undecided):
        try:
            parallel = replace(experiment.parallel, **values)  # type: ignore[arg-type]
            replace(experiment, parallel=parallel)
        except ConfigError:  # too few values for a batch norm, for example
            continue
        if parallel.micro_batches > MOST_MICRO_BATCHES and SIZE in values:
            continue
        one = _with(placed, parallel)
        if SHARES in values:
            if parallel.shares is None:
                equal = predict_plan(one)
                if fits(equal) if room is None else parallel.micro_batch_size <= room:
                    even.append((equal.iteration_s, parallel.micro_batch_size))
            if experiment.engine.kind is EngineKind.tdpp:
                shares = _best_shares(one)
                values, one = {**values, SHARES: shares}, _with(placed, replace(parallel, shares=shares))
        predicted = predict_plan(one)
        if SIZE in values and not (fits(predicted) if room is None else parallel.micro_batch_size <= room):
            too_large.append(_needs(predicted, parallel.micro_batch_size))
            continue
        found.append((predicted.iteration_s, values, predicted.basis))
    if not found:
        raise SearchError(
            f"parallel.micro_batch_size=auto: by prediction no micro-batch size fits in memory: {too_large[0]}; use "
            "parallel.recompute=full, a longer pipeline or larger tensor groups, or give parallel.micro_batch_size"
            if too_large
            else f"parallel.micro_batch_size=auto: parallel.global_batch_size={undecided.global_batch_size} makes "
            f"more than {MOST_MICRO_BATCHES} micro-batches at every size; give parallel.micro_batch_size"
        )
    seconds, chosen, basis = min(found, key=lambda row: row[0])
    return BatchDivision(
        values=chosen,
        seconds=seconds,
        sizes=tuple(int(row[1][SIZE] or 0) for row in found) if SIZE in chosen else (),
        even=min(even, default=None),
        basis=basis,
    )


def _with(placed: PlacedTraining, parallel: Parallel) -> PlacedTraining:
    return replace(placed, training=replace(placed.training, parallel=Parallelism.of(parallel)))


def _best_shares(placed: PlacedTraining) -> str | None:
    """None where equal ones are best."""
    counts = best_counts(placed)
    assert counts is not None, "the provisional shares are one way"
    return _in_proportion(counts)


def best_counts(placed: PlacedTraining) -> tuple[int, ...] | None:
    """The micro-batches of each replica with which an iteration takes least, in the streams of the plan; None where
    these cannot share the batch evenly."""
    parallel = placed.training.parallel
    replicas = replicas_of(parallel, durations_of(placed)(placed.partition.layers))
    total = parallel.global_batch_size // parallel.micro_batch_size
    if max(parallel.streams_of) == 1:
        return best_shares(replicas, total).counts
    return _of_streams([replica.seconds for replica in replicas], parallel.streams_of, total)


def _of_streams(
    seconds: Sequence[Callable[[int], float]], streams: Sequence[int], total: int
) -> tuple[int, ...] | None:
    """The micro-batches of each replica, a multiple of its streams, that take least; `seconds` of so many, by replica.
    None where such multiples do not add up to `total`."""
    alike: dict[tuple[Callable[[int], float], int], list[int]] = {}
    for number, key in enumerate(zip(seconds, streams, strict=True)):
        alike.setdefault(key, []).append(number)
    units = []
    for (took, of), numbers in alike.items():
        by_number = np.full(total + 1, np.inf)
        for count in range(of, total + 1, of):
            by_number[count] = took(count)
        units.append(Units(len(numbers), by_number))
    found = least_time(units, total)
    if found is None:
        return None
    counts = dict(zip(chain(*alike.values()), chain(*found.numbers), strict=True))
    return tuple(counts[number] for number in range(len(counts)))


def _in_proportion(counts: Sequence[int]) -> str | None:
    common = gcd(*counts)
    return None if len({*counts}) == 1 else str(Shares(tuple(count // common for count in counts)))


def _needs(predicted: Prediction, size: int) -> str:
    stage = max(predicted.stages, key=lambda stage: stage.memory_gib - stage.limit_gib)
    return (
        f"with micro-batches of {size} stage {stage.name} needs {stage.memory_gib:.1f} of {stage.limit_gib:g} GiB of "
        f"{'/'.join(stage.gpus)}"
    )
