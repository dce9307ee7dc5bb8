"""The executor brings every valid schedule to its end and sums the right gradients: a thousand at random, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.check import check
from megatron_ext.contract.schedule.iteration import exists, schedule
from megatron_ext.contract.schedule.schedules import Action, Actions, Kind
from megatron_ext.engine.executor.executor import Chunk, Executor
from megatron_ext.engine.executor.messages import Content, Message, channels
from megatron_ext.engine.executor.pace import Pace
from megatron_ext.parallel import comm
from megatron_ext.parallel.groups import Groups
from megatron_ext.tasks.linear import WeightGradients, linear
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Micro, Tensors
from megatron_ext.timeline.recorder import Recorder
from tests.support import cases

SCHEDULES = cases.fewer(240, 1000)
RANKS = 4
HANGS_AFTER_S = 300.0
BATCH, SEQUENCE, HIDDEN = 2, 3, 4
BATCHES = [BATCH] * 39 + [2000]
"""Of which the last makes messages of 188 KiB: more than goes into a socket at once."""
ITERATIONS = [3] + [1] * 9
AHEAD_BYTES = (1, 500, comm.AHEAD_BYTES)
"""Of receives posted ahead: one, a few, or all."""
FOLLOWS = {
    Kind.RECV_FORWARD: [Kind.FORWARD],
    Kind.FORWARD: [Kind.SEND_FORWARD],
    Kind.RECV_BACKWARD: [Kind.BACKWARD],
    Kind.BACKWARD: [Kind.SEND_BACKWARD],
    Kind.BACKWARD_INPUT: [Kind.SEND_BACKWARD, Kind.BACKWARD_WEIGHT],
}
RECEIVES = {Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1), Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1)}


def random_schedule(random: Random, stages: int, chunks: int, micro_batches: int) -> list[Actions]:
    """Any order that respects what needs what and keeps the messages of a channel in order; a part of the backward
    passes is split. Made by doing, again and again, one of all the actions that can be done."""
    virtual_stages = stages * chunks
    split = random.choice((0.0, 0.5, 1.0))
    lists: list[Actions] = [[] for _ in range(stages)]
    ready = [(0, Action(Kind.FORWARD, m)) for m in range(micro_batches)]
    channels: dict[tuple[Kind, int], deque[Action]] = {}
    while ready:
        stage, action = ready.pop(random.choice((0, -1, random.randrange(len(ready)))))
        lists[stage].append(action)
        kind, m, chunk = action
        virtual = chunk * stages + stage
        following = FOLLOWS.get(kind, [])
        if kind is Kind.FORWARD and virtual == virtual_stages - 1:
            following = [Kind.BACKWARD]
        for after in following:
            if after is Kind.BACKWARD and random.random() < split:
                after = Kind.BACKWARD_INPUT
            if exists(after, virtual, virtual_stages):
                ready.append((stage, Action(after, m, chunk)))
        if kind in RECEIVES:
            receive, step = RECEIVES[kind]
            to_chunk, to = divmod(virtual + step, stages)
            channel = channels.setdefault((receive, to), deque())
            channel.append(Action(receive, m, to_chunk))
            if len(channel) == 1:
                ready.append((to, channel[0]))
        if kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            channel = channels[kind, stage]
            channel.popleft()
            if channel:
                ready.append((stage, channel[0]))
    return lists


def drawn(random: Random) -> tuple[list[Actions], int, int]:
    """A schedule, its chunks and its micro-batches; most are nobody's, some have a name."""
    stages, micro_batches = random.randint(1, RANKS), random.randint(1, 5)
    chunks = random.randint(1, 3) if stages > 1 else 1
    if random.random() < 0.8:
        return random_schedule(random, stages, chunks, micro_batches), chunks, micro_batches
    name = random.choice(("gpipe", "one_f_one_b", "zb_h1")) if chunks == 1 else "interleaved"
    return schedule(name, stages, chunks, micro_batches), chunks, micro_batches


