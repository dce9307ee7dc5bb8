"""Gathers the weights of blocks for their passes, where each replica keeps a share of them alone (ZeRO stage 3)."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, Callable, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.parallel.comm import Works, annotate_errors, begin_all_gather, begin_hand_out
from megatron_ext.tasks.stage import Stage
from megatron_ext.timeline.recorder import Recorder

_WHAT = "all-gather of the weights"


class Pass(NamedTuple):
    """One pass of a micro-batch through a chunk."""

    chunk: int
    backward: bool


class BlockWeights:
    """Has the weights of a block while it computes, and gathers those of the next one meanwhile.

    A block's weights are gathered for its forward and again for its backward pass, and given up when another block
    begins that has no use for them, so that those of two blocks at most are there. All replicas of a stage pass the
    same blocks in the same order: the gathers of one wait for the others. With nccl they have a stream of their own,
    and only the GPU waits.
    """

    def __init__(
        self, flat: FlatWeights, stages: Sequence[Stage], group: Optional[dist.ProcessGroup], recorder: Recorder
    ) -> None:
        """`stages` are the rank's chunks, whose blocks from now on gather their weights."""
        assert flat.whole is not None
        self._kept, self._share, self._whole = flat.weight, flat.share, flat.whole
        self._group = group
        self._recorder = recorder
        self._here: Dict[int, Union[dist.Work, Works, None]] = {}
        """Buckets that are there or, with what is to be waited for, under way."""
        self._coming: Deque[Pass] = deque()
        """The pass under way, and those after it."""
        self._needed: List[List[Sequence[int]]] = []
        """For each chunk, the buckets of each block that has any, in their order."""
        for chunk, stage in enumerate(stages):
            of_chunk: List[Sequence[int]] = []
            for module in stage.blocks:
                ids = map(id, module.parameters())
                buckets = sorted({self._whole.buckets[one] for one in ids if one in self._whole.buckets})
                if buckets:
                    module.forward = partial(self._forward, module.forward, chunk, len(of_chunk))
                    of_chunk.append(buckets)
            self._needed.append(of_chunk)

    def expect(self, passes: Iterable[Pass]) -> None:
        """Begins an iteration of these passes, and to gather what the first one needs."""
        self.end()
        self._coming.extend(passes)
        self._begin(self._first_of_pass(0))

    def passed(self) -> None:
        """Is told that the pass under way has ended."""
        if self._coming:
            self._coming.popleft()

    def pass_aside(self, chunk: int) -> None:
        """Gathers as a forward pass does which other replicas make, and this one does not."""
        for number in range(len(self._needed[chunk])):
            self._enter(chunk, number, backward=False)
        self.passed()

    def end(self) -> None:
        """Leaves nothing here: what comes next may change the weights."""
        self._coming.clear()
        self._keep(())

    def _forward(self, forward: Callable[..., Any], chunk: int, number: int, *taken: Any) -> Any:
        self._enter(chunk, number, backward=False)
        given = forward(*taken)
        if torch.is_grad_enabled():
            entered = {id(one) for one in taken}
            for one in given if isinstance(given, tuple) else (given,):
                if isinstance(one, Tensor) and one.requires_grad and id(one) not in entered:
                    one.register_hook(partial(self._backward, chunk, number))  # type: ignore[no-untyped-call]
        return given

    def _backward(self, chunk: int, number: int, _: Tensor) -> None:
        """Is called when autograd comes to the last operation of a block: it goes through those of later ones first."""
        self._enter(chunk, number, backward=True)

    def _enter(self, chunk: int, number: int, backward: bool) -> None:
        """Has the weights of a block, and no others but those that come next."""
        needed, following = self._needed[chunk][number], self._following(chunk, number, backward)
        self._keep((*needed, *following))
        self._begin(needed)
        for bucket in needed:
            self._wait(bucket)
        self._begin(following)

    def _following(self, chunk: int, number: int, backward: bool) -> Sequence[int]:
        """The buckets of the block after this one."""
        following = number - 1 if backward else number + 1
        if 0 <= following < len(self._needed[chunk]):
            return self._needed[chunk][following]
        return self._first_of_pass(1)

    def _first_of_pass(self, ahead: int) -> Sequence[int]:
        """The buckets of the first block of the pass under way, or of one after it."""
        for chunk, backward in list(self._coming)[ahead : ahead + 1]:
            for needed in self._needed[chunk][-1 if backward else 0 :][:1]:
                return needed
        return ()

    def _begin(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            if bucket not in self._here:
                own, whole = self._kept[self._share.parts[bucket][1]], self._whole.make(bucket)
                sizes = self._share.sizes(bucket)
                with annotate_errors(_WHAT):
                    if sizes is None:
                        self._here[bucket] = begin_all_gather(own, whole.view(-1, len(own)), self._group)
                    else:
                        whole[self._share.within_bucket(bucket)].copy_(own)
                        self._here[bucket] = begin_hand_out(whole, sizes, self._group)
                self._recorder.traffic.shared_out(whole, self._group)

    def _wait(self, bucket: int) -> None:
        work = self._here[bucket]
        if work is not None:
            with self._recorder.span("params-all-gather"), annotate_errors(_WHAT):
                work.wait()
            self._here[bucket] = None

    def _keep(self, buckets: Tuple[int, ...]) -> None:
        """Gives up all others."""
        for bucket in [one for one in self._here if one not in buckets]:
            self._wait(bucket)
            self._whole.free(bucket)
            del self._here[bucket]
