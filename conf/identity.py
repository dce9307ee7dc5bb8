"""How two configurations compare: whether they are the same run, and which keys can change an iteration's time.

Two configurations are the same run where what is trained is the same, and on which nodes. Runs that differ only in keys
that cannot change how long an iteration takes can be compared in what they learned, not in how fast they were.

Keys can change the time, unless what they set only says how long a training goes on, or how large its numbers are:

- Whole numbers of `train` count iterations, epochs, samples and seeds, and its texts say where a training begins and
  ends. Those by which checkpoints are saved between iterations can, since the log has that time.
- The learning rate is a number like any other.
- Real numbers of `train` and `model` scale what is computed. They matter by being 0 or not: without dropout, clipping
  or momentum there is less to do.
- Names only name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from conf.schema.model import Model
from conf.schema.train import Train

if TYPE_CHECKING:
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
    "cluster.groups.*.failures_per_day",
    "cluster.restart_s",
    "cluster.checkpoint_gb_per_s",
    "cluster.gpus.*.watts",
    "cluster.groups.*.sbatch",
    "cluster.sbatch",
    "cluster.exclude",
    "cluster.carbon_g_per_kwh",
    "container.image_dir",
    "container.reload",
    "data.cache",
    "executor.wait",
    "executor.master_port",
    "executor.time_min",
    "executor.meet_min",
    "executor.save_s",
    "executor.max_requeues",
    "executor.after",
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


SAVING = ("save_interval", "save_memory", "best")
"""Keys of `train` by which checkpoints are saved between iterations."""
ENDING = ("max_cost",)
"""Real numbers of `train` that say when a training ends."""
SCALES = ("lr", "min_lr", "lora_alpha", "outer_lr")
"""Real numbers of `train` that others are multiplied by."""
WORK = ("lora_rank", "sync_every")
"""Whole numbers of `train` that say what an iteration computes."""
NAMES = ("model.name", "cluster.name")
_TYPES = {
    f"{part}.{one.name}": re.sub(r"Optional\[(.*)\]|(.*) \| None", r"\1\2", str(one.type))
    for part, of in (("train", Train), ("model", Model))
    for one in fields(of)
}
_COUNTS, _TEXTS, _REAL = ("int", "Interval"), ("str",), "float"


def of_speed(settings: Mapping[str, str]) -> dict[str, str]:
    """Those of the settings, by their keys, that can change how long an iteration takes; of a number that matters by
    being 0 alone, whether it is."""
    found = {key: _of_speed(key, value) for key, value in settings.items()}
    return {key: value for key, value in found.items() if value is not None}


def _of_speed(key: str, value: str) -> str | None:
    part, _, name = key.partition(".")
    kind = _TYPES.get(key)
    if key in NAMES:
        return None
    if part == "train" and name not in SAVING:
        scale = name.startswith("lr_") or name in SCALES
        if scale or name in ENDING or (kind in (*_COUNTS, *_TEXTS) and name not in WORK):
            return None
    return _whether_0(value) if kind == _REAL else value


def _whether_0(value: str) -> str:
    try:
        number = json.loads(value)
    except ValueError:
        return value
    return "not 0" if isinstance(number, float | int) and number else "0"
