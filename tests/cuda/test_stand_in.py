"""What the stand-in for CUDA shows: true values of what the host wrote, and each launch, wait and message."""

from __future__ import annotations

import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests.support.cuda.machine import DEFAULT, Counts, Machine, counts

HEADER = Path(sysconfig.get_path("include")) / "Python.h"
MEETING = """
    import os, sys, torch, torch.distributed as dist
    rank, ranks = int(os.fork() != 0), 2
    torch.cuda.set_device(rank)
    store = dist.FileStore(sys.argv[1], ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
"""


def ran(tmp_path: Path, program: str, *begun: str, iteration: int | None = None) -> list[Counts]:
    """A program that must end well on two GPUs, and what its processes did, all in all or between marks."""
    file = tmp_path / "program.py"
    file.write_text("".join(map(textwrap.dedent, (*begun, program, "\nsys.stdout.flush(); os._exit(0)\n"))))
    machine = Machine(2, tmp_path / "machine")
    ended = machine.run(file, tmp_path / "store")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [counts(log, iteration) for log in machine.logs()]


def test_ranks_go_on_with_what_others_wrote(tmp_path: Path) -> None:
    program = """
        own = torch.tensor([rank + 1.0, 10.0], device="cuda")
        total, largest = own.clone(), torch.tensor([rank * 7], device="cuda")
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert total.tolist() == [3.0, 20.0] and largest.item() == 7
        whole = torch.full((2, 2), -1.0, device="cuda")
        dist.all_gather_into_tensor(whole, own)
        assert whole.tolist() == [[2.0 - 1, 10.0], [2.0, 10.0]], whole
        share = torch.empty(1, dtype=torch.bfloat16, device="cuda")
        dist.reduce_scatter_tensor(share, torch.tensor([1.5, 2.5], device="cuda").to("cpu").bfloat16().to("cuda"))
        assert share.item() == (3.0, 5.0)[rank]
        if rank:
            got = torch.empty(3, device="cuda")
            dist.recv(got, 0)
            assert got.tolist() == [4.0] * 3
        else:
            dist.send(torch.full((3,), 4.0, device="cuda"), 1)
    """
    first, last = ran(tmp_path, program, MEETING)
    calls = [one.call for one in first.messages]
    assert calls[:4] == ["all_reduce", "all_reduce", "all_gather", "reduce_scatter"]
    assert {*calls, *(one.call for one in last.messages)} >= {"send", "recv"}
    assert [one.bytes for one in first.messages[:4]] == [8, 8, 8, 2]


def test_a_message_makes_the_gpu_wait_and_not_the_host(tmp_path: Path) -> None:
    """A receive that the sender begins only afterwards ends; and so does what was queued behind it."""
    program = """
        got, done = torch.zeros(1, device="cuda"), torch.cuda.Event()
        (dist.recv if rank else dist.send)(torch.zeros(1, device="cuda"), 1 - rank)  # they meet
        if rank:
            work = dist.irecv(got, 0)
            work.wait()
            copied = got.clone()
            done.record()
            assert not done.query()
            store.set("queued", "")
            assert copied.item() == 5.0 and done.query()
        else:
            store.wait(["queued"])
            dist.send(torch.tensor([5.0], device="cuda"), 1)
    """
    ran(tmp_path, program, MEETING)


def test_ranks_that_call_different_collectives_are_refused(tmp_path: Path) -> None:
    program = "\ndist.all_reduce(torch.ones(2 + rank, device='cuda')); torch.cuda.synchronize()\n"
    with pytest.raises(AssertionError, match="ranks disagree: all_reduce of"):
        ran(tmp_path, program, MEETING)


def test_a_forked_program_ends_as_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.with_name("beside.py").write_text("WORD = 'in vain'")
    file.write_text(
        "import beside, os, sys\n"
        "if os.fork() == 0: sys.stdin.read(); print(sys.argv, os.environ['OWN'], flush=True); os._exit(0)\n"
        "sys.exit(beside.WORD)\n"
    )
    ended = Machine(1, tmp_path / "machine").run(file, "a word", environment={"OWN": "value"})
    assert (ended.returncode, ended.stderr) == (1, "in vain\n")
    assert ended.stdout == f"{[str(file), 'a word']} value\n"


def test_each_wait_launch_and_copy_is_counted(tmp_path: Path) -> None:
    program = """
        import os, sys, torch
        x = torch.randn(64, 64).pin_memory().to("cuda", non_blocking=True)
        y = torch.randn(64, 64).to("cuda")
        z = (x @ y).relu()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            z.mul_(2.0)
        z.sum().item()
        torch.cuda.synchronize()
        try:
            torch.zeros(1, device="cuda:2")
        except RuntimeError as error:
            assert "invalid device ordinal" in str(error)
        else:
            raise AssertionError("there are two")
    """
    (found,) = ran(tmp_path, program)
    assert sum(found.waits.values()) == 3, found.waits
    assert found.copies == {"host-gpu": 2, "gpu-host": 1}
    assert sum("gemm" in name.lower() for name in found.kernels) == 1, found.kernels
    assert found.streams[DEFAULT] == sum(found.kernels.values()) - 1
    assert not found.unmade


@pytest.mark.skipif(not HEADER.exists(), reason="Triton builds its launcher with Python's headers")
def test_kernels_of_triton_are_counted_as_well(tmp_path: Path) -> None:
    program = """
        import os, sys, torch, triton, triton.language as tl

        @triton.jit
        def doubled(x, y, count: tl.constexpr):
            places = tl.arange(0, count)
            tl.store(y + places, 2.0 * tl.load(x + places))

        x = torch.ones(64, device="cuda")
        doubled[(1,)](x, torch.empty_like(x), count=64)
    """
    (found,) = ran(tmp_path, program)
    assert found.kernels["doubled"] == 1, found.kernels
