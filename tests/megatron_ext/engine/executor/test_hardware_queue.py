"""With nccl no schedule stands still, even where all streams of a GPU share one hardware queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.iteration import schedule
from megatron_ext.contract.schedule.schedules import Actions
from megatron_ext.engine.executor.executor import Executor
from megatron_ext.engine.executor.messages import channels
from megatron_ext.engine.executor.pace import Pace
from megatron_ext.parallel import comm
from megatron_ext.parallel.groups import Groups
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.timeline.recorder import Recorder
from megatron_ext.train import device_of
from tests.megatron_ext.engine.executor.test_executor_soak import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    TinyStage,
    chunks_of,
    micros,
    squares,
)
from tests.support.megatron_ext.engine_run import EngineRun

GROUPS = Groups(
    **{name: name.replace("_", " ") for name in ("forward", "backward", "forward_wrap", "backward_wrap")},  # type: ignore[arg-type]
)
SCHEDULES = {
    f"{name}, {stages} stages of {chunks}, {micro_batches} micro-batches": (name, stages, chunks, micro_batches)
    for name, chunk_counts in (("gpipe", [1]), ("one_f_one_b", [1]), ("zb_h1", [1]), ("interleaved", [2, 3]))
    for chunks in chunk_counts
    for stages, micro_batches in ((2, 1), (2, 5), (3, 4), (4, 7), (5, 10), (8, 12))
}


class OnGpu(Tensor):
    """A tensor of a CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Launch(NamedTuple):
    """A message's kernel. It begins when the one before on its communicator has ended, and ends when both sides of it
    have begun; `wait` is launched for the computation's stream, and begins when the kernel has ended."""

    communicator: tuple[object, int, int]
    number: int
    wait: bool


class Pass:
    """Computation. It waits for nothing but the launches before it; the host may wait there for all of them to end."""


class Queue:
    """What a rank launches, in its order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.launches: list[Launch | Pass] = []
        self.numbers: Counter[tuple[object, int, int]] = Counter()

    def isend(self, tensor: Tensor, peer: int, group: object) -> Work:
        communicator = (group, min(self.rank, peer), max(self.rank, peer))  # as torch does for unbatched messages
        launch = Launch(communicator, self.numbers[communicator], False)
        self.numbers[communicator] += 1
        self.launches.append(launch)
        return Work(self, launch)

    def irecv(self, tensor: Tensor, peer: int, group: object) -> Work:
        tensor.zero_()
        return self.isend(tensor, peer, group)


class Work:
    def __init__(self, queue: Queue, launch: Launch) -> None:
        self.queue = queue
        self.launch = launch

    def is_completed(self) -> bool:
        return False  # the host is far ahead of the GPU

    def wait(self) -> None:
        self.queue.launches.append(self.launch._replace(wait=True))


class Passes(Recorder):
    """Notes passes where a timeline would."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(None)
        self.queue = queue

    def span(self, name: str, micro_batch: int = -1, peer: int = -1, chunk: int = 0) -> AbstractContextManager[None]:
        if name.endswith("-compute"):
            self.queue.launches.append(Pass())
        return nullcontext()


def launched(actions: list[Actions], chunks: int, monkeypatch: pytest.MonkeyPatch) -> list[Queue]:
    """What each rank's executor launches for a schedule in two iterations."""
    stages = len(actions)
    count = len({action.micro_batch for action in actions[0]})
    micro_batches = micros(torch.zeros(count, BATCH, SEQUENCE + 1, dtype=torch.float64))
    activations = torch.empty(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64).as_subclass(OnGpu)
    queues = [Queue(rank) for rank in range(stages)]
    for rank, queue in enumerate(queues):
        monkeypatch.setattr(dist, "isend", queue.isend)
        monkeypatch.setattr(dist, "irecv", queue.irecv)
        own = [TinyStage(0, chunk * stages + rank, stages * chunks, None) for chunk in range(chunks)]
        peers = channels(Layout.grid(1, 1, stages), Place(rank, 0, rank, rank, 0, 0), chunks, GROUPS)
        later = WeightGradients(lambda weight, left, right: None)
        pace = Pace(torch.device("cpu"), 0.0)
        executor = Executor(partial(chunks_of, own, activations), peers, later, Passes(queue), squares, pace)  # type: ignore[arg-type]
        for _ in range(2):
            executor.run(actions[rank], dict(enumerate(micro_batches)), 1.0)
    return queues


def held_up(queues: list[Queue], at_passes: bool) -> list[int]:
    """The ranks whose queue stands still for ever: a launch begins only after all launches before it have begun.

    With `at_passes` the host waits before every pass for all that was launched before to end.
    """
    at = [0] * len(queues)
    begun: Counter[tuple[object, int]] = Counter()

    def ended(communicator: object, number: int) -> bool:
        return number < 0 or begun[communicator, number] == 2

    def begins(launches: list[Launch | Pass], number: int) -> bool:
        launch = launches[number]
        if isinstance(launch, Launch):
            return ended(launch.communicator, launch.number - (not launch.wait))
        since = takewhile(lambda one: isinstance(one, Launch), (launches[n] for n in range(number - 1, -1, -1)))
        return not at_passes or all(ended(one.communicator, one.number) for one in since if isinstance(one, Launch))

    going_on = True
    while going_on:
        going_on = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue.launches) and begins(queue.launches, at[rank]):
                launch = queue.launches[at[rank]]
                if isinstance(launch, Launch) and not launch.wait:
                    begun[launch.communicator, launch.number] += 1
                at[rank] += 1
                going_on = True
    return [queue.rank for queue, reached in zip(queues, at, strict=True) if reached < len(queue.launches)]


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_no_schedule_stands_still_in_one_hardware_queue(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, int, int, int]
) -> None:
    queues = launched(schedule(*sizes), sizes[2], monkeypatch)
    assert held_up(queues, at_passes=False) == []
    if sizes[0] != "interleaved":  # every rank of its ring would wait until its message is received
        assert held_up(queues, at_passes=True) == []


@pytest.mark.parametrize(("ahead", "at_passes"), [(2, False), (1, True)])
def test_more_receives_posted_ahead_would_stand_in_the_way(
    monkeypatch: pytest.MonkeyPatch, ahead: int, at_passes: bool
) -> None:
    expect = comm.Inbox.expect

    def further_ahead(self: comm.Inbox, likes: Sequence[Tensor]) -> None:
        expect(self, likes)
        self._ahead = ahead

    monkeypatch.setattr(comm.Inbox, "expect", further_ahead)
    queues = launched(schedule("one_f_one_b", 2, 1, 4), 1, monkeypatch)
    assert held_up(queues, at_passes) == [0, 1]
    assert held_up(queues, not at_passes) == ([] if at_passes else [0, 1])


def test_launches_that_wait_are_refused_where_stages_would_wait_for_each_other(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(engine_run("parallel.data=2", "parallel.pipeline=2").plan, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(EngineError, match=r"^CUDA_LAUNCH_BLOCKING=1 with parallel.pipeline=2: .*; unset it$"):
        device_of(plan, plan.ranks[3])
    assert device_of(replace(plan, pipeline=1), plan.ranks[3]) == torch.device("cuda", 3)
