"""The sum of gradients over the data-parallel group, while the backward pass of earlier layers goes on."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Optional, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.events import ALL_REDUCE
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.parallel.groups import ByNode
from megatron_ext.parallel.summing import (
    NodeSum,
    OnStream,
    Summing,
    SumsByNode,
    begin_all_reduce,
    begin_reduce_scatter,
    on_stream,
    side_stream,
)
from megatron_ext.timeline.recorder import Recorder, UnderWay

UnderWaySum = Union[Summing, OnStream, NodeSum]


class GradientReducer:
    """Sums gradients over a group, a bucket as soon as all micro-batches have added to all of its parameters.

    A single bucket is only full at the end, and summed there. With a sharded optimizer each rank gets the sum of its
    share alone; what is left of the other gradients then has no meaning.
    """

    def __init__(
        self,
        flat: FlatWeights,
        group: Optional[dist.ProcessGroup],
        recorder: Recorder,
        uses: Mapping[str, int],
        dtype: torch.dtype = torch.float32,
        late_whole: bool = False,
        by_node: Optional[ByNode] = None,
    ) -> None:
        """`uses` says, by parameter, how many chunks use it, each of which gives a gradient for every micro-batch.

        Gradients travel in the format `dtype`. With `late_whole` every rank gets all sums of a late bucket. Where the
        group's ranks are known `by_node`, gradients are summed within nodes first.
        """
        self._flat = flat
        self._uses = uses
        self._group = group
        self._by_node = None if by_node is None else SumsByNode(by_node, flat.grad.device)
        self._recorder = recorder
        self._dtype = dtype
        self._stream = None
        if group is not None and by_node is None and dtype != flat.grad.dtype:
            self._stream = side_stream(flat.grad.device)
        self._bucket_of = {name: number for number, (_, names) in enumerate(flat.buckets) for name in names}
        self._late = len(flat.buckets) - 1 if flat.has_late else None
        self._whole = self._late if late_whole else None
        self._left: Dict[str, int] = {}
        self._missing: List[int] = []
        self._begun: List[Tuple[int, UnderWaySum, UnderWay]] = []
        """Sums that have begun, each with its bucket."""
        self._early = group is not None and len(flat.buckets) - flat.has_late > 1
        """Whether there is something to overlap; to be told of every gradient costs a small model some percent."""
        self._at_once = not self._early
        if self._early:
            flat.tell(self._arrived)

    @property
    def ends(self) -> List[int]:
        """List where, in the flat weights, the buckets end that are summed by themselves, but for the last one."""
        return [here.stop for here, _ in self._flat.buckets[:-1]] if self._early else []

    def begin(self, micro_batches: int, at_once: bool = False) -> None:
        """Starts an iteration of this many micro-batches, whose gradients are summed in `finish` if `at_once`."""
        self._at_once = at_once or not self._early
        self._left = {name: micro_batches * self._uses[name] for name in self._flat.slices}
        self._missing = [len(names) for _, names in self._flat.buckets]

    def begin_aside(self) -> None:
        """Starts passes whose gradients are zero, and are not summed."""
        self.begin(1 << 30)  # more than come

    def finish(self, summed: Optional[Callable[[int], None]] = None) -> None:
        """Waits until all gradients are summed; a mean needs its factor in the loss.

        Before it waits for another bucket, `summed` is given up to where all of the flat gradients are.
        """
        if self._group is None:
            return
        if self._at_once:
            self._finish_at_once()
            return
        assert not any(self._missing), "a parameter got too few gradients"
        if summed is None:
            with self._recorder.span("grads-all-reduce"):
                if self._late is not None:
                    self._sum(self._late).wait()
                for _, summing, event in self._begun:
                    wait_for(summing, event)
        else:
            self._finish_one_by_one(summed)
        self._begun.clear()

    def _finish_at_once(self) -> None:
        with self._recorder.span("grads-all-reduce"), annotate_errors("all-reduce of the gradients"):
            if self._flat.share.shares > 1 or self._dtype != self._flat.grad.dtype:  # a copy of a bucket, not of all
                for number in range(len(self._flat.buckets)):
                    self._sum(number).wait()
            else:
                self._all_reduce(self._flat.grad).wait()

    def _finish_one_by_one(self, summed: Callable[[int], None]) -> None:
        under_way = {bucket for bucket, _, _ in self._begun}
        for bucket, summing, event in self._begun:
            with self._recorder.span("grads-all-reduce"):
                wait_for(summing, event)
            under_way.discard(bucket)
            if under_way:
                summed(self._flat.buckets[min(under_way)][0].start)

    def _arrived(self, name: str) -> None:
        if self._at_once:
            return
        if self._by_node is not None:
            self._by_node.go_on()
        self._left[name] -= 1
        if self._left[name]:
            return
        bucket = self._bucket_of[name]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0 and bucket != self._late:
            event = self._recorder.begin("overlapped-grads-all-reduce")
            summing = self._sum(bucket)
            if isinstance(summing, Summing):  # the others have several steps
                event.follow(summing.work)
            self._begun.append((bucket, summing, event))

    def _sum(self, bucket: int) -> UnderWaySum:
        """Begins the sum of a bucket."""
        gradients = self._flat.sums(bucket)
        if self._flat.share.shares == 1 or bucket == self._whole:
            return self._all_reduce(gradients)
        return self._scatter(bucket, gradients, self._flat.own(bucket, gradients))

    def _scatter(self, bucket: int, gradients: Tensor, own: Tensor) -> UnderWaySum:
        """Begins the sum of a bucket's gradients, of which each replica gets its `own` part."""
        sizes = self._flat.share.sizes(bucket)
        with annotate_errors("all-reduce of the gradients"):
            if self._by_node is not None:
                return self._by_node.begin(gradients, own, self._dtype, self._recorder.traffic)
            summing = self._begun_sum(lambda: begin_reduce_scatter(gradients, own, self._group, self._dtype, sizes))
        self._recorder.traffic.reduce_scattered(summing.sent, self._group, ALL_REDUCE)
        return summing

    def _all_reduce(self, gradients: Tensor) -> UnderWaySum:
        with annotate_errors("all-reduce of the gradients"):
            if self._by_node is not None:
                return self._by_node.begin(gradients, None, self._dtype, self._recorder.traffic)
            summing = self._begun_sum(lambda: begin_all_reduce(gradients, self._group, self._dtype))
        self._recorder.traffic.all_reduced(summing.sent, self._group)
        return summing

    def _begun_sum(self, begin: Callable[[], Summing]) -> Union[Summing, OnStream]:
        return begin() if self._stream is None else on_stream(self._stream, begin)


def wait_for(summing: UnderWaySum, event: UnderWay) -> None:
    with annotate_errors("all-reduce of the gradients"):
        summing.wait()
    event.end()
