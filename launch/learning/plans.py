"""From the words of a command line to the plans that a rehearsal of learning compares, and what it trains of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override

from conf.blocks_of_module import count_blocks
from conf.compose import command_line, compose, compose_unchecked, to_object
from conf.errors import TdppError
from conf.reading.user_files import config_dirs
from conf.schema.adapt import Adapt, Rule
from conf.schema.experiment import Data, Experiment, Model, Parallel, Recompute, Schedule, Train
from conf.schema.values.partition import Partition, Shares
from conf.visible import plural
from launch.errors import LaunchError
from megatron_ext.contract.goal import BLEU, names_metric
from megatron_ext.contract.schedule.streams import Semantics

SMALL = "small."
"""Before the words that are for what is trained alone."""
GROUPS = ("model", "train", "data")
BATCH = "parallel.global_batch_size"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A plan."""

    name: str
    """What tells it from the others."""
    layout: str
    """In words: replicas or sizes, and the schedule."""
    experiment: Experiment
    """The experiment as it would be launched, of which its times are predicted."""
    small: Experiment
    """What is trained in its place, under its delays."""


def compared(words: Sequence[str], composed: Callable[[Sequence[str]], Experiment]) -> list[Compared]:
    """The plans of a command line, each once: all combinations of what it gives several values for, as in a sweep.
    `composed` gives the experiment that a launch with such words would start. Raises TdppError: one cannot be composed,
    or not be rehearsed."""
    folders, others = config_dirs(words)
    dirs = [f"--config-dir={folder}" for folder in folders]
    small = [word.removeprefix(SMALL) for word in others if word.startswith(SMALL)]
    for word in small:
        _check_small(word, dirs)
    whole = [word for word in others if not word.startswith(SMALL)]
    found = []
    for name, chosen in combinations([*dirs, *whole]):
        try:
            experiment = composed([*dirs, *chosen])
            if experiment.adapt.rule is Rule.goodput:
                raise LaunchError(
                    "adapt.rule=goodput: its batches depend on the times of the GPUs, which a rehearsal of learning "
                    "does not measure; use adapt.rule=noise or similarity"
                )
            layout = layout_of(experiment.parallel)
            if (every := experiment.train.sync_every) is not None:
                layout += f", {len(experiment.parallel.islands_of)} islands every {every}"
            found.append(
                Compared(
                    name=name or layout,
                    layout=layout,
                    experiment=experiment,
                    small=small_of(experiment, dirs, chosen, small),
                )
            )
        except TdppError as error:
            raise type(error)(f"{name}: {error}" if name else str(error)) from error
    _require_equal_samples(found)
    return found