class TinyStage(nn.Module):
    """Some linear layers, or none; each takes a time of its own."""

    def __init__(self, seed: int, virtual_stage: int, virtual_stages: int, later: WeightGradients | None) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed * 100 + virtual_stage)
        layers = int(torch.randint(0, 3, (), generator=source))
        shapes = [(HIDDEN,)] * (virtual_stage == 0) + [(HIDDEN, HIDDEN)] * layers
        self.weights = nn.ParameterList(torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.inputs = ("x",) if virtual_stage == 0 else ()
        self.last = virtual_stage == virtual_stages - 1
        self.later = later
        self.delays = Random(seed * 100 + virtual_stage)

    def begin(self, sample: int) -> None:
        """Nothing here is random."""

    def forward(self, entered: Tensors) -> Tensors:
        (x,) = entered.values()
        for weight in self.weights:
            x = x.unsqueeze(-1) * weight if weight.dim() == 1 else torch.tanh(linear(x, weight, None, self.later))
            if self.later is not None and self.delays.random() < 0.1:
                time.sleep(self.delays.random() * 1e-3)
        return {"x": x}


def squares(left: Tensors, micro: Micro) -> Tensor:
    return (left["x"].sum(-1) - micro.targets["labels"]).square().sum()


def micros(tokens: Tensor) -> list[Micro | None]:
    """tokens [micro-batches, micro-batch, sequence + 1]"""
    return [Micro({"x": each[:, :-1]}, {"labels": each[:, 1:]}) for each in tokens]


class Alike(Message):
    """One tensor like another, which may say that it is on a GPU; the gradient is alike."""

    def __init__(self, like: Tensor) -> None:
        super().__init__([Content("x", tuple(like.shape), like.dtype, True)], like.device)
        self.likes = [like]

    def gradients(self, _others: Sequence[Content] = ()) -> Message:
        return self


def chunks_of(stages: Sequence[TinyStage], activations: Tensor) -> list[Chunk]:
    """With one tensor like `activations` over every cut."""
    message = Alike(activations)
    none = Message([], activations.device)
    return [
        Chunk(cast(Stage, stage), none if stage.inputs else message, none if stage.last else message)
        for stage in stages
    ]


def run_one(seed: int, rank: int, groups: dict[int, Groups]) -> None:
    """This rank's part of schedule `seed`, if it has one; compared with the whole model in one piece."""
    lists, chunks, micro_batches = drawn(Random(seed))
    stages = len(lists)
    if rank == 0:
        check(lists, stages, chunks, micro_batches)
    if rank >= stages:
        return
    source = torch.Generator().manual_seed(seed)
    batch, iterations = BATCHES[seed % len(BATCHES)], ITERATIONS[seed % len(ITERATIONS)]
    comm.AHEAD_BYTES = Random(f"{seed} {rank}").choice(AHEAD_BYTES)
    tokens = torch.randn(micro_batches, batch, SEQUENCE + 1, generator=source, dtype=torch.float64)

    later = WeightGradients(lambda weight, left, right: weight.grad.addmm_(left, right))
    own = [TinyStage(seed, chunk * stages + rank, stages * chunks, later) for chunk in range(chunks)]
    peers = (
        channels(Layout.grid(1, 1, stages), Place(rank, 0, rank, rank, 0, 0), chunks, groups[stages])
        if stages > 1
        else {}
    )
    activations = torch.empty(batch, SEQUENCE, HIDDEN, dtype=torch.float64)
    pace = Pace(torch.device("cpu"), 30.0)
    executor = Executor(partial(chunks_of, own, activations), peers, later, Recorder(None), squares, pace)
    for _ in range(iterations):
        loss = executor.run(lists[rank], dict(enumerate(micros(tokens))), 0.5)

    whole = [TinyStage(seed, virtual, stages * chunks, None) for virtual in range(stages * chunks)]
    together = tokens.flatten(0, 1)
    expected = squares(nn.Sequential(*whole)({"x": together[:, :-1]}), Micro({}, {"labels": together[:, 1:]})) * 0.5
    expected.backward()
    if own[-1].last:
        torch.testing.assert_close(loss, expected.detach())
    for chunk, stage in enumerate(own):
        for found, wanted in zip(stage.weights, whole[chunk * stages + rank].weights, strict=True):
            torch.testing.assert_close(found.grad, wanted.grad * iterations)


def soak(folder: Path, rank: int, progress: Synchronized) -> None:
    """All schedules, one after another, in one process; what goes wrong is left in a file."""
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        timeout = timedelta(seconds=30)
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
        groups = {stages: Groups.make(Layout.grid(1, 1, stages), 2, (), timeout) for stages in range(2, RANKS + 1)}
        for seed in range(SCHEDULES):
            progress.value = seed
            run_one(seed, rank, groups)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (told in full, and the exit code says it)
        (folder / f"rank-{rank}.txt").write_text(f"schedule {progress.value}: {traceback.format_exc()}")
        raise SystemExit(1) from None


@pytest.mark.slow
def test_random_schedules_end_with_the_right_gradients(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    progress = [context.Value("i", -1) for _ in range(RANKS)]
    ranks = [context.Process(target=soak, args=(tmp_path, rank, progress[rank])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    until = time.monotonic() + HANGS_AFTER_S
    try:
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
        told = "\n".join(path.read_text() for path in sorted(tmp_path.glob("rank-*.txt")))
        reached = [value.value for value in progress]
        assert [process.exitcode for process in ranks] == [0] * RANKS, f"ranks reached schedules {reached}\n{told}"
    finally:
        for process in ranks:
            process.kill()
            process.join()
