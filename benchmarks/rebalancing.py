"""python -m benchmarks.rebalancing: replicas of unequal speed begin with even shares, which follow measured times.

Layers sleep: those of replica 1 take three times as long as those of replica 0, which later slows down to half. The
shares are solved again every few iterations (adapt.rebalance), of replicas of one stage and of two. Beside what
iterations take stands what was expected. In the end micro-batches may have other sizes, too.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import sleeping
from benchmarks.accuracy_cases import SLEEPING
from benchmarks.sleeping import Pass
from conf.compose import compose

MICRO_BATCHES, SLOWER, EVERY, ITERATIONS, SLOW_FROM = 8, 3, 3, 14, 8
"""Replica 0 takes twice as long from iteration `SLOW_FROM` on."""
FOLLOWING = ("adapt.rebalance=true", f"adapt.every={EVERY}")
PASS = Pass(forward=0.07, backward=0.14)
"""A pass of a micro-batch on replica 0: in a pipeline on its last stage. Those before it take `FIRST`."""
FIRST = Pass(forward=0.04, backward=0.08)


LAUNCHES = Pass(forward=0.03, backward=0.06)
"""What launching a micro-batch of any size takes."""
RESIZING = ("adapt.rebalance=true", "adapt.every=2", "adapt.micro_batch_sizes=[2,4]")
RESIZED = 7
"""Iterations."""


@dataclass(frozen=True)
class Phase:
    """Iterations with the same shares at the same speeds."""

    stages: int

    shares: tuple[int, ...]
    speeds: tuple[float, ...]
    """How many times as long as `PASS` one micro-batch takes, by replica."""
    took_ms: tuple[float, ...]
    """Its iterations."""

    @property
    def ideal_ms(self) -> float:
        """Computes nothing but sleep."""
        filling = (self.stages - 1) * (FIRST.forward + FIRST.backward)
        each = PASS.forward + PASS.backward
        return max(factor * (n * each + filling) for n, factor in zip(self.shares, self.speeds, strict=True)) * 1e3


def slowness(rank: int, iteration: int) -> float:
    """How many times as long a rank's passes take."""
    return SLOWER if rank % 2 else 2.0 if iteration >= SLOW_FROM else 1.0


@dataclass(frozen=True)
class Sized:
    """An iteration whose micro-batches may have any size."""

    shares: tuple[int, ...]
    sizes: tuple[int, ...]
    took_ms: float
    loss: float


@dataclass(frozen=True)
class Ran:
    """A run."""

    phases: list[Phase]
    losses: list[float]
    reasons: list[str]
    """Reasons of its decisions."""


def measured(folder: Path, *more: str, stages: int = 1, iterations: int = ITERATIONS) -> Ran:
    """Runs two replicas of so many stages with these overrides."""
    experiment = compose(
        [
            *(*SLEEPING, "parallel=single", "parallel.data=2", "parallel.micro_batch_size=1", "model.layers=2"),
            *(f"parallel.global_batch_size={MICRO_BATCHES}", f"train.iterations={iterations}"),
            f"parallel.pipeline={stages}",
            *more,
        ]
    )
    run = sleeping.run(folder, experiment, [*[FIRST] * (stages - 1), PASS], slowness)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    shares: Sequence[int] = (MICRO_BATCHES // 2,) * 2
    decisions = []
    if run.decisions.exists():
        decisions = [json.loads(line) for line in run.decisions.read_text().splitlines()]
    decided = {one["iteration"]: one["shares"] for one in decisions}
    found: list[Phase] = []
    for line in lines:
        iteration = line["iteration"]
        speeds = (slowness(0, iteration), slowness(1, iteration))
        if not found or (found[-1].shares, found[-1].speeds) != (tuple(shares), speeds):
            found.append(Phase(stages, tuple(shares), speeds, ()))
        before = found.pop()
        found.append(replace(before, took_ms=(*before.took_ms, line["elapsed_ms"])))
        shares = decided.get(iteration, shares)
    return Ran(found, [line["loss"] for line in lines], [one["reason"] for one in decisions])


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {MICRO_BATCHES} micro-batches")
    for stages in (1, 2):
        print(f"two replicas of {stages} stage{'s' * (stages > 1)}")
        with tempfile.TemporaryDirectory() as name:
            even = measured(Path(name) / "even", stages=stages)
            followed = measured(Path(name) / "followed", *FOLLOWING, stages=stages)
        compare(even, followed)
    with tempfile.TemporaryDirectory() as name:
        fixed, free = resized(Path(name) / "fixed"), resized(Path(name) / "free", *RESIZING)
    print("micro-batches of 1, 2 or 4 samples, of which each takes the same time")
    both = list(zip(free, fixed, strict=True))
    print(f"largest difference of losses: {max(abs(a.loss / b.loss - 1) for a, b in both):.1e}")
    for number, (one, other) in enumerate(both, 1):
        words = " and ".join(f"{n} of {size}" for n, size in zip(one.shares, one.sizes, strict=True))
        print(f"iteration {number}: {words} samples, {one.took_ms:.0f} ms; with 8 and 8 of 1 {other.took_ms:.0f} ms")


def resized(folder: Path, *more: str, each: Pass = LAUNCHES) -> list[Sized]:
    """Runs two replicas of which each micro-batch takes the same time, however many samples it has."""
    words = ("parallel=single", "parallel.data=2", "parallel.micro_batch_size=1", "parallel.global_batch_size=16")
    experiment = compose([*SLEEPING, *words, "model.layers=2", f"train.iterations={RESIZED}", *more])
    run = sleeping.run(folder, experiment, [each], slowness)
    decided = [json.loads(line) for line in run.decisions.read_text().splitlines()] if run.decisions.exists() else []
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    found: list[Sized] = []
    shares, sizes = (8, 8), (1, 1)
    for line in lines:
        found.append(Sized(shares, sizes, line["elapsed_ms"], line["loss"]))
        for one in decided:
            if one["iteration"] == line["iteration"]:
                shares, sizes = tuple(one["shares"]), tuple(one["micro_batch_sizes"])
    return found


def compare(even: Ran, followed: Ran) -> None:
    """Prints what the iterations of both took."""
    both = zip(even.losses, followed.losses, strict=True)
    print(f"largest difference of losses: {max(abs(a / b - 1) for a, b in both):.1e}")
    for title, one in (("shares stay even", even), ("shares follow", followed)):
        for phase in one.phases:
            ran, shares = statistics.median(phase.took_ms), "-".join(map(str, phase.shares))
            speeds = f"1:{phase.speeds[1] / phase.speeds[0]:g}"
            print(
                f"{title}: {len(phase.took_ms)} iterations with shares {shares} at {speeds}: ideal "
                f"{phase.ideal_ms:.0f} ms, ran {ran:.0f} ms ({ran / phase.ideal_ms - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
