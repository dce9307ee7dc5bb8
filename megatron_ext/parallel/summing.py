"""Sums of gradients over a group that go on beside the backward pass, in the format in which they travel.

A ring that sums in 16 bits rounds at every hop. So where gradients travel in 16 bits each rank hands the others their
shares, adds up its own in fp32 and in the order of the ranks, and hands out the sum, which sends as few bytes. gloo has
no reduce-scatter: on a CPU fp32 goes the same way.
"""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Iterator, NamedTuple, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.events import ALL_REDUCE
from megatron_ext.parallel.comm import Works, all_gather, begin_reduce
from megatron_ext.parallel.groups import ByNode
from megatron_ext.timeline.usage import Traffic


class Summing(NamedTuple):
    """A sum under way."""

    work: Union[dist.Work, Works]
    sent: Tensor
    """What travels, of all ranks of the group."""
    finish: Optional[Callable[[], object]]
    """Puts the sum in its place when the work has ended; None if it is there."""

    def wait(self) -> None:
        """Until the sum is in its place; with NCCL only the GPU waits."""
        self.work.wait()
        if self.finish is not None:
            self.finish()


def begin_all_reduce(gradients: Tensor, group: Optional[dist.ProcessGroup], dtype: torch.dtype) -> Summing:
    """Sums `gradients`, fp32, in place on all ranks."""
    if dtype == gradients.dtype:
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None
        return Summing(work, gradients, None)
    ranks, numbers = dist.get_world_size(group), len(gradients)
    sent = gradients.new_zeros(-(-numbers // ranks) * ranks, dtype=dtype)
    sent[:numbers].copy_(gradients)
    shares = torch.empty_like(sent)
    work = dist.all_to_all_single(shares, sent, group=group, async_op=True)

    def finish() -> None:
        own = torch.sum(shares.view(ranks, -1), 0, dtype=gradients.dtype).to(dtype)
        all_gather(own, sent.view(ranks, -1), group, "all-gather of the gradients")
        gradients.copy_(sent[:numbers])

    return Summing(work, sent[:numbers], finish)


def begin_reduce_scatter(
    gradients: Tensor,
    own: Tensor,
    group: Optional[dist.ProcessGroup],
    dtype: torch.dtype,
    sizes: Optional[Sequence[int]] = None,
) -> Summing:
    """Sums of `gradients`, fp32, this rank's share: `own`, which is its part of them.

    `sizes` are the lengths of all ranks' parts, where they are not equal.
    """
    sent = gradients.to(dtype)
    if sent.is_cuda and sent is gradients:
        if sizes is not None:
            return Summing(begin_reduce(sent, sizes, group), sent, None)
        return Summing(dist.reduce_scatter_tensor(own, sent, group=group, async_op=True), sent, None)
    ranks = dist.get_world_size(group)
    shares = sent.new_empty(ranks * len(own))
    of_ranks = None if sizes is None else [len(own)] * ranks
    work = dist.all_to_all_single(shares, sent, of_ranks, None if sizes is None else list(sizes), group, True)
    return Summing(work, sent, lambda: torch.sum(shares.view(ranks, -1), 0, dtype=own.dtype, out=own))


def side_stream(device: torch.device) -> Optional[torch.cuda.Stream]:
    """Returns a stream for sums in several steps, so that nothing else waits for these; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream, begin: Callable[[], Summing]) -> OnStream:
    """Makes a sum on another stream, behind what the current one has done so far."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        summing = begin()
        summing.wait()
        return OnStream(summing)


class SumsByNode:
    """Sums over a group whose ranks lie on several nodes: within each node first, so that a rank has a part of the
    node's sum, then of that part across nodes, and within nodes again, where all ranks are to have all.

    Of n ranks on each of m nodes, 2 (m - 1) / m of the gradients leave a node, in a ring of all 2 (n m - 1) / (n m).
    On a GPU the second step waits for the first on a stream of its own, so that nothing else does. On a CPU `go_on`
    begins it.
    """

    def __init__(self, groups: ByNode, device: torch.device) -> None:
        self._groups = groups
        self._ranks, self._number = dist.get_world_size(groups.within), dist.get_rank(groups.within)
        self._inside: Deque[NodeSum] = deque()
        """Sums on a CPU whose first step is under way, in the order in which all ranks began them."""
        self._stream = side_stream(device)

    def begin(
        self, gradients: Tensor, own: Optional[Tensor], dtype: torch.dtype, traffic: Traffic
    ) -> Union[OnStream, NodeSum]:
        """Begins to sum `gradients`, fp32, in place or, if `own` is given, this rank's share of them alone."""
        part = gradients.view(self._ranks, -1)[self._number]
        first = begin_reduce_scatter(gradients, part, self._groups.within, dtype)
        traffic.reduce_scattered(first.sent, self._groups.within, ALL_REDUCE)
        later = self._later(gradients, part, own, dtype, traffic)
        if self._stream is None:
            self._inside.append(NodeSum(self, first, later))
            return self._inside[-1]
        with torch.cuda.stream(self._stream):
            first.wait()
            for step in later:
                step.wait()
            return OnStream(first)

    def _later(
        self, gradients: Tensor, part: Tensor, own: Optional[Tensor], dtype: torch.dtype, traffic: Traffic
    ) -> Iterator[Summing]:
        """Begins the step across nodes; after it, the last one is made at once."""
        if own is not None:
            step = begin_reduce_scatter(part, own, self._groups.across, dtype)
            traffic.reduce_scattered(step.sent, self._groups.across, ALL_REDUCE)
            yield step
            return
        step = begin_all_reduce(part, self._groups.across, dtype)
        traffic.all_reduced(step.sent, self._groups.across)
        yield step
        whole = gradients if step.sent is part else torch.empty_like(gradients, dtype=dtype)
        all_gather(step.sent, whole.view(self._ranks, -1), self._groups.within, "all-gather of the gradients")
        traffic.all_gathered(step.sent, self._groups.within, ALL_REDUCE)
        if whole is not gradients:
            gradients.copy_(whole)

    def go_on(self) -> None:
        """Begins the steps across nodes of sums that have ended within them."""
        while self._inside and self._inside[0].ended_within:
            self._inside.popleft().cross()

    def cross_all(self) -> None:
        """Begins those of all sums, for ranks must send across nodes in the same order, steps of the first sums that
        follow included."""
        while self._inside:
            self._inside.popleft().cross()


class OnStream:
    """A sum under way on a GPU, for which the current stream had to do the rest."""

    def __init__(self, summing: Summing) -> None:
        self._summing = summing  # its memory is another stream's, which may have it again when that has waited
        self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ended.record()

    @property
    def sent(self) -> Tensor:
        return self._summing.sent

    def wait(self) -> None:
        """Has the current stream wait until the sum is in its place."""
        torch.cuda.current_stream().wait_event(self._ended)


class NodeSum:
    """A sum under way on a CPU, within nodes or across them."""

    def __init__(self, sums: SumsByNode, first: Summing, later: Iterator[Summing]) -> None:
        self._sums = sums
        self._step = first
        self._later = later

    @property
    def ended_within(self) -> bool:
        return bool(self._step.work.is_completed())

    def cross(self) -> None:
        """Waits for the step within nodes, and begins the one across."""
        self._step.wait()
        self._step = next(self._later)

    def wait(self) -> None:
        """Returns when the sum is in its place."""
        self._sums.cross_all()
        self._step.wait()
        assert next(self._later, None) is None
