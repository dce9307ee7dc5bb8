"""The smallest and the largest value of every number of a configuration, checked before anything is computed from it.

The largest ones are far beyond what anybody runs, and small enough that every rule, message and file that follows
takes no more than seconds and megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError

MOST_RANKS = 2**17
"""Of a plan."""
MOST_LAYERS = 10_000
"""Of a model."""
MOST_NODES = 2**16
"""Of a group, and of a node order."""
_ENDLESS = 1e6
"""From here on a reader need not know where a range ends."""


@dataclass(frozen=True)
class Range:
    """Both ends are allowed."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{_plain(self.least)} " + ("or more" if self.most >= _ENDLESS else f"to {_plain(self.most)}")

    def check(self, key: str, value: float) -> None:
        """Raises ConfigError where the value of `key` lies outside."""
        if not self.least <= value:  # nor is what is not a number at all
            raise ConfigError(f"{key}={value} must be at least {_plain(self.least)}")
        if value > self.most:
            raise ConfigError(f"{key}={value} must be at most {_plain(self.most)}")


@dataclass(frozen=True)
class Between(Range):
    """Both ends are of interest to a user."""

    def check(self, key: str, value: float) -> None:
        if not self.least <= value <= self.most:
            raise ConfigError(f"{key}={value} must be between {_plain(self.least)} and {_plain(self.most)}")


@dataclass(frozen=True)
class Fraction(Range):
    """0 or any number above it that is below 1."""

    least: float = 0.0
    most: float = 1.0

    def __str__(self) -> str:
        return "0 or more, below 1"

    def check(self, key: str, value: float) -> None:
        if not 0 <= value < 1:
            raise ConfigError(f"{key}={value} must be at least 0 and less than 1")


