"""What a run's GPUs say about it: a hang is seen, and a run that computes is never taken for one that hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conf.run_folder.gpu_lines import GpuEntry, GpuProcess, GpuReading, GpuSample, GpuTrouble
from launch.judge.gpu_health import GRACE_S, hang, summary
from launch.observe.observation import READINGS, NodeGpus

NOW = 1_000_000
OURS = (GpuProcess(pid=1, memory_mib=11000, ours=True),)
OTHERS = (GpuProcess(pid=2, memory_mib=11000, ours=False),)
UNSEEN = (GpuProcess(pid=3, memory_mib=11000, ours=None),)

WORK = GpuSample(
    index=0,
    uuid="GPU-0",
    name="NVIDIA A10",
    utilisation=97,
    memory_used_mib=11468,
    memory_total_mib=22731,
    power_w=140,
    power_limit_w=150,
    temperature_c=60,
    processes=OURS,
)
SPIN = replace(WORK, utilisation=100, power_w=66)
REST = replace(WORK, utilisation=0, power_w=55)
HALF = replace(WORK, utilisation=40, power_w=60)
LOST = GpuSample(index=0, uuid="GPU-0", name="NVIDIA A10", fault="GPU is lost")


def reading(gpus: Sequence[GpuSample], unix: int, number: int) -> GpuReading:
    placed = tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))
    return GpuReading(unix=unix, host="n060", number=number, interval_s=10, gpus=placed)


def node(*gpus: GpuSample, number: int = 100, age: int = 5, name: str = "a-0", ranks: int = 0) -> NodeGpus:
    """The same reading three times, the last one `age` seconds ago."""
    entries = tuple(reading(gpus, NOW - age - 10 * back, number - back) for back in reversed(range(READINGS)))
    return NodeGpus(node=name, ranks=ranks or len(gpus), entries=entries)


def then(before: NodeGpus, *entries: GpuEntry) -> NodeGpus:
    return replace(before, entries=(*before.entries, *entries))


EARLY = GRACE_S // 10 + 1
"""The number of a reading when the grace is just not over."""
LONG_AGO = NOW - 800

HANGS = {
    "all wait for one another": (
        [node(SPIN, SPIN), node(SPIN, SPIN, name="a-1")],
        "gpu-spin",
        "4 of 4 GPUs only wait (full utilisation, but little power: 66 of 150 W), and no iteration is logged",
    ),
    "all wait for one that does nothing": (
        [node(SPIN, SPIN), node(SPIN, REST, name="a-1")],
        "gpu-spin",
        "3 of 4 GPUs only wait (full utilisation, but little power: 66 of 150 W), and no iteration is logged; "
        "idle: GPU 1 of a-1",
    ),
    "a GPU without process": (
        [node(WORK, replace(REST, processes=()))],
        "gpu-idle",
        "no process of the run uses GPU 1 of a-0, and no iteration is logged",
    ),
    "GPUs with other people's processes only": (
        [node(replace(WORK, processes=OTHERS), replace(REST, processes=OTHERS), replace(REST, processes=()))],
        "gpu-idle",
        "no process of the run uses GPU 0 of a-0 and 2 others, and no iteration is logged",
    ),
    "a lost GPU": (
        [node(WORK), node(SPIN, LOST, name="a-1")],
        "gpu-lost",
        "GPU 1 of a-1 can no longer be read: GPU is lost; no iteration is logged",
    ),
    "a GPU beyond those of the plan may do what it likes": (
        [node(SPIN, SPIN, WORK, ranks=2)],
        "gpu-spin",
        "2 of 2 GPUs only wait (full utilisation, but little power: 66 of 150 W), and no iteration is logged",
    ),
}


@pytest.mark.parametrize(("nodes", "rule", "reason"), HANGS.values(), ids=HANGS.keys())
def test_a_hang_is_seen(nodes: list[NodeGpus], rule: str, reason: str) -> None:
    assert hang(nodes, NOW, LONG_AGO) == (rule, reason)


WORKS = {
    "nothing told": [NodeGpus(node="a-0", ranks=1, entries=())],
    "no node": [],
    "at work": [node(WORK, WORK)],
    "one works, the others wait for it": [node(SPIN, SPIN), node(SPIN, WORK, name="a-1")],
    "between two things": [node(SPIN, HALF)],
    "all at rest, as when a checkpoint is read": [node(REST, REST)],
    "power that is not told": [node(replace(SPIN, power_w=None), SPIN)],
    "a limit that is not told": [node(replace(SPIN, power_limit_w=None), SPIN)],
    "utilisation that is not told, as of MIG": [node(replace(SPIN, utilisation=None))],
    "a process that may be ours": [node(replace(REST, processes=UNSEEN))],
    "processes that are not told": [node(replace(REST, processes=None))],
    "a GPU without process, at first": [node(replace(REST, processes=()), number=EARLY)],
    "no end of the first iterations yet": [node(SPIN, number=EARLY)],
    "no end of the first iterations on one node": [node(SPIN), node(SPIN, name="a-1", number=EARLY)],
    "a GPU that the plan does not use": [node(WORK, replace(REST, processes=()), ranks=1)],
    "it waits for the first time": [then(node(WORK), reading([SPIN], NOW, 101), reading([SPIN], NOW, 102))],
    "it has just worked": [then(node(SPIN), reading([WORK], NOW, 101))],
    "one node is silent": [node(SPIN), node(SPIN, name="a-1", age=500)],
    "one node is in trouble": [node(SPIN), then(node(SPIN, name="a-1"), GpuTrouble(unix=NOW, text="no driver"))],
    "one node has not begun": [node(SPIN), NodeGpus(node="a-1", ranks=1, entries=())],
    "the readings are of an earlier start of the run": [then(node(SPIN), reading([SPIN], NOW, 1))],
    "old readings": [node(replace(REST, processes=()), age=500)],
}


@pytest.mark.parametrize("nodes", WORKS.values(), ids=WORKS.keys())
def test_nothing_else_is_taken_for_a_hang(nodes: list[NodeGpus]) -> None:
    assert hang(nodes, NOW, LONG_AGO) is None


@pytest.mark.parametrize("gpu", [SPIN, replace(REST, processes=())], ids=["spin", "idle"])
@pytest.mark.parametrize(
    ("number", "logged_unix", "hangs"),
    [
        (EARLY, None, False),
        (EARLY + 1, None, True),
        (EARLY, NOW - 10 * EARLY - 60, False),
        (EARLY, NOW - 10 * EARLY + 60, True),
    ],
    ids=["early", "late", "logged before this start", "logged since"],
)
def test_a_start_is_given_time(gpu: GpuSample, number: int, logged_unix: int | None, hangs: bool) -> None:
    assert (hang([node(gpu, number=number)], NOW, logged_unix) is not None) is hangs


NO_GPU = GpuTrouble(unix=NOW, text="no GPU on n060: Driver Not Loaded")

LINES = {
    "all busy": (
        node(WORK, WORK, replace(WORK, utilisation=85), replace(WORK, memory_used_mib=9000)),
        "4 of 4 busy, 94 % mean, fullest 11.2/22.2 GiB",
    ),
    "one empty": (node(WORK, replace(REST, processes=())), "1 of 2 busy, 48 % mean, fullest 11.2/22.2 GiB"),
    "fewer than ranks": (node(WORK, ranks=2), "1 of 2 busy, 97 % mean, fullest 11.2/22.2 GiB"),
    "only those of the plan": (node(WORK, REST, ranks=1), "1 of 1 busy, 97 % mean, fullest 11.2/22.2 GiB"),
    "a lost one": (node(WORK, LOST), "GPU 1: GPU is lost, 97 % mean, fullest 11.2/22.2 GiB"),
    "processes not told": (node(replace(WORK, processes=None)), "97 % mean, fullest 11.2/22.2 GiB"),
    "a divided GPU": (node(replace(WORK, utilisation=None)), "1 of 1 busy, fullest 11.2/22.2 GiB"),
    "the fullest is so by its own size": (
        node(replace(WORK, memory_used_mib=30000, memory_total_mib=40960), replace(WORK, memory_used_mib=22000)),
        "2 of 2 busy, 97 % mean, fullest 21.5/22.2 GiB",
    ),
    "silent": (node(WORK, age=240), "no reading for 240 s: the driver does not answer"),
    "no GPU": (NodeGpus(node="a-0", ranks=1, entries=(NO_GPU,)), NO_GPU.text),
}


@pytest.mark.parametrize(("told", "line"), LINES.values(), ids=LINES.keys())
def test_a_nodes_gpus_are_one_line(told: NodeGpus, line: str) -> None:
    assert summary(told, NOW) == line


def test_a_node_that_told_nothing_has_no_line() -> None:
    assert summary(NodeGpus(node="a-0", ranks=1, entries=()), NOW) is None
