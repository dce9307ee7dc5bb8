"""Hydra's launcher of `tdpp launch -m`: it composes a batch of combinations, and has all of them run together.

Whatever sweeper there is hands its batches to the launcher, and reads what each combination returned. Hydra's own
launcher ends one job before it composes the next one. Hydra takes plugins from the package `hydra_plugins` alone, which
may lie in several folders; `launch/sweep/hydra_sweep.py` adds this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from launch.sweep.hydra_sweep import CHOICE, BatchTask, SweepLoader


class TdppLauncher(Launcher):
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, BatchTask)
        self._loader = SweepLoader(hydra_context.config_loader)
        hydra_context.config_loader = self._loader  # the sweeper's, too
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        before = HydraConfig.instance().cfg
        try:
            returns = [self._job(number, words) for number, words in enumerate(job_overrides, initial_job_idx)]
        finally:
            HydraConfig.instance().cfg = before
        self._task.end_batch(returns)
        return returns

    def _job(self, number: int, words: Sequence[str]) -> JobReturn:
        """Call the task with a combination, as Hydra's `run_job` does: that copies each configuration four times, which
        is half the time of composing it, for callbacks, logs and files that tdpp has no use of."""
        config = self._loader.combination(self._config, list(words))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        known: Any = HydraConfig.get()
        folder = Path(known.sweep.dir, known.sweep.subdir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with read_write(known.runtime), open_dict(known.runtime):
            known.runtime.output_dir = str(folder)
        with read_write(config), open_dict(config):
            del config["hydra"]
        done = JobReturn(
            overrides=[str(word) for word in known.overrides.task],
            cfg=config,
            hydra_cfg=cast(DictConfig, HydraConfig.instance().cfg),
            working_dir=str(Path.cwd()),
        )
        try:
            self._task(config)
            done.status = JobStatus.COMPLETED
        except Exception as error:  # noqa: BLE001  (raised where the return value is asked for)
            done.return_value, done.status = error, JobStatus.FAILED
        return done


GROUP, _, NAME = CHOICE.partition("=")
ConfigStore.instance().store(
    group=GROUP, name=NAME, node={"_target_": f"{__name__}.{TdppLauncher.__name__}"}, provider=NAME
)