@dataclass(frozen=True)
class Positive(Range):
    """Any number above 0, up to `most`."""

    least: float = 0.0
    most: float = 1e9

    def __str__(self) -> str:
        return "above 0" + ("" if self.most >= _ENDLESS else f", up to {_plain(self.most)}")

    def check(self, key: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{key}={value} must be a number above 0")
        super().check(key, value)


@dataclass(frozen=True)
class Part(Range):
    """Of something: neither nothing nor all of it."""

    least: float = 0.0
    most: float = 1.0

    def __str__(self) -> str:
        return "above 0, below 1"

    def check(self, key: str, value: float) -> None:
        if not 0 < value < 1:
            raise ConfigError(f"{key}={value} must be above 0 and below 1")


@dataclass(frozen=True)
class NotNegative(Range):
    """0 or any number above it, up to `most`."""

    least: float = 0.0
    most: float = 1e9

    def __str__(self) -> str:
        return "0 or more" if self.most >= _ENDLESS else f"0 to {_plain(self.most)}"

    def check(self, key: str, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{key}={value} must be a number, at least 0")
        super().check(key, value)


_COUNT = Range(1, 10**9)

RANGES: Mapping[str, Mapping[str, Range]] = {
    "cluster.gpus.*": dict.fromkeys(
        ("memory_gib", "fp32_tflops", "fp16_tflops", "bf16_tflops", "memory_gb_per_s"), Positive()
    ),
    "cluster.groups.*": {
        "count": Range(1, MOST_NODES),
        "gpus_per_node": Range(1, 1024),
        "cpus_per_task": Range(1, 2**16),
        "time_min": Range(1, 10**7),
        "intra_gbit_per_s": Positive(),
        "intra_latency_us": NotNegative(),
        "inter_gbit_per_s": Positive(),
        "inter_latency_us": NotNegative(),
        "price_per_hour": NotNegative(),
    },
    "model": {
        "layers": Range(1, 10_000),
        "hidden": Range(1, 2**20),
        "heads": Range(1, 2**16),
        "sequence_length": Range(1, 2**24),
        "vocab_size": Range(1, 2**27),
        "vocab_multiple": Range(1, 2**20),
        "ffn_hidden": Range(1, 2**22),
        "num_query_groups": Range(1, 2**16),
        "kv_channels": Range(1, 2**16),
        "decoder_layers": Range(1, 10_000),
        "decoder_sequence_length": Range(1, 2**24),
        "norm_epsilon": Positive(most=1.0),
        "rotary_base": Positive(most=1e12),
        "rope_scaling_factor": Positive(most=1e6),
        "hidden_dropout": Fraction(),
        "attention_dropout": Fraction(),
        "label_smoothing": Fraction(),
        "image_size": Range(1, 2**14),
        "channels": Range(1, 2**10),
        "classes": Range(2, 2**24),
        "patch_size": Range(1, 2**14),
        "drop_path": Fraction(),
        "width": Range(1, 2**14),
        "embedding_width": Range(1, 2**20),
        "features": Range(1, 2**20),
        **dict.fromkeys(("embedding_dropout", "input_dropout", "output_dropout", "weight_dropout"), Fraction()),
    },
    "parallel": {
        "tensor": Range(1, 1024),
        "data": Range(1, MOST_RANKS),
        "pipeline": Range(1, 10_000),
        "micro_batch_size": Range(1, 2**20),
        "global_batch_size": Range(1, 2**20),
        "chunks": Range(1, 10_000),
        "update_every": Range(1, 2**20),
    },
    "executor": {
        "master_port": Between(1024, 65535),
        "time_min": Range(1, 10**7),
        "meet_min": Positive(most=10**7),
        "save_s": Between(10, 65535),
        "max_requeues": Range(0, 10**6),
    },
    "elastic": {"min_nodes": _COUNT, "epoch": Range(1, 10**15), "restart_s": NotNegative()},
    "adapt": {
        "target": Part(),
        "lower": _COUNT,
        "upper": _COUNT,
        "every": _COUNT,
        "rate": Part(),
        "smoothing": Range(1, 1000),
        "micro_batch_sizes": Range(1, 2**20),
        "streams": Range(1, 64),
    },
    "train": {
        **dict.fromkeys(("iterations", "epochs"), _COUNT),
        "samples": Range(1, 10**15),
        "seed": Between(0, 2**32 - 1),
        "lr": Positive(most=1e6),
        "min_lr": NotNegative(most=1e6),
        "lr_warmup_iterations": Range(0, 10**9),
        "lr_decay_iterations": _COUNT,
        "lr_step_iterations": _COUNT,
        "lr_gamma": Positive(most=1.0),
        "lr_power": Positive(most=100.0),
        "momentum": Fraction(),
        "weight_decay": NotNegative(most=1e6),
        "adam_beta1": Fraction(),
        "adam_beta2": Fraction(),
        "adam_eps": Positive(most=1.0),
        "clip_grad": NotNegative(),
        "ema": Part(),
        "max_cost": Positive(most=1e12),
        "eval_interval": _COUNT,
        "eval_iterations": _COUNT,
        "log_interval": _COUNT,
        "save_interval": _COUNT,
        "keep_checkpoints": Range(1, 10**6),
        "comm_timeout_s": Range(1, 10**7),
    },
    "data": {
        "weight": Positive(),
        "mask_prob": Part(),
        "short_seq_prob": Between(0.0, 1.0),
        "masking_max_ngram": Range(1, 10**4),
        "bucketing": Range(1, 10**4),
    },
    "data.blend": {"weight": Positive()},
    "data.augment": {
        "padding": Range(0, 2**10),
        "rand_augment": Range(0, 100),
        "rand_augment_magnitude": Between(0.0, 10.0),
        "erasing": Between(0.0, 1.0),
        "mixup": NotNegative(most=1e3),
        "cutmix": NotNegative(most=1e3),
    },
    "profile": {"trace_iteration": Range(1, 10**9), "gpu_interval_s": Range(0, 10**6)},
    "": {"max_jobs": Range(1, 10**6), "confirm_gpu_hours": NotNegative(most=1e12)},
}
"""By the part of a configuration and the key in it; where a rule of the part's own module says more, it stands there
too."""


def check(part: str, values: Any, name: str | None = None, without: Sequence[str] = ()) -> None:
    """Raises ConfigError for a number in `values` that lies outside its range; null, where it is allowed, does not.

    `name` is what a user calls the part, where that is not `part` itself. Keys `without` a range here are not checked.
    """
    before = part if name is None else name
    for key, allowed in RANGES[part].items():
        value = getattr(values, key)
        if key not in without and isinstance(value, (int, float)):
            allowed.check(f"{before}.{key}" if before else key, value)


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
