"""A run that gets no memory says so, however the libraries do."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ext.contract.errors import PeerLost, is_out_of_memory, shortage
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.timeline import usage
from tests.megatron_ext.test_worker import FOUR_RANKS, LONG, ended, pids, wait_for
from tests.support import PATIENCE_S
from tests.support.megatron_ext.engine_run import EngineRun


@contextmanager
def address_space(room: int) -> Iterator[None]:
    """As `ulimit -v` that leaves this process so many bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


WITHIN = """
import resource, sys
from megatron_ext import worker
from tests.megatron_ext.test_out_of_memory import address_space
with address_space(int(sys.argv[1])):
    sys.exit(worker.main([sys.argv[2], "0"]))
"""


@pytest.mark.parametrize("mib", [8, 60, 150, 220])
def test_too_little_address_space_is_out_of_memory(engine_run: Callable[..., EngineRun], mib: int) -> None:
    """From no room for a thread, over none for a rank's dozens, to none for its tensors.

    In a process of its own: one that has run tests before has freed memory, in which tensors find room.
    """
    run = engine_run(*FOUR_RANKS, "model.hidden=512", "train.iterations=2")
    words = [sys.executable, "-c", WITHIN, str(mib * 2**20), str(run.run.plan)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1, done.stderr
    causes = [error["message"] for error in run.errors() if not error["symptom"]]
    assert causes or "out of memory" in done.stderr
    assert [message for message in causes if "out of memory" not in message] == []


ERRORS: dict[str, BaseException] = {
    "python": MemoryError(),
    "the-system": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    "c++": RuntimeError("std::bad_alloc"),
    "torch-on-a-cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: …"),
    "torch-on-a-gpu": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "the-loader": OSError("libx.so: failed to map segment from shared object: Cannot allocate memory"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
def test_every_library_says_it_in_words_of_its_own(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert str(shortage(error)).startswith("out of memory")
    with pytest.raises(type(error)), annotate_errors("sending"):
        raise error


def test_a_thread_that_cannot_be_had_is_no_other_ranks_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Resource temporarily unavailable")
    assert "ulimit -u" in str(shortage(error))
    with address_space(2**20):
        allowed = resource.getrlimit(resource.RLIMIT_AS)[0] // 2**10
        assert str(shortage(error)).startswith(f"out of memory (ulimit -v allows {allowed} KiB): Resource")
    with pytest.raises(RuntimeError, match="Resource"), annotate_errors("making the groups of ranks"):
        raise error


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("all CUDA-capable devices are busy or unavailable", "nvidia-smi -c 0, as root"),
        ("CUDA-capable device(s) is/are busy or unavailable", "compute mode is prohibited, or exclusive"),
        ("exclusive-thread device already in use by a different thread", "nvidia-smi -c 0, as root"),
        ("uncorrectable ECC error encountered", "exclude the node"),
        ("CUDA driver version is insufficient for CUDA runtime version", "older CUDA"),
        ("system has unsupported display driver / cuda driver combination", "restart the node"),
        ("system not yet initialized", "nvidia-fabricmanager"),
    ],
    ids=lambda words: words[:30],
)
def test_a_gpu_that_refuses_a_process_says_the_way_out(words: str, way_out: str) -> None:
    """Words of cudaGetErrorString, CUDA 11 to 13, as torch passes them on."""
    text = f"CUDA error: {words}\nCUDA kernel errors might be asynchronously reported at some other API call"
    found = shortage(RuntimeError(text))
    assert found is not None
    assert found.startswith(f"CUDA error: {words}: ")
    assert way_out in found


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("recv: Resource temporarily unavailable")]
)
def test_another_error_lacks_nothing(error: Exception) -> None:
    assert shortage(error) is None


def test_a_failed_message_is_still_the_other_ranks() -> None:
    with pytest.raises(PeerLost, match="sending failed: Connection reset by peer"), annotate_errors("sending"):
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("oom_kill 3", "killed by SIGKILL: by somebody, or by the kernel because memory ran out"),
        (
            "oom_kill 5",
            "killed by SIGKILL: out of memory: since the ranks started, the kernel has killed 2 on this node for that",
        ),
    ],
)
def test_the_kernel_counts_whom_it_kills_for_memory(
    engine_run: Callable[..., EngineRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, expected: str
) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr(usage, "VMSTAT", counts)
    run = engine_run(*FOUR_RANKS, *LONG)
    worker = run.start()
    wait_for(lambda: len(pids(run)) == 4)
    counts.write_text(f"pgfault 9\n{after}\n")
    os.kill(pids(run)[2], signal.SIGKILL)
    assert ended(worker) == 1
    (cause,) = (error["message"] for error in run.errors() if not error["symptom"])
    assert cause == expected


def test_the_kernel_kills_whom_a_control_group_gives_no_memory() -> None:
    """The count that the test before pretends, with a limit of its own."""
    group = Path("/sys/fs/cgroup/memory/tdpp-test")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("64M")
    except OSError:
        pytest.skip("no memory controller of cgroup v1 that this user may use")
    before = usage.kernel_kills()
    pid = os.fork()
    if pid == 0:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        time.sleep(0.05)
        os._exit(len(bytearray(256 * 2**20)) == 0)
    try:
        assert ended(pid) == -signal.SIGKILL
        assert usage.kernel_kills() == before + 1
    finally:
        group.rmdir()
