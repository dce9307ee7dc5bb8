"""python -m benchmarks.zero: iterations of each stage of ZeRO over a slow link, predicted and taken; docs/accuracy.md.

Two or four ranks train a small GPT whose layers compute and then sleep, one by one, so that weights and gradients go on
beside them as beside a GPU's kernels. Their loopback is a network of its own, as slow as `tc` makes it, so this needs
root on Linux. A layer's passes are measured with one rank.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import sleeping
from benchmarks.accuracy import Outcome, outcome, summary, told
from benchmarks.accuracy_cases import NOTHING, Case, Ends, given_profile, plan_words, stood_for
from benchmarks.sleeping import Pass, Sleep
from fasop.costs.profiles.profile import Cost
from fasop.costs.sizes import layer_parameters
from fasop.simulation.predict import predict_plan
from megatron_ext.engine import engine
from megatron_ext.tasks.stage import Stage
from reports.facts.measured import measure

CLONE_NEWNET = 0x40000000
SLEEP = Pass(forward=0.060, backward=0.120)
"""A layer's, in seconds."""
GBIT_PER_S = 1
LAYERS = 6
MODEL = (
    *("model=tiny", "model.hidden=512", "model.heads=8", "model.sequence_length=32", "train=demo"),
    *("train.checkpoint=false", "train.iterations=6", "train.log_interval=1", "train.lr_warmup_iterations=1"),
    *(f"cluster.groups.local.intra_gbit_per_s={GBIT_PER_S}", "cluster.groups.local.intra_latency_us=200"),
)
ZERO = (0, 1, 2, 3)
PLANS = (("1x2x1", "6", 1), ("1x2x1", "6", 4), ("2x2x1", "3-3", 4))
"""Stages x replicas x tensor size, layers, micro-batches of a replica."""


class SleepingLayers(Stage):
    """Each layer computes, and then sleeps."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        for block, module in zip(self.part.blocks, self.blocks, strict=True):
            if block.name not in ("embedding", "head"):
                _then_sleep(module)


def _then_sleep(module: nn.Module) -> None:
    forward = module.forward

    def later(*taken: Any) -> Any:
        return Sleep.apply(forward(*taken), SLEEP.forward, lambda: time.sleep(SLEEP.backward))  # type: ignore[no-untyped-call]

    module.forward = later


def slow_loopback() -> None:
    """Gives this process, and those that it starts, a network in which there is nothing but a slow loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise SystemExit("a network of its own needs root: sudo python -m benchmarks.zero")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def set_rate(pairs: int) -> None:
    """What two replicas send each other crosses the loopback in both ways, and so does what other pairs send."""
    rate = f"{2 * GBIT_PER_S * pairs}gbit"
    words = ["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    subprocess.run(words, check=True)


def of_one_rank() -> tuple[Cost, Ends]:
    """A layer's milliseconds, with its part of what the ends of the model take, and the optimizer."""
    case = Case(name="alone", overrides=(*MODEL, f"model.layers={LAYERS}", *plan_words("1x1x1", str(LAYERS), 4)))
    with tempfile.TemporaryDirectory() as folder:
        stage = measure(sleeping.run(Path(folder), case.experiment, None)).stages[0]
    layer = Cost(forward=stage.forward[0] * 1e3 / LAYERS, backward=stage.backward[0] * 1e3 / LAYERS)
    parameters = LAYERS * layer_parameters(case.experiment.model, 1)
    return layer, Ends(pass_ms=NOTHING, optimizer_ns=stage.optimizer * 1e9 / parameters)


def main() -> None:
    slow_loopback()
    engine.Stage = SleepingLayers  # type: ignore[attr-defined, assignment]
    set_rate(1)
    layer, ends = of_one_rank()
    done = list[Outcome]()
    for sizes, partition, micro_batches in PLANS:
        set_rate(int(sizes[0]))
        for zero in ZERO:
            given = (f"model.layers={LAYERS}", f"parallel.zero={zero}")
            words = (*MODEL, *plan_words(sizes, partition, 2 * micro_batches, *given))
            case = Case(name=f"ZeRO {zero}, {micro_batches} micro-batches", overrides=words, nodes="local")
            known = given_profile(case.experiment, "local", layer, ends)
            with tempfile.TemporaryDirectory() as folder:
                run = sleeping.run(Path(folder), case.experiment, None)
                done.append(outcome(case, predict_plan(stood_for(case, known)), run))
            print(f"{done[-1].error:+7.1%}  {sizes} {case.name}", file=sys.stderr, flush=True)
    print(f"{summary(done)}\n", *told(done), sep="\n")


if __name__ == "__main__":
    main()
