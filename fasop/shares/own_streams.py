"""Streams on the GPUs of a run, with its micro-batch size and shares, from the project's own measurements.

Times are those of predictions (`fasop.simulation`), of streams with the rates that `tdpp profile streams=…` measured;
only what was measured is looked at, so that memory has room for it. A replica that takes k micro-batches has the number
of streams that divides k and takes least; which k each replica takes is solved exactly
(`fasop.partition.exact_shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from conf.errors import ConfigError
from conf.schema.parallel import Parallel
from conf.schema.values.partition import AUTO, Shares
from fasop.costs.arrays import Floats
from fasop.costs.layers import Basis
from fasop.costs.parallelism import streams_text
from fasop.costs.stream_rates import stream_rates
from fasop.costs.training import PlacedTraining
from fasop.partition.exact_shares import Units, least_time
from fasop.simulation.iteration import Durations
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.replicas import Replicas, in_streams
from fasop.simulation.ranks.shares import Replica

MOST_MICRO_BATCHES = 2**12
"""Micro-batches of an iteration; more of them are not looked at, for larger ones take less."""


@dataclass(frozen=True, kw_only=True)
class InStreams:
    """What takes least with more than one stream on some GPU."""

    micro_batch_size: int
    shares: str | None
    """None: all alike."""
    streams: str
    seconds: float
    """Seconds of an iteration, as predicted."""
    sizes: tuple[int, ...]
    """Micro-batch sizes with which some GPU would have several streams."""
    basis: Basis


def best_in_streams(
    placed: PlacedTraining, undecided: Parallel, check: Callable[[Parallel], object] = lambda _: None
) -> InStreams | None:
    """None where no measurement says that several streams gain anything.

    Args:
        placed: with a data parallel plan that has values for all keys.
        undecided: which of micro-batch size and shares are open (`auto`), and the values of others.
        check: raises ConfigError for a plan that breaks a rule.
    """
    open_shares = undecided.shares == AUTO
    given = None if open_shares or undecided.shares is None else Shares.parse(undecided.shares).numbers
    found = []
    for size in _sizes(placed, undecided):
        total, parallel = undecided.global_batch_size // size, placed.training.parallel
        if undecided.global_batch_size % size or not parallel.data <= total <= MOST_MICRO_BATCHES:
            continue
        even = None if total % parallel.data == 0 else Shares.even(total, parallel.data).numbers
        shares = even if open_shares else given
        try:
            parallel = replace(parallel, micro_batch_size=size, shares=shares, streams=None)
            check(parallel.configured())
        except ConfigError:  # shares that do not divide so many micro-batches, too few values for a batch norm
            continue
        one = replace(placed, training=replace(placed.training, parallel=parallel, in_streams=True))
        chosen = _of_size(one, None if open_shares else parallel.micro_batches_of, total)
        if chosen is None or max(chosen[1]) == 1:
            continue
        counts, streams = chosen
        parallel = replace(parallel, shares=_shares(counts) if open_shares else shares, streams=tuple(streams))
        predicted = predict_plan(replace(one, training=replace(one.training, parallel=parallel)))
        found.append((predicted.iteration_s, size, parallel, predicted.basis))
    if not found:
        return None
    seconds, size, parallel, basis = min(found, key=lambda row: row[:2])
    assert parallel.streams is not None
    return InStreams(
        micro_batch_size=size,
        shares=None if parallel.shares is None else str(Shares(parallel.shares)),
        streams=streams_text(parallel.streams),
        seconds=seconds,
        sizes=tuple(size for _, size, *_ in found),
        basis=basis,
    )


def _sizes(placed: PlacedTraining, undecided: Parallel) -> list[int]:
    """With which steps were measured, in the run's number format, on any kind of node."""
    profiles, precision = [kind.profile for kind in placed.kinds if kind.profile is not None], placed.training.precision
    every = [steps for profile in profiles for steps in profile.steps]
    measured = {steps.micro_batch_size for steps in every if steps.precision is precision}
    given: object = undecided.micro_batch_size
    return sorted(size for size in measured if given in (AUTO, size))


def _of_size(
    placed: PlacedTraining, counts: Sequence[int] | None, total: int
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Micro-batches and streams of each replica; `counts` are given or free, and None is returned if nothing fits."""
    replicas = Replicas(placed)
    every = list(zip(replicas.of(placed.partition.layers), (kinds[0] for kinds in replicas.kinds), strict=True))
    kinds: dict[tuple[int, str], list[int]] = {}
    for number, (durations, name) in enumerate(every):
        kinds.setdefault((id(durations), name), []).append(number)
    tables = [dict(_seconds(placed, *every[numbers[0]], total)) for numbers in kinds.values()]
    if counts is None:
        units = [
            Units(len(numbers), np.min([*table.values()], axis=0))
            for numbers, table in zip(kinds.values(), tables, strict=True)
        ]
        solved = least_time(units, total)
        if solved is None:
            return None
        of_kinds = solved.numbers
    else:
        of_kinds = tuple(tuple(counts[number] for number in numbers) for numbers in kinds.values())
    taken, streams = [0] * len(every), [0] * len(every)
    for numbers, table, of_kind in zip(kinds.values(), tables, of_kinds, strict=True):
        for number, count in zip(numbers, of_kind, strict=True):
            taken[number] = count
            _, streams[number] = min((seconds[count], one) for one, seconds in table.items())
    return taken, streams


def _seconds(placed: PlacedTraining, durations: Durations, kind: str, total: int) -> Iterator[tuple[int, Floats]]:
    """Yield for each number of streams what an iteration takes with 0, 1, … micro-batches; infinite where they cannot
    be shared evenly."""
    training = placed.training
    profile = next(node.profile for node in placed.nodes if node.name == kind)
    rates = stream_rates(profile, training.model, training.precision, training.parallel.micro_batch_size)
    for streams in rates.rates:
        replica = Replica(str(training.parallel.schedule), 1, in_streams(durations, streams, rates))
        one, more = replica.seconds(1), replica.seconds(2) - replica.seconds(1)
        seconds = np.full(total + 1, np.inf)
        taken = np.arange(streams, total + 1, streams)
        seconds[taken] = one + (taken - 1) * more
        yield streams, seconds


def _shares(counts: Sequence[int]) -> tuple[int, ...] | None:
    common = gcd(*counts)
    return None if len({*counts}) == 1 else tuple(count // common for count in counts)
