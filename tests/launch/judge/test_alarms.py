"""What happens to a run that goes on is told once with its cause, and a quiet run raises no alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from conf.run_folder.gpu_lines import HARDWARE_HEAT, GpuEntry, GpuReading, GpuSample, GpuTrouble
from launch.judge.alarms import Alarm, alarms
from launch.observe.iterations import Iteration, SampleWait
from tests.support.cases import fast_first

GPU = GpuSample(
    index=0, uuid="GPU-0", name="A10", utilisation=90, memory_used_mib=1, memory_total_mib=2, power_w=100,
    power_limit_w=150, temperature_c=50, processes=(), clocks=(),
)  # fmt: skip


def log(seed: int, slows: float = 1.0, jump: float = 0.0) -> list[Iteration]:
    """Five hours of lines; from the middle on iterations take `slows` times as long, and there the loss jumps."""
    drawn = random.Random(seed)
    usual, noise = drawn.uniform(80, 5000), drawn.uniform(0.005, 0.06)
    each_s = max(10 * usual / 1000, 5.0)
    count = int(5 * 3600 / each_s)
    scatter, drift, lines = drawn.uniform(0.002, 0.02), 0.0, []
    for at in range(count):
        drift = 0.95 * drift + drawn.gauss(0, 0.003)  # neighbours on the network come and go
        pause = drawn.uniform(1.2, 3) if drawn.random() < 0.02 else 1.0  # evaluations, checkpoints
        warm = 3.0 if at == 0 else 1.0
        ms = usual * warm * pause * (1 + drift) * max(0.5, drawn.gauss(1, noise)) * (slows if at > count / 2 else 1)
        loss = 2 + 9 * (at + 1) ** -0.4
        loss *= 1 + drawn.gauss(0, scatter) + (jump if at == int(0.9 * count) else 0)
        lines.append(Iteration(iteration=10 * at, unix=1e9 + at * each_s, elapsed_ms=ms, loss=loss, nan=0))
    return lines


def readings(seed: int, hot: float = 0.0, trouble: str | None = None) -> dict[str, list[GpuEntry]]:
    """An hour of them of two nodes, of which a part `hot` of the second node's shows heat."""
    drawn = random.Random(seed)
    found: dict[str, list[GpuEntry]] = {"n0": [], "n1": []}
    for node, part in (("n0", drawn.uniform(0, 0.05)), ("n1", max(hot, drawn.uniform(0, 0.05)))):
        for number in range(1, 361):
            gpu = (
                replace(GPU, clocks=(HARDWARE_HEAT,)) if drawn.random() < part else replace(GPU, clocks=("power cap",))
            )
            unix = 1_000_000_000 + 10 * number
            found[node].append(GpuReading(unix=unix, host=node, number=number, interval_s=10, gpus=(gpu,)))
    if trouble is not None:
        found["n1"].insert(100, GpuTrouble(unix=1_000_001_000, text=trouble))
    return found


def waited(lines: list[Iteration], seed: int, later: float = 0.0) -> dict[str, list[SampleWait]]:
    """Two ranks' waits minute by minute; from the middle on the second waits longer by a part `later` of an iteration.

    Files are cold in the first minutes, the file system's speed drifts, and now and then others use it."""
    drawn = random.Random(seed)
    usual = drawn.choice([0.2, 0.01, 0.1]) * lines[-1].elapsed_ms
    begin, end = lines[0].unix, lines[-1].unix
    found: dict[str, list[SampleWait]] = {"rank 0 on n0": [], "rank 7 on n1": []}
    for rank, of in found.items():
        drift = 0.0
        for minute in range(1, int((end - begin) / 60)):
            drift = 0.9 * drift + drawn.gauss(0, 0.03)
            ms = usual * math.exp(drift + drawn.gauss(0, 0.1)) * (5 if minute < 4 else 1)
            ms *= drawn.uniform(2, 20) if drawn.random() < 0.05 else 1
            late = later * lines[-1].elapsed_ms if rank == "rank 7 on n1" and minute * 60 > (end - begin) / 2 else 0.0
            of.append(SampleWait(iteration=minute, unix=begin + 60 * minute, wait_ms=ms + late))
    return found