def combinations(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each with what tells it from the others, and with its words."""
    with command_line(words) as known:
        overrides = OverridesParser.create().parse_overrides(list(known.overrides))
        ways = [_values(override) for override in overrides]
        given = [[known.as_given(one) for one in way] for way in ways]
    for choice in product(*given):
        varied = [_short(word) for word, way in zip(choice, given, strict=True) if len(way) > 1]
        yield " ".join(varied), list(choice)


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(override.value(), Glob):
        raise LaunchError(f"{override.input_line}: give the names, joined by commas")
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _short(word: str) -> str:
    """Leaves out what goes without saying: `parallel=plans/15-1.yaml` is 15-1."""
    key, _, value = word.partition("=")
    return Path(value).stem if key == "parallel" else word.removeprefix("parallel.")


def layout_of(parallel: Parallel) -> str:
    """Describes a layout, such as `3-1 stashing`, or `tensor 1 x data 4 x pipeline 1`."""
    stream = parallel.stream
    if stream is None:
        sizes = f"tensor {parallel.tensor} x data {parallel.replicas or parallel.data} x pipeline {parallel.pipeline}"
        return sizes if parallel.pipeline == 1 else f"{sizes}, {parallel.schedule.label}"
    found = f"{'-'.join(map(str, stream.replicas))} {stream.semantics}"
    if stream.update_every > 1:
        found += f", an update every {stream.update_every}"
    return found if parallel.depth is None else f"{found}, depth {parallel.depth}"


def _check_small(word: str, dirs: Sequence[str]) -> None:
    key = word.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0]
    if key == BATCH or key == "experiment" or group in GROUPS:
        if len([*combinations([*dirs, word])]) > 1:
            raise LaunchError(
                f"{SMALL}{word}: all plans train the same small model; give several values only to keys without {SMALL}"
            )
        return
    rule = f"{SMALL}… changes only what is trained: experiment, {', '.join(GROUPS)} and {BATCH}"
    raise LaunchError(f"{SMALL}{word}: {rule}; words without {SMALL} give the plan")


def small_of(experiment: Experiment, dirs: Sequence[str], chosen: Sequence[str], small: Sequence[str]) -> Experiment:
    """What is trained in the place of an experiment: the model, training and data that `small` says, under the delays
    of its plan, on this machine. Raises TdppError: there is no such thing."""
    words = [*dirs, *_replaced(chosen, small)]
    cfg = compose_unchecked([word for word in words if word.partition("=")[0] != BATCH])
    count_blocks(cfg)
    model, train, data = (to_object(cfg, Model, "model"), to_object(cfg, Train, "train"), to_object(cfg, Data, "data"))
    batch = next((word.partition("=")[2] for word in reversed(small) if word.startswith(f"{BATCH}=")), None)
    samples = _samples(experiment.parallel, batch)
    train, own = trained(train), experiment.train
    if train.sync_every is None and not any(word.startswith("train.sync_every=") for word in small):
        train = replace(  # a group that `small` chooses does not make a plan another one
            train, sync_every=own.sync_every, outer_lr=own.outer_lr, outer_momentum=own.outer_momentum
        )
    return replace(
        compose(),
        name="rehearsal",
        model=model,
        train=train,
        data=data,
        parallel=Parallel(
            micro_batch_size=samples[0],
            global_batch_size=samples[1],
            data=experiment.parallel.layout.replicas[0],
            islands=experiment.parallel.islands,
            shares=experiment.parallel.shares,
        )
        if train.sync_every
        else delays(experiment, model, samples),
        adapt=_adapting(experiment, samples[0]),
    )


def _adapting(experiment: Experiment, micro_batch_size: int) -> Adapt:
    """What of it decides which batches are learned: not how replicas share them, nor in micro-batches of which size."""
    adapt, own = experiment.adapt, experiment.parallel.micro_batch_size
    if adapt.rule is Rule.none:
        return Adapt()
    lower, upper = (None if bound is None else bound * micro_batch_size // own for bound in (adapt.lower, adapt.upper))
    return replace(adapt, rebalance=False, micro_batch_sizes=[], streams=[], lower=lower, upper=upper)


def _replaced(chosen: Sequence[str], small: Sequence[str]) -> list[str]:
    """The words of what is trained: a group that `small` chooses has nothing of the one that it stands for."""
    keys = {word.partition("=")[0] for word in small}
    if "experiment" in keys:
        return list(small)
    kept = []
    for word in chosen:
        group = word.partition("=")[0].lstrip("+~").partition(".")[0]
        if group not in keys & set(GROUPS) and group != "parallel":
            kept.append(word)
    return [*kept, *small]


def _samples(parallel: Parallel, batch: str | None) -> tuple[int, int]:
    """Returns the samples of a micro-batch and a global batch in training: as many micro-batches as the plan has."""
    micro, whole = parallel.micro_batch_size, parallel.global_batch_size
    if batch is None:
        return micro, whole
    wrong = f"{SMALL}{BATCH}={batch}"
    if not (batch.isascii() and batch.isdecimal()) or not 1 <= int(batch) <= 2**31:
        raise LaunchError(f"{wrong} must be a whole number, 1 or more")
    size, rest = divmod(micro * int(batch), whole)
    if rest or not size:
        count = whole // micro
        near = [str(n) for n in (int(batch) // count * count, -(-int(batch) // count) * count) if n]
        raise LaunchError(
            f"{wrong} cannot be divided into {plural(count, 'micro-batch', 'es')} as {BATCH}={whole} is; the nearest "
            f"that can: {', '.join(near)}"
        )
    return size, int(batch)


def trained(train: Train) -> Train:
    """The training of a rehearsal. Raises LaunchError: it is one that a rehearsal does not do."""
    if train.load is not None:
        raise LaunchError(f"train.load={train.load}: a rehearsal starts from new weights; use {SMALL}train.load=null")
    if train.eval_interval is None:
        usual = max(1, (train.iterations or 1000) // 20)
        raise LaunchError(
            "plans are compared by evaluations on the valid split; set their interval, such as "
            f"train.eval_interval={usual}"
        )
    if names_metric(BLEU, train.until, train.best):
        raise LaunchError(
            f"a rehearsal does not translate; use another metric than {BLEU} in train.until and train.best"
        )
    return replace(train, max_cost=None, compile=False)


def delays(experiment: Experiment, model: Model, samples: tuple[int, int]) -> Parallel:
    """The plan of an experiment for another model: as much of it as decides what is learned.

    With a flush that is the batch alone; all ways to lay it out learn the same.
    """
    parallel, (micro, whole) = experiment.parallel, samples
    if parallel.stream is None and experiment.adapt.rule is not Rule.none:  # a batch has one for each replica at least
        replicas = parallel.layout.replicas[0]
        shares = None if whole // micro % replicas == 0 else str(Shares.even(whole // micro, replicas))
        return Parallel(micro_batch_size=micro, global_batch_size=whole, data=replicas, shares=shares)
    if parallel.stream is None:
        return Parallel(micro_batch_size=micro, global_batch_size=whole)
    latest = parallel.semantics is Semantics.latest
    return Parallel(
        pipeline=parallel.pipeline,
        partition=str(fitted(experiment.partition, model)),
        schedule=Schedule.pipedream,
        replicas="-".join(map(str, parallel.layout.replicas)),
        semantics=parallel.semantics,
        update_every=parallel.update_every,
        depth=parallel.depth,
        recompute=parallel.recompute if latest else Recompute.none,
        micro_batch_size=micro,
        global_batch_size=whole,
    )


def fitted(partition: Partition, model: Model) -> Partition:
    """The partition for another model: in proportion, and no stage that has layers is left without. Raises LaunchError:
    there are fewer layers than stages that need one."""
    layers, last = model.counted, len(partition.layers) - 1
    least = [int(count > 0 or model.measured or stage not in (0, last)) for stage, count in enumerate(partition.layers)]
    if layers < sum(least):
        raise LaunchError(
            f"parallel.partition={partition} has {sum(least)} stages with layers, but {model.blocks}; choose a model "
            f"with at least {sum(least)}, such as {SMALL}model.layers={sum(least)}"
        )
    parts = [max(*pair) for pair in zip(partition.fitted(layers).layers, least, strict=True)]
    while sum(parts) > layers:
        most = max(range(len(parts)), key=lambda stage: (parts[stage] - least[stage], stage))
        parts[most] -= 1
    return Partition(tuple(parts))


def _require_equal_samples(plans: Sequence[Compared]) -> None:
    """Raises LaunchError where plans would be compared that train for unlike numbers of samples."""
    counts: Mapping[str, int | str] = {plan.name: _length(plan.small) for plan in plans}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise LaunchError(f"plans must be compared after the same number of samples ({shown}); give train.samples=N")


def _length(small: Experiment) -> int | str:
    train = small.train
    if train.iterations is None:
        return train.length
    return train.iterations * small.parallel.global_batch_size
