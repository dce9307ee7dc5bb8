"""Weights & Biases: online, or with WANDB_MODE=offline in the run's folder, for `wandb sync`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

from launch.tracking.series import Point
from launch.tracking.subject import Subject


class WandB:
    """Online a start goes on behind the last step that Weights & Biases has. Offline it writes a folder with all
    points, in the place of the one before: `wandb sync` does not join folders of one run."""

    def __init__(self, subject: Subject) -> None:
        import wandb

        for folder in (subject.folder / "wandb").glob(f"offline-run-*-{subject.id}"):
            shutil.rmtree(folder)
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or subject.group,
            id=subject.id,
            name=subject.name,
            notes=subject.overrides,
            config=dict(subject.parameters) | {"commit": subject.commit},
            dir=str(subject.folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        offline = self._run.settings.mode == "offline"
        self._from = 0 if offline else self._run.step
        self.place = str(subject.folder / "wandb") if offline else str(self._run.url)

    def write(self, points: Iterable[Point]) -> None:
        for point in points:
            if point.iteration >= self._from:
                self._run.log(dict(point.values), step=point.iteration)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
        self._teardown()  # it may still be writing
