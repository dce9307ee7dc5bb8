"""What the ranks of a node find out for `megatron_ext.doctor`: alone, then together with all others."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext import rank_processes as node_ranks
from megatron_ext.contract.errors import EngineError, PeerLost, shortage
from megatron_ext.contract.files import GrowingNote, read_note
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.rules.engine import MEGATRON_CORE
from megatron_ext.parallel import links, meeting
from megatron_ext.parallel.comm import annotate_errors, meet
from megatron_ext.parallel.meeting import LocalStore, join_store, open_store
from megatron_ext.parallel.store import Server
from megatron_ext.timeline.recorder import Recorder

WAIT_S = 20
"""For other ranks, once all nodes are there."""
ALL_REDUCE_FLOATS = 2**18
ALL_REDUCES = 5


class Ranks:
    """The ranks of a node, started as `megatron_ext.worker` starts those of a run; none outlives the block."""

    def __init__(self, plan: Plan, node_rank: int) -> None:
        self._plan = replace(plan, meeting_timeout_s=WAIT_S)
        self._node_rank = node_rank
        self._pipes = {rank: os.pipe() for rank in plan.nodes[node_rank].ranks}
        """Pipes by which each rank hears whether to meet the others."""
        self._store: Optional[Server] = None
        self._local = LocalStore() if meeting.local_store_suffices(plan) else None
        self._ranks = node_ranks.Ranks(self._plan, node_rank, self._rank_main)
        self.exit_codes: Dict[int, int] = {}
        """Exit codes of the ranks that have ended; negative for a signal."""

    def __enter__(self) -> Ranks:
        self._ranks.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what still lives; its note tells how far it came."""
        self._ranks.end(gently=False)
        self.ended()
        for read, write in self._pipes.values():
            os.close(read)
            os.close(write)

    def alone_done(self) -> bool:
        """Whether every rank has found out what it can alone, or has ended."""
        self.ended()
        return all(rank in self.exit_codes or self._told(rank).get("alone") for rank in self._pipes)

    def problem(self) -> Optional[str]:
        """Why ranks of this node cannot meet others."""
        for rank in self._pipes:
            found = self._told(rank)
            if found.get("failed"):
                return f"rank {rank}: {found['failed']}"
            if not found.get("alone"):
                code = self.exit_codes.get(rank)
                return f"rank {rank} " + ("did not get ready" if code is None else f"ended with {code}")
        return None

    def go(self, hindrance: str) -> None:
        """Lets the ranks meet the others, or tells them why they need not try; where they meet, opens the store."""
        if not hindrance and self._node_rank == 0 and self._local is None:
            try:
                self._store = open_store(self._plan)
            except EngineError as error:
                hindrance = str(error)
        for _, write in self._pipes.values():
            os.write(write, f"{hindrance}\n".encode())

    def ended(self) -> bool:
        """Whether all have ended."""
        codes = self._ranks.look()
        self.exit_codes = {rank: code for rank, code in codes.items() if code is not None}
        return len(self.exit_codes) == len(codes)

    def _told(self, rank: int) -> Dict[str, Any]:
        return read_note(self._plan.files.doctor_rank(rank)) or {}

    def _rank_main(self, place: Place) -> None:
        """All that a rank does."""
        note = GrowingNote(self._plan.files.doctor_rank(place.rank), stage="alone")
        try:
            note.update(**_alone(self._plan, place))
            note.update(alone=True)
            hindrance = os.fdopen(self._pipes[place.rank][0]).readline().rstrip("\n")
            if hindrance:
                note.update(hindrance=hindrance)
            else:
                join = partial(join_store, self._plan) if self._local is None else self._local.join
                _together(self._plan, place, note, join)
        except (EngineError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            note.update(
                failed=shortage(error) or str(error).strip().splitlines()[0],
                symptom=isinstance(error, PeerLost),
                alone=True,
            )


def _alone(plan: Plan, place: Place) -> Dict[str, Any]:
    torch.set_num_threads(1)
    found: Dict[str, Any] = {"torch": str(torch.__version__), "nccl": None, "gpus": [], "memory": None}
    return {**found, **(_gpu(plan, place) if plan.device == "cuda" else {}), **_engine(plan)}


def _engine(plan: Plan) -> Dict[str, Any]:
    """What the engine needs beside torch, or why it is not to be had."""
    if plan.engine != MEGATRON_CORE:
        return {}
    from megatron_ext.core.library import load  # megatron.core is not everywhere

    try:
        return {"engine": "; ".join(load(plan).remarks)}
    except EngineError as error:
        return {"no_engine": str(error)}


def _gpu(plan: Plan, place: Place) -> Dict[str, Any]:
    """All GPUs that torch sees, and of this rank's own the memory: [free, all], bytes."""
    if not torch.cuda.is_available():
        return {"failed": f"torch {torch.__version__} sees no GPU: {_why_no_gpu()}"}
    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    found = {"gpus": names, "nccl": ".".join(map(str, nccl)), "cuda": torch.version.cuda}
    if place.local_rank >= len(names):
        return {
            **found,
            "failed": f"torch sees too few GPUs on this node: {len(names)}; the plan has a rank for one more",
        }
    torch.cuda.set_device(place.local_rank)
    return {**found, "memory": list(torch.cuda.mem_get_info())}


def _why_no_gpu() -> str:
    """torch says it when it is made to begin; of one without CUDA it is an AssertionError."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return shortage(error) or str(error).strip().splitlines()[0]
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"


def _together(plan: Plan, place: Place, note: GrowingNote, join: Callable[[], Store]) -> None:
    device = torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", place.local_rank)
    note.update(stage="meeting")
    store = join()
    meet(store, place.rank, plan.world_size, device, timedelta(seconds=WAIT_S))
    note.update(stage="all-reduce")
    note.update(all_reduce_ms=_all_reduce_ms(device))
    note.update(stage="clocks")
    note.update(clock=_clock(store, device))
    note.update(stage="links")
    every = links.steps([node.ranks for node in plan.nodes], [node.group for node in plan.nodes])
    note.update(links=links.measure(every, device))
    with annotate_errors("leaving the other ranks"):
        dist.barrier()
    dist.destroy_process_group()
    note.update(stage="done")


def _all_reduce_ms(device: torch.device) -> float:
    """Milliseconds that an all-reduce of 1 MiB takes, the best of some; its result is right."""
    world, times = dist.get_world_size(), []
    right = float(world * (world + 1) // 2)
    for _ in range(ALL_REDUCES):
        tensor = torch.full((ALL_REDUCE_FLOATS,), float(dist.get_rank() + 1), device=device)
        before = time.monotonic()
        with annotate_errors(f"an all-reduce of {world} ranks"):
            dist.all_reduce(tensor)
            low, high = float(tensor.min()), float(tensor.max())
        times.append(time.monotonic() - before)
        if (low, high) != (right, right):
            raise EngineError(f"an all-reduce gave {low:g} to {high:g} instead of {right:g}")
    return min(times) * 1e3


class _Reading(Recorder):
    """Keeps the comparison of this rank's clock with rank 0's: own time, rank 0's, uncertainty, ns."""

    def __init__(self) -> None:
        super().__init__(None)
        self.own, self.zero, self.uncertainty = 0, 0, 0

    def clock(self, own_ns: int, rank0_ns: int, uncertainty_ns: int) -> None:
        self.own, self.zero, self.uncertainty = own_ns, rank0_ns, uncertainty_ns


def _clock(store: Store, device: torch.device) -> List[int]:
    """Measures how much this node's time of day is ahead of rank 0's, and how well that is known: [ns, ns]."""
    reading = _Reading()
    meeting.align_clocks(reading, store, "doctor")
    own = time.time_ns() - time.monotonic_ns()
    zero = torch.tensor([own], dtype=torch.int64, device=device)
    with annotate_errors("comparing clocks"):
        dist.broadcast(zero, 0)
    return [own + reading.own - int(zero.item()) - reading.zero, reading.uncertainty]
