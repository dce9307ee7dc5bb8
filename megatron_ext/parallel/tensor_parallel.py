"""Tensor parallelism after Shoeybi et al. 2019, and sequence parallelism after Korthikanti et al. 2022.

Between the layers every rank of a tensor group holds the same activations [batch, sequence, hidden] or, with
sequence parallelism, its share of the sequence. `enter` and `leave` are the two ends of a parallel region.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatron_ext.contract.events import TENSOR
from megatron_ext.parallel.comm import all_gather, annotate_errors
from megatron_ext.parallel.fused import compiling
from megatron_ext.timeline.recorder import Recorder

_REDUCE_SCATTER = "tensor-reduce-scatter"


def numbers(first: int, end: int, device: torch.device) -> Tensor:
    """[end - first] from `first` on: one for all layers, and not to be changed."""
    return torch.arange(first, end, device=device) if compiling() else _numbers(first, end, device)


@lru_cache(maxsize=64)
def _numbers(first: int, end: int, device: torch.device) -> Tensor:
    return torch.arange(first, end, device=device)


class Shard(NamedTuple):
    """How a parameter is cut: along `dim`, which consists of pieces that are each cut."""

    dim: int
    pieces: Tuple[int, ...] = (1,)
    """Their relative lengths."""

    def part(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """The share of `rank` out of `size`."""
        pieces = whole.split(self.lengths(whole.shape[self.dim]), self.dim)  # type: ignore[no-untyped-call]
        return torch.cat([piece.chunk(size, self.dim)[rank] for piece in pieces], self.dim)

    def whole(self, parts: List[Tensor]) -> Tensor:
        """Puts the shares of all ranks together again."""
        lengths = self.lengths(parts[0].shape[self.dim])
        shares = [part.split(lengths, self.dim) for part in parts]  # type: ignore[no-untyped-call]
        return torch.cat([share[piece] for piece in range(len(lengths)) for share in shares], self.dim)

    def lengths(self, length: int) -> List[int]:
        """Returns the lengths of the pieces that make up this length."""
        unit = length // sum(self.pieces)
        return [piece * unit for piece in self.pieces]


class TensorGroup(NamedTuple):
    """A rank's tensor group: its size, this rank's number in it, whether it shares the sequence, and what records its
    messages."""

    size: int = 1
    rank: int = 0
    group: Optional[dist.ProcessGroup] = None
    sequence_parallel: bool = False
    recorder: Recorder = Recorder(None)

    def enter(self, x: Tensor) -> Tensor:
        """Goes from outside into a parallel region: the whole sequence on every rank, whose gradients are summed."""
        if self.size == 1:
            return x
        return _gathered(x, self) if self.sequence_parallel else _copied(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Out of a parallel region: the sum of all ranks' partial results."""
        if self.size == 1:
            return x
        return _scattered(x, self) if self.sequence_parallel else _reduced(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """[…, width / size] -> [… width] on every rank, which all then compute the same with."""
        return x if self.size == 1 else _gathered_last(x, self)

    def split(self, x: Tensor) -> Tensor:
        """The inverse of `gather`: from what all ranks have alike to a rank's share of the last dimension."""
        return x if self.size == 1 else _split_last(x, self)

    def positions(self, sequence: int) -> slice:
        """This rank's share of the sequence outside parallel regions."""
        if not self.sequence_parallel:
            return slice(0, sequence)
        share = sequence // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def places(self, share: int, device: torch.device) -> Tensor:
        """[share]: where a tensor outside parallel regions, of so many tokens here, has them in the sequence."""
        first = self.rank * share if self.sequence_parallel else 0
        return numbers(first, first + share, device)

    def first_token(self, x: Tensor) -> Tensor:
        """[batch, sequence outside parallel regions, …] -> its first token [batch, …] on every rank.

        What is computed from it goes through `alike`, so that gradients are summed once.
        """
        if not self.sequence_parallel or self.size == 1:
            return x[:, 0]
        own = x[:, 0] if self.rank == 0 else x[:, 0] * 0.0
        return _copied(_reduced(own, self), self)

    def alike(self, x: Tensor) -> Tensor:
        """The same x, which every rank computed alike from `first_token`.

        With sequence parallelism the gradients of weights that the ranks have in common are summed over the group, and
        each rank gives its part of them.
        """
        if not self.sequence_parallel or self.size == 1:
            return x
        return _Part.apply(x, self.size)  # type: ignore[no-untyped-call]


class _Part(Function):
    """Identity; divides the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        return gradient / ctx.size, None


def reduce(x: Tensor, tensor: TensorGroup, op: Any = dist.ReduceOp.SUM, name: str = "tensor-all-reduce") -> Tensor:
    total = x.clone()
    if not x.is_meta:  # else there are no numbers, and nobody else
        with tensor.recorder.inside(name), annotate_errors("all-reduce of the tensor group"):
            dist.all_reduce(total, op, tensor.group)
    tensor.recorder.traffic.all_reduced(total, tensor.group, TENSOR)
    return total


def _gather(x: Tensor, tensor: TensorGroup) -> Tensor:
    x = x.contiguous()
    shares = x.new_empty(tensor.size, *x.shape)
    if not x.is_meta:
        with tensor.recorder.inside("tensor-all-gather"):
            all_gather(x, shares, tensor.group, "all-gather of the tensor group")
    tensor.recorder.traffic.all_gathered(x, tensor.group, TENSOR)
    return shares.transpose(0, 1).flatten(1, 2)


def _gather_last(x: Tensor, tensor: TensorGroup) -> Tensor:
    return _gather(x.movedim(-1, 0)[None], tensor)[0].movedim(0, -1).contiguous()


def _sum_scatter(x: Tensor, tensor: TensorGroup) -> Tensor:
    if x.is_cuda:
        shares = torch.stack(x.chunk(tensor.size, 1))
        own = torch.empty_like(shares[0])
        with tensor.recorder.inside(_REDUCE_SCATTER), annotate_errors("reduce-scatter of the tensor group"):
            dist.reduce_scatter_tensor(own, shares, group=tensor.group)
        tensor.recorder.traffic.reduce_scattered(shares, tensor.group)
        return own
    total = reduce(x, tensor, name=_REDUCE_SCATTER)  # gloo has no reduce-scatter
    return total.chunk(tensor.size, 1)[tensor.rank].contiguous()


def _own_last(x: Tensor, tensor: TensorGroup) -> Tensor:
    return x.chunk(tensor.size, -1)[tensor.rank].contiguous()


def _function(there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Callable[[Tensor, TensorGroup], Tensor]:
    """An operation of a tensor group: what becomes of x, and of the gradients."""

    class Both(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
            ctx.tensor = tensor
            return there(x, tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
            return back(gradient, ctx.tensor), None

    return Both.apply


_copied = _function(lambda x, _: x.view_as(x), reduce)
_reduced = _function(reduce, lambda gradient, _: gradient)
_gathered, _scattered = _function(_gather, _sum_scatter), _function(_sum_scatter, _gather)
"""Between [batch, sequence / size, …] and [batch, sequence, …]."""
_gathered_last, _split_last = _function(_gather_last, _own_last), _function(_own_last, _gather_last)


def vocab_embedding(
    tokens: Tensor, word: Tensor, tensor: TensorGroup, look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
) -> Tensor:
    """tokens [batch, sequence], word [padded vocabulary / size, hidden] -> embeddings as outside parallel regions."""
    if tensor.size == 1:
        return look_up(tokens, word)
    first = tensor.rank * word.shape[0]
    elsewhere = (tokens < first) | (tokens >= first + word.shape[0])
    own = look_up((tokens - first).masked_fill(elsewhere, 0), word)
    return tensor.leave(own.masked_fill(elsewhere.unsqueeze(-1), 0.0))
