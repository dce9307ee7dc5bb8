"""What a run tells: Megatron's log lines for people and their scripts, metrics.jsonl for programs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Dict

from megatron_ext.optimizer import learning_rate
from megatron_ext.plan import Plan


def iteration_line(plan: Plan, metrics: Dict[str, Any]) -> str:
    """One line in Megatron's format from one object of metrics.jsonl."""
    return (
        " iteration {:8d}/{:8d} | consumed samples: {:12d} | elapsed time per iteration (ms): {:.1f} | "
        "learning rate: {:.3E} | global batch size: {:5d} | lm loss: {:.6E} | loss scale: 1.0 | grad norm: {:.3f} | "
        "number of skipped iterations: {:3d} | number of nan iterations: {:3d} |"
    ).format(
        metrics["iteration"],
        plan.train.iterations,
        metrics["consumed_samples"],
        metrics["elapsed_ms"],
        metrics["learning_rate"],
        plan.global_batch_size,
        metrics["loss"],
        metrics["grad_norm"],
        metrics["skipped"],
        metrics["nan"],
    )


class TrainingLog:
    """Gathers iterations and, every `log_interval` of them, prints a line and appends to metrics.jsonl."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan = plan
        self._path = path
        self._losses = 0.0
        self._count = 0
        self._since = time.monotonic()

    def add(self, iteration: int, loss: float, grad_norm: float) -> None:
        """Notes a finished iteration."""
        self._losses += loss
        self._count += 1
        train = self._plan.train
        if iteration % train.log_interval and iteration != train.iterations:
            return
        now = time.monotonic()
        seconds = (now - self._since) / self._count
        metrics = {
            "iteration": iteration,
            "unix": time.time(),
            "consumed_samples": iteration * self._plan.global_batch_size,
            "elapsed_ms": seconds * 1e3,
            "learning_rate": learning_rate(iteration, train),
            "loss": self._losses / self._count,
            "grad_norm": grad_norm,
            "tokens_per_s": self._plan.global_batch_size * self._plan.model.sequence_length / seconds,
            "skipped": 0,
            "nan": 0,
        }
        print(iteration_line(self._plan, metrics), flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        self._losses, self._count, self._since = 0.0, 0, now
