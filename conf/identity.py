"""When two configurations are the same run: what is trained is the same, and on which nodes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from conf.schema.experiment import Experiment

NOT_OF_THE_RUN = (
    "name",
    "runs_dir",
    "runs_mode",
    "dry_run",
    "skip_existing",
    "max_jobs",
    "confirm_gpu_hours",
    "yes",
    "sweep_metric",
    "log",
    "notify",
    "cluster.groups.*.account",
    "cluster.groups.*.qos",
    "cluster.groups.*.time_min",
    "cluster.groups.*.price_per_hour",
    "container.image_dir",
    "container.reload",
    "data.cache",
    "executor.wait",
    "executor.master_port",
    "executor.time_min",
    "executor.meet_min",
    "executor.save_s",
    "executor.max_requeues",
    "train.comm_timeout_s",
)
"""Where a run is written, how it is submitted, who pays, and how long it may take; `*` is any key."""


def identity(experiment: Experiment) -> str:
    """A text that is the same for two configurations if and only if they are the same run."""
    content = asdict(experiment)
    for path in NOT_OF_THE_RUN:
        _remove(content, path.split("."))
    return json.dumps(content, sort_keys=True)


def _remove(content: dict[str, Any], path: list[str]) -> None:
    first, *rest = path
    for key in list(content) if first == "*" else [first]:
        if rest:
            _remove(content[key], rest)
        else:
            del content[key]