def raised(
    lines: list[Iteration], gpus: dict[str, list[GpuEntry]], waits: dict[str, list[SampleWait]] | None = None
) -> list[Alarm]:
    return alarms(lines[:4000], lines[-12_000:], gpus, waits or {})


TENS = fast_first(1, [(first,) for first in range(0, 50, 10)])
"""Of fifty runs."""


@pytest.mark.parametrize("first", TENS)
def test_fifty_quiet_runs_raise_none_whenever_they_are_looked_at(first: int) -> None:
    for seed in range(first, first + 10):
        lines, gpus = log(seed), readings(seed)
        for part in (0.05, 0.3, 0.6, 1.0):
            until = lines[: int(part * len(lines))]
            assert raised(until, gpus, waited(until, seed)) == [], seed


@pytest.mark.parametrize("first", TENS)
def test_losses_that_now_and_then_lie_far_above_the_others_raise_none(first: int) -> None:
    """As those of data with a few hard samples do: normal noise, each divided by the size of another."""
    for seed in range(first, first + 10):
        drawn = random.Random(seed)
        lines = [
            Iteration(iteration=at, unix=1e9 + 10 * at, elapsed_ms=1000.0, nan=0, loss=2 + 9 * (at + 1) ** -0.4)
            for at in range(1500)
        ]
        noise = (1 + 0.01 * drawn.gauss(0, 1) / max(0.2, abs(drawn.gauss(0, 1))) for _ in lines)
        far = [replace(line, loss=line.loss * one) for line, one in zip(lines, noise, strict=True) if line.loss]
        assert raised(far, {}) == [], seed
        far[1200] = replace(far[1200], loss=1.6 * (far[1200].loss or 0.0))
        far[95] = replace(far[95], loss=1.7 * (far[95].loss or 0.0))  # too early to be told
        (alarm,) = raised(far, {})
        assert alarm.kind == "loss-spike" and " at iteration 1200, " in alarm.text, seed
        far[420] = replace(far[420], loss=1.6 * (far[420].loss or 0.0))
        (alarm,) = raised(far, {})
        assert " at iteration 420, " in alarm.text, seed


TROUBLES: dict[str, tuple[Callable[[int], list[Alarm]], str, str]] = {
    "slow by 5 %": (lambda seed: raised(log(seed, slows=1.05), readings(seed)), "slower", "(+"),
    "slow by heat": (
        lambda seed: raised(log(seed, slows=1.3), readings(seed, hot=0.5)),
        "slower",
        "GPU 0 of n1 is slowed",
    ),
    "hot": (lambda seed: raised(log(seed), readings(seed, hot=0.5)), "throttled", "GPU 0 of n1 is slowed down by heat"),
    "xid": (lambda seed: raised(log(seed), readings(seed, trouble="Xid 79: off the bus")), "gpu-fault", "n1: Xid 79"),
    "late data": (
        lambda seed: raised(log(seed), readings(seed), waited(log(seed), seed, later=0.15)),
        "late-data",
        "rank 7 on n1 waited ",
    ),
    "slow by late data": (
        lambda seed: raised(log(seed, slows=1.3), readings(seed), waited(log(seed), seed, later=0.3)),
        "slower",
        "; rank 7 on n1 waited ",
    ),
    "loss": (lambda seed: raised(log(seed, jump=0.5), readings(seed)), "loss-spike", "the loss jumped to "),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_each_trouble_is_told_with_its_cause(trouble: str) -> None:
    look, kind, text = TROUBLES[trouble]
    found = 0
    for seed in range(20):
        told = [alarm for alarm in look(seed) if alarm.kind == kind]
        assert len(told) <= 1
        found += bool(told) and text in told[0].text
    assert found >= (15 if trouble == "slow by 5 %" else 20)  # 5 % is within the noise of some of these runs


def test_an_hour_must_have_passed_and_lines_be_enough() -> None:
    lines = log(1, slows=2.0)
    assert alarms(lines, lines, {}) != []
    assert alarms([], [], {}) == []
    few = lines[:: len(lines) // 30]
    assert alarms(few, few, {}) == []
