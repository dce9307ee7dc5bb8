"""Streams wait for each other where they share memory: nothing reads or writes what another one still works on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.test_layouts import GPU, LAYOUTS, OPTIONS
from tests.cuda.test_stand_in import ran
from tests.support.cuda.machine import Machine
from tests.support.cuda.order import order_of, unneeded
from tests.support.megatron_ext.engine_run import make_corpus, make_run

MISTAKES = {
    "a-message-changed-on-its-way": (
        "work = dist.all_reduce(own, async_op=True); own.add_(1.0)",
        ("all_reduce", "add_"),
    ),
    "a-message-read-before-it-came": (
        "work = dist.all_reduce(own[1:], async_op=True); own[:2].sum()",
        ("all_reduce", "sum"),
    ),
    "another-stream-that-has-not-waited": ("own.add_(1.0)\nwith aside: own.sum()", ("add_", "sum")),
    "a-stream-not-waited-for": (
        "with aside: aside.stream.wait_stream(main); own.add_(1.0)\nown.sum()",
        ("add_", "sum"),
    ),
}
WELL = """
    work = dist.all_reduce(own, async_op=True)
    other = own.new_ones(3).sum()
    work.wait()
    own.add_(1.0)
    aside.stream.wait_stream(main)
    with aside:
        own.add_(1.0)
    aside.stream.synchronize()
    own.sum()
"""
BEGUN = """
    import os, sys, torch, torch.distributed as dist
    from tests.support.cuda.accesses import Accesses
    rank, ranks = int(os.fork() != 0), 2
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(sys.argv[1], ranks), rank=rank, world_size=ranks)
    main, aside = torch.cuda.current_stream(), torch.cuda.stream(torch.cuda.Stream())
    own = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    Accesses().__enter__()
"""


@pytest.mark.parametrize(("mistake", "told"), MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_wait_is_seen(mistake: str, told: tuple[str, str], tmp_path: Path) -> None:
    ran(tmp_path, "\n".join(f"    {line}" for line in mistake.splitlines()), BEGUN)
    for log in Machine(2, tmp_path / "machine").logs():
        races = order_of(log.read_text(errors="replace").splitlines()).races
        assert {(race.first.what, race.second.what) for race in races} == {told}


def test_what_waits_is_in_order(tmp_path: Path) -> None:
    ran(tmp_path, WELL, BEGUN)
    for log in Machine(2, tmp_path / "machine").logs():
        found = order_of(log.read_text(errors="replace").splitlines())
        assert not found.races
        assert len(found.waits) == 3


WATCHED = {
    **{name: LAYOUTS[name] for name in ("streams-bf16", "shares", "sharded", "interleaved", "zb-h1", "pipedream")},
    **{name: LAYOUTS[name] for name in ("1f1b-in-int8", "offloaded", "sharded-offloaded", "activations-offloaded")},
    **{name: LAYOUTS[name] for name in ("sharded-in-bf16", "tensor-1f1b", "sharded-zb-h1", "replicas-3-1")},
    **{name: LAYOUTS[name] for name in ("scattered-zb-h1", "gathered", "gathered-1f1b", "islands-of-unlike-sizes")},
    "islands-of-plans-of-their-own": LAYOUTS["islands-of-plans-of-their-own"],
    "overlapped": OPTIONS["overlapped"],
    "by-node": (4, "parallel.data=4 parallel.pipeline=1 parallel.partition=3 parallel.reduce_dtype=bf16"),
}
EACH_NEEDED = ("streams-bf16", "shares")
"""Where torch's own calls of NCCL have no wait that others make idle either."""


@pytest.mark.parametrize("layout", WATCHED)
def test_no_kernel_uses_what_another_stream_works_on(layout: str, tmp_path: Path) -> None:
    """Each wait of an iteration is needed, too: without it something would not be in order."""
    gpus, words = WATCHED[layout]
    run = make_run(tmp_path / "run", make_corpus(tmp_path), GPU, "parallel.micro_batch_size=1", *words.split())
    if layout == "by-node":
        run = run.on_nodes((0, 0, 1, 1), [0])
    machine = Machine(gpus, tmp_path / "machine")
    machine.train(run.run.plan, len(run.plan.nodes), "watched")
    for log in machine.logs():
        lines = log.read_text(errors="replace").splitlines()
        found = order_of(lines)
        assert not found.races, found.races[:3]
        assert found.waits
        if layout in EACH_NEEDED:
            assert not unneeded(lines, lines.index("# begin 3"), lines.index("# end 3"))
