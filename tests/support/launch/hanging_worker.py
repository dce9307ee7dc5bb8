"""The engine's worker, one rank of which sleeps for ever: HANG_RANK, in HANG_AT, told as `cluster.environment`.

Where that is something of an iteration, from iteration HANG_FROM on, or the third.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_ext import rank_processes, worker
from megatron_ext.checkpoints import tensors
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.engine import engine
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.optimizer import optimizer
from megatron_ext.families.gpt.task import GptTask
from megatron_ext.tasks.stage import Stage

RANK, AT = int(os.environ["HANG_RANK"]), os.environ["HANG_AT"]
ITERATION = int(os.environ.get("HANG_FROM", "3"))
PLACES = {
    "start": (worker, "train"),
    "weights": (engine, "FlatWeights"),
    "batch": (GptSamples, "batch"),
    "forward": (Stage, "forward"),
    "loss": (GptTask, "loss"),
    "optimizer": (optimizer.Optimizer, "step"),
    "checkpoint": (tensors, "parts"),
}
now = {"rank": -1, "iteration": 0}


def sleeping(does: Callable[..., Any], begins: int) -> Callable[..., Any]:
    """The same, which this rank never comes out of from an iteration on."""

    def sleeps(*arguments: Any, **named: Any) -> Any:
        if now["rank"] == RANK and now["iteration"] >= begins:
            time.sleep(1e6)
        return does(*arguments, **named)

    return sleeps


def main(argv: list[str]) -> int:
    begun, step = rank_processes._rank_main, Engine.step

    def rank_main(plan: Any, place: Any, *rest: Any) -> int:
        now["rank"] = place.rank
        return begun(plan, place, *rest)

    def counted(self: Engine, iteration: int) -> Any:
        now["iteration"] = iteration
        return step(self, iteration)

    rank_processes._rank_main = rank_main
    Engine.step = counted
    owner, name = PLACES[AT]
    setattr(owner, name, sleeping(getattr(owner, name), 0 if AT in ("start", "weights") else ITERATION))
    return worker.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
