"""The sum of gradients over replicas of which each keeps the sums of its share alone (ZeRO stage 2)."""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, List, Mapping, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.parallel_config import BUCKETS_UNDER_WAY
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.reduce import GradientReducer, UnderWaySum, wait_for
from megatron_ext.parallel.groups import ByNode
from megatron_ext.parallel.summing import Summing
from megatron_ext.timeline.recorder import Recorder, UnderWay


class _Scattering(NamedTuple):
    """A bucket on its way."""

    bucket: int
    summing: UnderWaySum
    event: UnderWay
    own: Tensor
    """Where this replica's part of the sum will be."""


class ScatteringReducer(GradientReducer):
    """Sums a bucket after each micro-batch, as soon as the micro-batch has added to all of its parameters, and lets go
    of it; a late one at the end.

    Replicas may have unequal numbers of micro-batches. One with fewer than others adds zeros first, so that those that
    have more do not wait for it.
    """

    def __init__(
        self,
        flat: FlatWeights,
        group: Optional[dist.ProcessGroup],
        recorder: Recorder,
        uses: Mapping[str, int],
        dtype: torch.dtype,
        by_node: Optional[ByNode],
        rounds: int,
        in_order: bool,
    ) -> None:
        """Takes what `GradientReducer` takes, too. `rounds` are the micro-batches of the replica with the most.
        `in_order` has buckets of a micro-batch summed in their order, not in that in which they are full, which
        replicas with zeros do not know.
        """
        super().__init__(flat, group, recorder, uses, dtype, by_node=by_node)
        self._rounds = rounds
        self._in_order = in_order
        self._numbers = [number for number in range(len(flat.buckets)) if number != self._late]
        self._aside = True
        self._micro_batches = 0
        self._came: Dict[str, int] = {}
        self._full: List[int] = []
        """For each bucket, how many micro-batches have added to all of its parameters."""
        self._sent: List[int] = []
        """For each bucket, how many of them were summed."""
        self._behind: List[int] = []
        """For each bucket, how many of its parameters the next micro-batch has not added to."""
        self._under_way: Deque[_Scattering] = deque()
        flat.tell(self._arrived)

    @property
    def ends(self) -> List[int]:
        return []

    def begin(self, micro_batches: int, at_once: bool = False) -> None:
        assert not at_once, "gradients that are scattered are summed while they come"
        self._restart()
        self._aside, self._micro_batches = False, micro_batches
        for _ in range(self._rounds - micro_batches):
            for number in self._numbers:
                self._send(number)

    def begin_aside(self) -> None:
        self._restart()
        self._aside = True

    def _restart(self) -> None:
        self._came = dict.fromkeys(self._flat.slices, 0)
        self._full = [0] * len(self._flat.buckets)
        self._sent = [0] * len(self._flat.buckets)
        self._behind = [len(names) for _, names in self._flat.buckets]

    def finish(self, summed: Optional[Callable[[int], None]] = None) -> None:
        with self._recorder.span("grads-all-reduce"):
            while self._under_way:
                self._keep()
            assert all(self._sent[number] == self._micro_batches for number in self._numbers), "a gradient is missing"
            if self._late is not None:
                sums = self._flat.sums(self._late)
                own = self._flat.own(self._late, sums)
                self._scatter(self._late, sums, own).wait()
                self._flat.keep(self._late, own)
                sums.zero_()

    def _arrived(self, name: str) -> None:
        if self._by_node is not None:
            self._by_node.go_on()
        self._came[name] += 1
        bucket = self._bucket_of[name]
        if bucket == self._late or self._came[name] % self._uses[name]:
            return
        if self._came[name] // self._uses[name] != self._full[bucket] + 1:
            return
        self._behind[bucket] -= 1
        if self._behind[bucket]:
            return
        self._full[bucket] += 1
        names = self._flat.buckets[bucket][1]
        self._behind[bucket] = sum(self._came[one] // self._uses[one] == self._full[bucket] for one in names)
        if self._in_order:
            self._send_in_order()
        else:
            self._send_own(bucket)

    def _send_in_order(self) -> None:
        """Sums those that are full, up to the first one in the order of all that is not."""
        while True:
            following = min(self._numbers, key=lambda number: (self._sent[number], number))
            if self._sent[following] == self._full[following]:
                return
            self._send_own(following)

    def _send_own(self, bucket: int) -> None:
        self._sent[bucket] += 1
        if self._aside:
            self._flat.take(bucket)
        else:
            self._send(bucket)

    def _send(self, bucket: int) -> None:
        if len(self._under_way) == BUCKETS_UNDER_WAY:
            with self._recorder.span("grads-all-reduce"):
                self._keep()
        sums = self._flat.take(bucket)
        own = self._flat.own(bucket, sums)
        event = self._recorder.begin("overlapped-grads-all-reduce")
        summing = self._scatter(bucket, sums, own)
        if isinstance(summing, Summing):
            event.follow(summing.work)
        self._under_way.append(_Scattering(bucket, summing, event, own))

    def _keep(self) -> None:
        """Waits for the sum that has begun first."""
        done = self._under_way.popleft()
        wait_for(done.summing, done.event)
        self._flat.keep(done.bucket, done.own)
