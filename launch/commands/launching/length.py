"""How many iterations a training has whose epochs or samples are given: known before anything is started.

The samples come one after the other, over the ends of epochs. The last global batch is the last one that they fill:
none of them is taken more often than asked for, and fewer than a global batch of them are left out at the end.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from conf.blocks_of_module import asked_of, can_look, samples_of_module
from conf.schema.adapt import Rule
from conf.schema.experiment import ContainerKind, Experiment
from conf.schema.values.architectures import Family
from conf.visible import plural
from launch.errors import LaunchError


def with_length(experiment: Experiment) -> Experiment:
    """The same experiment with its iterations; where it goes on from a checkpoint, from the one that is the newest now.

    Raises:
        TdppError: the data do not say how many samples an epoch has, or nothing is left to train.
    """
    experiment = _with_intervals(experiment)
    from megatron_ext.checkpoints import meta
    from megatron_ext.contract.errors import EngineError
    from megatron_ext.data.samples import BEGINNING

    train = experiment.train
    size, key = _least_batch(experiment)
    if train.iterations is not None:
        return experiment
    samples = train.samples
    if samples is None:
        instead = "give train.samples or train.iterations"
        samples = (train.epochs or 0) * _in_epoch(experiment, train.length, instead)
    start, load = BEGINNING, train.load
    if load is not None:
        try:
            found = meta.to_load(Path(load), experiment.model.sized(1).identity(), None, str(train.optimizer))
        except EngineError as error:
            raise LaunchError(str(error)) from error
        start, load = found.position, str(found.folder)
    iterations = (samples - start.samples) // size
    if iterations < 1:
        trained = f", and {load} has seen {start.samples} of them" if load is not None else ""
        raise LaunchError(
            f"{train.length}: that is {plural(samples, 'sample')}{trained}: too few for one global batch of "
            f"{key}={size}; train longer, or use a smaller batch"
        )
    return replace(
        experiment, train=replace(train, iterations=start.iteration + iterations, samples=samples, load=load)
    )


def _with_intervals(experiment: Experiment) -> Experiment:
    """The same with intervals in iterations: those nearest to the epochs that are asked for, at least one."""
    epochs = experiment.train.in_epochs
    if not epochs:
        return experiment
    given = " ".join(f"train.{key}={getattr(experiment.train, key)}" for key in epochs)
    if experiment.adapt.rule is not Rule.none:
        raise LaunchError(
            f"{given}: with adapt.rule={experiment.adapt.rule} the batch changes, so an epoch has no fixed number of "
            f"iterations; give iterations"
        )
    each = Fraction(_in_epoch(experiment, given, "give iterations"), experiment.parallel.global_batch_size)
    intervals = {key: max(1, round(count * each)) for key, count in epochs.items()}
    return replace(experiment, train=experiment.train.with_intervals(intervals))


def _least_batch(experiment: Experiment) -> tuple[int, str]:
    """In samples, and its key; where the batch adapts, the smallest one says how many iterations there can be."""
    batch = experiment.parallel.global_batch_size
    if experiment.adapt.rule is Rule.none:
        return batch, "parallel.global_batch_size"
    return experiment.adapt.bounds(batch)[0], "adapt.lower"


def data_there(experiment: Experiment) -> bool:
    """Whether there is any file of the data."""
    prefix = Path(experiment.data.prefix)
    return prefix.parent.is_dir() and any(file.name.startswith(prefix.name) for file in prefix.parent.iterdir())


def samples_in_split(experiment: Experiment, split: str) -> int | None:
    """How many samples a split has before any of them comes again; None where no number says that, as of a blend.

    Raises:
        TdppError: the split cannot be used, or has no sample.
    """
    if experiment.model.family is Family.module:
        return samples_of_module(asked_of(experiment), split)
    from data_prep import training

    return training.samples_in_split(experiment, split)


def readable(experiment: Experiment) -> bool:
    """Whether this machine can look at the data: those of a module may be in its container alone."""
    return experiment.model.family is not Family.module or (
        can_look() and experiment.container.kind is ContainerKind.none
    )


def _in_epoch(experiment: Experiment, given: str, instead: str) -> int:
    """The samples of an epoch, which `given` needs; a message names that and what to give `instead`."""
    model = experiment.model
    if not readable(experiment):
        raise LaunchError(
            f"{given}: the samples of model.code={model.code} can be counted only where its ranks run; {instead}"
        )
    count = samples_in_split(experiment, "train")
    if count is not None:
        return count
    if experiment.data.blend and model.family is not Family.module:
        why = f"the {len(experiment.data.corpora())} corpora of data.blend end at different times"
    elif model.family is Family.module:
        why = f"the data of model.code={model.code} have no end"
    else:
        why = f"with model.family={model.family} every epoch cuts the text into other samples"
    raise LaunchError(f"{given}: {why}, so an epoch has no fixed number of samples; {instead}")
