"""A process that died without a reason had no memory if its node's stderr says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.judge.verdict import judge
from launch.observe.look import memory_sign
from tests.support.launch.run_folders import NOW, Case, Error, Node, ended

ABORTED = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
EARLIER = "MemoryError of an earlier start\n"
OTHERS = "[rank 3 (stage 1, dp 1, tp 0)] error: out of memory: CUDA out of memory. A smaller …\n"
RANK = "rank 2 (stage 1, dp 0, tp 0, node local-1) was killed by SIGABRT"
FOLDER = "<the run's folder>"
WORKER = "the worker of node local-1"
KILLED = Error(2, NOW - 5, "Killed", "killed by SIGABRT")

CASES = {
    "a-rank": (
        Case([ended(143, "SIGTERM"), ended(1)], [KILLED]),
        ABORTED,
        "out-of-memory",
        f"{RANK}, out of memory: {ABORTED.splitlines()[0]} ({FOLDER}/nodes/local-1.err)",
    ),
    "a-rank-for-another-reason": (
        Case([ended(143, "SIGTERM"), ended(1)], [KILLED]),
        "double free or corruption (out)\n",
        "rank-failed",
        RANK,
    ),
    "a-rank-beside-one-without-memory": (
        Case([ended(143, "SIGTERM"), ended(1)], [KILLED]),
        OTHERS,
        "rank-failed",
        RANK,
    ),
    "a-rank-that-somebody-killed": (
        Case([Node(), ended(1)], [Error(2, NOW - 5, "Killed", "killed by SIGKILL: by somebody")]),
        ABORTED,
        "rank-failed",
        "rank 2 (stage 1, dp 0, tp 0, node local-1) was killed by SIGKILL: by somebody",
    ),
    "a-worker": (
        Case([Node(), ended(-6)]),
        ABORTED,
        "out-of-memory",
        f"{WORKER} was killed by SIGABRT, out of memory: {ABORTED.splitlines()[0]} ({FOLDER}/nodes/local-1.err)",
    ),
    "a-worker-in-python": (
        Case([Node(), ended(1)]),
        'Traceback (most recent call last):\n  File "x.py"\nMemoryError\n',
        "out-of-memory",
        f"{WORKER} exited with 1, out of memory: MemoryError ({FOLDER}/nodes/local-1.err)",
    ),
    "a-worker-for-another-reason": (
        Case([Node(), ended(1)]),
        "KeyError: 7\n",
        "worker-failed",
        f"{WORKER} exited with 1: KeyError: 7",
    ),
    "nobody": (Case([Node(), Node()], last=20), "UserWarning: out of memory soon\n", "running", "4 ranks at work"),
}


@pytest.mark.parametrize(("case", "stderr", "rule", "reason"), CASES.values(), ids=CASES.keys())
def test_stderr_tells_why_a_process_ended(tmp_path: Path, case: Case, stderr: str, rule: str, reason: str) -> None:
    run = case.make(tmp_path / "run")
    run.node_err("local-0").write_text(ABORTED)
    run.node_err("local-1").write_text(stderr)
    verdict = judge(run, NOW)
    assert (verdict.rule, verdict.reason) == (rule, reason.replace(FOLDER, str(run.path)))


def test_what_an_earlier_start_said_is_past(tmp_path: Path) -> None:
    run = CASES["a-rank"][0].make(tmp_path / "run")
    run.node_err("local-1").write_text(EARLIER)
    state = run.read_json(run.node_state("local-1"))
    run.write_json(run.node_state("local-1"), {**state, "err_begin": len(EARLIER)})
    assert judge(run, NOW).rule == "rank-failed"


@pytest.mark.parametrize(
    "line",
    [
        "MemoryError",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array",
        "OSError: [Errno 12] Cannot allocate memory",
        "ImportError: libtorch_cpu.so: failed to map segment from shared object: Cannot allocate memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried to …",
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'",
        "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
        "NCCL WARN Cuda failure 2 'out of memory'",
        "fatal: Out of memory.",
    ],
)
def test_libraries_say_it_in_many_ways(line: str) -> None:
    assert memory_sign(f"something else\n  {line}\nmore\n") == line
