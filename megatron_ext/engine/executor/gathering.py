"""Gathers the weights of blocks for their passes, where each replica keeps a share of them alone (ZeRO stage 3)."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Union

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
    """Has the weights of a block while it computes, and gathers those of the next ones meanwhile.

    A block's weights are gathered for its forward and again for its backward pass, and given up when another block
    begins and they are not among the next that are needed. As many of the next blocks' are there, also of the passes
    that follow, as take no more memory than the two largest neighbours: so a block that computes next to nothing, such
    as an embedding, keeps no large one behind it waiting, and the one that a pass ends with is there where the next
    pass begins with it. All replicas of a stage pass the same blocks in the same order: the gathers of one wait for the
    others. With nccl they have a stream of their own, and only the GPU waits.
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
        neighbours = [(one, after) for of in self._needed for one, after in zip(of, [*of[1:], ()])]
        ends = [(chunk, one) for chunk, of in enumerate(self._needed) for one in (*of[:1], *of[-1:])]
        neighbours += [(one, after) for chunk, one in ends for other, after in ends if chunk != other]
        self._room = max((self._bytes({*one, *after}) for one, after in neighbours), default=0)
        """Bytes of whole weights that are there at once, at most."""
        self._every = {bucket for of in self._needed for needed in of for bucket in needed}

    def expect(self, passes: Iterable[Pass]) -> None:
        """Begins an iteration of these passes, and to gather what the first one needs."""
        self.end()
        self._coming.extend(passes)
        self._begin(self._fitting((), self._of_passes(0)))

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
        self._keep(set())

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
        needed = self._needed[chunk][number]
        following = self._fitting(needed, self._after(chunk, number, backward))
        self._keep({*needed, *following})
        self._begin(needed)
        for bucket in needed:
            self._wait(bucket)
        self._begin(following)

    def _after(self, chunk: int, number: int, backward: bool) -> Iterator[Sequence[int]]:
        """The buckets of each block after this one, to the end of all passes that are known."""
        of_chunk = self._needed[chunk]
        yield from reversed(of_chunk[:number]) if backward else of_chunk[number + 1 :]
        yield from self._of_passes(1)

    def _of_passes(self, ahead: int) -> Iterator[Sequence[int]]:
        """Those of each block of the pass under way (0), or of the one behind it (1), and of all after that."""
        for chunk, backward in islice(self._coming, ahead, None):
            yield from reversed(self._needed[chunk]) if backward else self._needed[chunk]

    def _fitting(self, here: Sequence[int], following: Iterator[Sequence[int]]) -> Sequence[int]:
        """Those of the blocks that come next for which there is room beside these, in order."""
        found: Dict[int, None] = {}
        for needed in following:
            if self._bytes({*here, *found, *needed}) > self._room:
                break
            found.update(dict.fromkeys(needed))
            if self._every == {*here, *found}:
                break
        return [*found]

    def _bytes(self, buckets: Set[int]) -> int:
        return sum(self._whole.of(bucket).nbytes for bucket in buckets)

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

    def _keep(self, buckets: Set[int]) -> None:
        """Gives up all others."""
        for bucket in [one for one in self._here if one not in buckets]:
            self._wait(bucket)
            self._whole.free(bucket)
            del self._here[bucket]
