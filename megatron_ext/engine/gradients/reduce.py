"""The gradients' all-reduce over the data-parallel group, while the backward pass of earlier layers goes on."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Optional, Tuple

import torch.distributed as dist

from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.timeline.recorder import Recorder, UnderWay


class GradientReducer:
    """Sums gradients over a group, a bucket as soon as all micro-batches have added to all of its parameters.

    A single bucket is only full at the end, and summed there.
    """

    def __init__(
        self,
        flat: FlatWeights,
        group: Optional[dist.ProcessGroup],
        bucket_bytes: float,
        recorder: Recorder,
        uses: Mapping[str, int],
    ) -> None:
        """`uses` says, by parameter, how many chunks use it, each of which gives a gradient for every micro-batch."""
        self._flat = flat
        self._uses = uses
        self._group = group
        self._recorder = recorder
        self._buckets = buckets(flat, bucket_bytes)
        self._bucket_of = {name: number for number, (_, names) in enumerate(self._buckets) for name in names}
        self._left: Dict[str, int] = {}
        self._missing: List[int] = []
        self._begun: List[Tuple[int, dist.Work, UnderWay]] = []
        """By bucket."""
        self._early = group is not None and len(self._buckets) > 1
        """Whether there is something to overlap; to be told of every gradient costs a small model some percent."""
        self._at_once = not self._early
        if self._early:
            flat.tell(self._arrived)

    @property
    def ends(self) -> List[int]:
        """Of the buckets that are summed by themselves, but the last one, in the flat weights."""
        return [here.stop for here, _ in self._buckets[:-1]] if self._early else []

    def begin(self, micro_batches: int, at_once: bool = False) -> None:
        """Starts an iteration of this many micro-batches, whose gradients are summed in `finish` if `at_once`."""
        self._at_once = at_once or not self._early
        self._left = {name: micro_batches * self._uses[name] for name in self._flat.slices}
        self._missing = [len(names) for _, names in self._buckets]

    def finish(self, summed: Optional[Callable[[int], None]] = None) -> None:
        """Waits until all gradients are summed; a mean needs its factor in the loss.

        Before it waits for another bucket, `summed` is given up to where all of the flat gradients are.
        """
        if self._group is None:
            return
        if self._at_once:
            with self._recorder.span("grads-all-reduce"), annotate_errors("all-reduce of the gradients"):
                dist.all_reduce(self._flat.grad, group=self._group)
                self._recorder.traffic.all_reduced(self._flat.grad, self._group)
            return
        assert not any(self._missing), "a parameter got too few gradients"
        if summed is None:
            with self._recorder.span("grads-all-reduce"):
                for _, work, event in self._begun:
                    _wait(work, event)
        else:
            self._finish_one_by_one(summed)
        self._begun.clear()

    def _finish_one_by_one(self, summed: Callable[[int], None]) -> None:
        under_way = {bucket for bucket, _, _ in self._begun}
        for bucket, work, event in self._begun:
            with self._recorder.span("grads-all-reduce"):
                _wait(work, event)
            under_way.discard(bucket)
            if under_way:
                summed(self._buckets[min(under_way)][0].start)

    def _arrived(self, name: str) -> None:
        if self._at_once:
            return
        self._left[name] -= 1
        if self._left[name]:
            return
        bucket = self._bucket_of[name]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            here, _ = self._buckets[bucket]
            event = self._recorder.begin("overlapped-grads-all-reduce")
            with annotate_errors("all-reduce of the gradients"):
                work = dist.all_reduce(self._flat.grad[here], group=self._group, async_op=True)
            assert work is not None
            self._recorder.traffic.all_reduced(self._flat.grad[here], self._group)
            event.follow(work)
            self._begun.append((bucket, work, event))


def _wait(work: dist.Work, event: UnderWay) -> None:
    with annotate_errors("all-reduce of the gradients"):
        work.wait()
    event.end()


def buckets(flat: FlatWeights, least_bytes: float) -> List[Tuple[slice, List[str]]]:
    """Neighbouring parameters in slices of at least `least_bytes` of gradients, but for the last one."""
    found: List[Tuple[slice, List[str]]] = []
    names: List[str] = []
    start = 0
    for name, here in flat.slices.items():
        names.append(name)
        if (here.stop - start) * flat.grad.element_size() >= least_bytes:
            found.append((slice(start, here.stop), names))
            start, names = here.stop, []
    if names:
        found.append((slice(start, flat.grad.numel()), names))
    return found
