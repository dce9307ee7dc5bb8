"""python -m benchmarks.shares: two replicas of unequal speed with even shares and with shares in their proportion.

Both are launched as a user would, with layers that sleep: those of replica 1 take three times as long as those of
replica 0. Beside what ran stand what is predicted of it and the ideal.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fasop.simulation.iteration import Durations
from fasop.simulation.ranks.replay import StageTimes
from fasop.simulation.ranks.shares import Replica, best_shares

ROOT = Path(__file__).resolve().parents[1]
FORWARD_S, SLOWER, ITERATIONS, MICRO_BATCHES, LAYERS = 0.01, 3, 6, 32, 4
"""Seconds of a layer of the fast replica; its backward pass takes twice that."""

MODEL = f"""
import time
import torch
import torch.distributed as dist
from torch import nn


def seconds():
    ranks = dist.get_world_size() if dist.is_initialized() else 2
    slow = dist.is_initialized() and dist.get_rank() % 2
    return {FORWARD_S} * ({SLOWER} if slow else 1)


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(seconds())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * seconds())
        return gradient


class Sleepy(nn.Linear):
    def forward(self, x):
        return Pass.apply(super().forward(x))


def Net():
    return nn.Sequential(*(Sleepy(8, 8) for _ in range({LAYERS})))


def loss(outputs, targets):
    return ((outputs - targets) ** 2).mean()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, number):
        x = torch.full((8,), number / 4096)
        return x, x.flip(0)


def data(split, seed):
    return Numbers()
"""


def measured_ms(folder: Path, stages: int, shares: str) -> float:
    """Milliseconds of an iteration, the median of all but the first two."""
    code = folder / "sleepy.py"
    code.write_text(MODEL)
    name = f"shares-{stages}-{shares}"
    sizes = {"data": 2, "pipeline": stages, "tensor": 1, "partition": "null", "micro_batch_size": 1}
    sizes |= {"global_batch_size": MICRO_BATCHES}
    command = [sys.executable, "-m", "launch.cli", "launch", "model=module", f"model.code={code}:Net", f"name={name}"]
    command += [f"model.layers={LAYERS}", "cluster=local", "executor=local", "container=none", "executor.wait=true"]
    command += [f"parallel.{key}={value}" for key, value in sizes.items()] + [f"parallel.shares={shares}"]
    command += [f"runs_dir={folder}", f"train.iterations={ITERATIONS}", "train.log_interval=1"]
    command += ["train.lr_warmup_iterations=1", "train.checkpoint=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (metrics,) = folder.glob(f"{name}/*/metrics.jsonl")
    times = [json.loads(line)["elapsed_ms"] for line in metrics.read_text().splitlines()]
    return float(statistics.median(times[2:]))


def replicas(stages: int) -> list[Replica]:
    """What is known of the two: nothing but their sleep."""
    found = []
    for slower in (1, SLOWER):
        forward = FORWARD_S * slower * LAYERS / stages
        times = [
            StageTimes(forward=[forward], backward=[2 * forward], send_forward=0.0, send_backward=0.0)
            for _ in range(stages)
        ]
        nothing = [0.0] * stages
        found.append(
            Replica(
                "one_f_one_b",
                1,
                Durations(times=times, gradients=nothing, embedding=0.0, optimizer=nothing, weights=nothing),
            )
        )
    return found


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {MICRO_BATCHES} micro-batches")
    for stages in (1, 2):
        both = replicas(stages)
        best = best_shares(both, MICRO_BATCHES)
        with tempfile.TemporaryDirectory() as name:
            shares = {"1-1": (MICRO_BATCHES // 2,) * 2, "-".join(map(str, best.counts)): best.counts}
            found = {}
            for written, counts in shares.items():
                found[written] = measured_ms(Path(name), stages, written)
                predicted = max(one.seconds(count) for one, count in zip(both, counts, strict=True)) * 1e3
                print(
                    f"{stages} stage{'s' * (stages > 1)}, shares {written}: predicted {predicted:.0f} ms, ran "
                    f"{found[written]:.0f} ms ({found[written] / predicted - 1:+.1%})"
                )
        even, uneven = found.values()
        print(f"{stages} stage{'s' * (stages > 1)}: {even / uneven:.2f} times as fast")


if __name__ == "__main__":
    main()
