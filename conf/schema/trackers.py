"""Where else a run's log is written: the trackers that people look at."""

from __future__ import annotations

from enum import StrEnum


class Tracker(StrEnum):
    """Each is written by a process of its own, beside the node agent of the last rank (docs/trackers.md)."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"
