"""What else would fail only on the ranks, once the nodes were waited for, is found before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from conf.blocks_of_module import asked_of, blocks_of, can_look
from conf.schema.experiment import ContainerKind, Experiment, Rehearse
from conf.schema.model import Family
from launch.errors import LaunchError

Preflight = Callable[[Experiment], Sequence[str]]


def _check_module(experiment: Experiment) -> list[str]:
    """Raises a TdppError for a module that cannot be trained, as far as this machine can tell."""
    model = experiment.model
    if not can_look() or experiment.container.kind is not ContainerKind.none:
        return [f"model.code={model.code} is looked at when the run starts, where its ranks are"]
    count = len(blocks_of(asked_of(experiment)))
    if count != model.layers:
        raise LaunchError(f"model.layers={model.layers}, but model.code={model.code} has {count} blocks; leave it out")
    return []


def preflight(experiment: Experiment) -> Sequence[str]:
    """Returns what is odd about what the run would read; a rehearsal reads nothing.

    Raises:
        TdppError: the data, `train.load` or `parallel.schedule_file` do not fit the experiment.
    """
    # Only a launch needs these, and help and resume do not wait for numpy.
    from data_prep.training import check_for_training
    from megatron_ext.checkpoints import meta
    from megatron_ext.contract import schedule_check, schedules
    from megatron_ext.contract.errors import EngineError

    if experiment.executor.rehearse is not Rehearse.none:
        return ()
    doubts = _check_module(experiment) if experiment.model.family is Family.module else check_for_training(experiment)
    model, parallel, train = experiment.model, experiment.parallel, experiment.train
    if train.load is not None:
        try:
            meta.to_load(Path(train.load), model.sized(1).identity(), train.iterations, str(train.optimizer))
        except EngineError as error:
            raise LaunchError(str(error)) from error
    if parallel.schedule_file is not None:
        path = Path(parallel.schedule_file)
        try:
            schedule_check.read(path, parallel.pipeline, parallel.chunks, parallel.micro_batches)
        except EngineError as error:
            raise LaunchError(
                f"parallel.schedule_file={error}; 'python -m megatron_ext.schedule' prints those that have a name"
            ) from error
    if not parallel.layout.even:
        count = parallel.global_batch_size // parallel.micro_batch_size
        actions = schedules.replicated(str(parallel.schedule), parallel.layout.replicas, count)
        schedule_check.check_replicas(actions, parallel.chunks, count)
    return doubts
