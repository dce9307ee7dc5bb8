"""python -m benchmarks.simulation: the CPU seconds of simulated trainings, and one beside a run whose layers sleep.

The first part plays 90 epochs on 64 sets of nodes with each rule. The second trains two replicas of unequal speed with
adapt.rule=noise, and plays the same training with the noise that this run measured.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import sleeping
from benchmarks.accuracy_cases import SLEEPING
from benchmarks.sleeping import Pass
from conf.compose import compose
from fasop.trainings.noise import measured
from fasop.trainings.play import Player, State, Training
from launch.commands.simulate import played
from launch.commands.simulating.arguments import parse
from megatron_ext.contract.adaptive.shares import Times, longest

EPOCH, EPOCHS = 1_281_167, 90
WORDS = (
    *("cluster=a100x8_a10x8", "cluster.groups.a100.count=4", "cluster.groups.a10.count=12", "model=xl", "train=gpt2"),
    *(
        "train.precision=fp16",
        "parallel.tensor=4",
        "parallel.pipeline=1",
        "parallel.data=32",
        "parallel.partition=null",
    ),
    *("parallel.global_batch_size=64", "parallel.micro_batch_size=1", f"train.epochs={EPOCHS}", f"epoch={EPOCH}"),
    *("adapt.upper=4096", "noise=100,3000"),
)
RULES = ("noise", "similarity", "goodput")
PASS, SLOWER, SAMPLES = Pass(forward=0.03, backward=0.06), 3, 400
"""Of a micro-batch on replica 0; how many times as long replica 1 takes; of the run whose layers sleep."""


class Sleepers:
    """The replicas of that run, with nothing but sleep."""

    weights = (6, 2)
    sizes = None
    micro_batch_s = tuple(factor * (PASS.forward + PASS.backward) for factor in (1, SLOWER))

    def seconds(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> float:
        return longest(self.micro_batch_s, shares)

    def times(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Times:
        return Times(self.micro_batch_s, self.seconds(shares))


def slept(folder: Path) -> tuple[float, float, list[int]]:
    """Seconds of the run without its first iteration, the same simulated, and the batches of the run."""
    adapt = ("adapt.rule=noise", "adapt.lower=4", "adapt.upper=24", "adapt.every=3", "adapt.smoothing=2")
    words = [word for word in SLEEPING if not word.startswith("train.iterations")]
    given = (
        "parallel=single",
        "parallel.data=2",
        "parallel.micro_batch_size=1",
        "model.layers=2",
        "parallel.shares=6-2",
    )
    batch = ("parallel.global_batch_size=8", f"train.samples={SAMPLES}", f"train.iterations={SAMPLES // 4}")
    composed = compose([*words, *given, *batch[:2], *adapt, "train.iterations=null"])

    experiment = replace(composed, train=replace(composed.train, iterations=SAMPLES // 4))
    run = sleeping.run(folder, experiment, [PASS], lambda rank, _: SLOWER if rank else 1.0)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    decisions = [json.loads(line) for line in run.decisions.read_text().splitlines()]
    points = {float(one["consumed_samples"]): one["noise_scale"] for one in reversed(decisions)}
    training = Training(
        adapt=experiment.adapt.planned(8),
        micro_batch_size=1,
        global_batch_size=8,
        samples=float(SAMPLES),
        noise=measured(sorted(points.items()), "this run"),
    )
    simulated = [*Player(training, Sleepers(), State(0, 0.0, 8)).play()]
    seconds = sum(one.iterations * one.seconds for one in simulated) - simulated[0].seconds
    return sum(line["elapsed_ms"] for line in lines[1:]) / 1e3, seconds, [line["global_batch_size"] for line in lines]


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    played(parse([*WORDS, "adapt.rule=noise", "nodes=a10"]))  # imports
    for rule in RULES:
        began = time.process_time()
        results, _ = played(parse([*WORDS, f"adapt.rule={rule}"]))
        iterations = sum(one.iterations for one in results.trainings)
        print(
            f"{rule}: {EPOCHS} epochs on {len(results.trainings)} sets of nodes, {iterations:,} iterations: "
            f"{time.process_time() - began:.2f} CPU s"
        )
    with tempfile.TemporaryDirectory() as name:
        ran, simulated, batches = slept(Path(name))
    print(
        f"layers that sleep: {len(batches)} iterations with batches of {min(batches)} to {max(batches)}: "
        f"ran {ran:.1f} s, simulated {simulated:.1f} s ({simulated / ran - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
