"""What else would fail only on the ranks, once the nodes were waited for, is found before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from conf.schema.experiment import Experiment, Rehearse
from launch.errors import LaunchError

Preflight = Callable[[Experiment], Sequence[str]]


def preflight(experiment: Experiment) -> Sequence[str]:
    """Returns what is odd about what the run would read; a rehearsal reads nothing.

    Raises:
        TdppError: the data, `train.load` or `parallel.schedule_file` do not fit the experiment.
    """
    # Only a launch needs these, and help and resume do not wait for numpy.
    from data_prep.indexed.check import check_for_training
    from megatron_ext.checkpoints import meta
    from megatron_ext.contract import schedule_check
    from megatron_ext.contract.errors import EngineError

    if experiment.executor.rehearse is not Rehearse.none:
        return ()
    doubts = check_for_training(experiment)
    model, parallel, train = experiment.model, experiment.parallel, experiment.train
    if train.load is not None:
        try:
            meta.to_load(Path(train.load), model.sized(1).identity(), train.iterations)
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
    return doubts
