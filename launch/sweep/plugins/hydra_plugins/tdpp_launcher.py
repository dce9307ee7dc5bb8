"""Hydra's launcher of `tdpp launch -m`: it composes a batch of combinations, and has all of them run together.

Whatever sweeper there is hands its batches to the launcher, and reads what each combination returned. Hydra's own
launcher ends one job before it composes the next one. Hydra takes plugins from the package `hydra_plugins` alone, which
may lie in several folders; `launch/sweep/hydra_sweep.py` adds this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from launch.sweep.hydra_sweep import CHOICE, BatchTask, SweepLoader


class TdppLauncher(Launcher):
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, BatchTask)
        self._loader = SweepLoader(hydra_context.config_loader)
        hydra_context.config_loader = self._loader  # the sweeper's, too
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        returns = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self._loader.combination(self._config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            returns.append(
                run_job(
                    task_function=self._task,
                    config=config,
                    job_dir_key="hydra.sweep.dir",
                    job_subdir_key="hydra.sweep.subdir",
                    hydra_context=self._context,
                )
            )
        self._task.end_batch(returns)
        return returns


GROUP, _, NAME = CHOICE.partition("=")
ConfigStore.instance().store(
    group=GROUP, name=NAME, node={"_target_": f"{__name__}.{TdppLauncher.__name__}"}, provider=NAME
)
