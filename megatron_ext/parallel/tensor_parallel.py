"""Tensor parallelism after Shoeybi et al. 2019, and sequence parallelism after Korthikanti et al. 2022.

Between the layers every rank of a tensor group holds the same activations [batch, sequence, hidden] or, with
sequence parallelism, its share of the sequence. `enter` and `leave` are the two ends of a parallel region.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatron_ext.contract.traffic import TENSOR
from megatron_ext.parallel.comm import all_gather, told
from megatron_ext.timeline.recorder import Recorder

_REDUCE_SCATTER = "tensor-reduce-scatter"
PART = 2**22
"""Logits in fp32 at once: few enough to need little memory, and many enough to keep a GPU busy."""
CPU_PART = 2**18
"""The same on a CPU: few enough to stay in its cache."""


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
        """Of the pieces that make up this length."""
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
        """From outside into a parallel region: the whole sequence on every rank, whose gradients are summed."""
        if self.size == 1:
            return x
        return _Gather.apply(x, self) if self.sequence_parallel else _Copy.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Out of a parallel region: the sum of all ranks' partial results."""
        if self.size == 1:
            return x
        return _Scatter.apply(x, self) if self.sequence_parallel else _Reduce.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def positions(self, sequence: int) -> slice:
        """This rank's share of the sequence outside parallel regions."""
        if not self.sequence_parallel:
            return slice(0, sequence)
        share = sequence // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def places(self, share: int, device: torch.device) -> Tensor:
        """[share]: where a tensor outside parallel regions, of so many tokens here, has them in the sequence."""
        first = self.rank * share if self.sequence_parallel else 0
        return torch.arange(first, first + share, device=device)

    def first_token(self, x: Tensor) -> Tensor:
        """[batch, sequence outside parallel regions, …] -> its first token [batch, …] on every rank.

        What is computed from it goes through `alike`, so that gradients are summed once.
        """
        if not self.sequence_parallel or self.size == 1:
            return x[:, 0]
        own = x[:, 0] if self.rank == 0 else x[:, 0] * 0.0
        return _Copy.apply(_Reduce.apply(own, self), self)  # type: ignore[no-any-return, no-untyped-call]

    def alike(self, x: Tensor) -> Tensor:
        """The same x, which every rank computed alike from `first_token`.

        With sequence parallelism the gradients of weights that the ranks have in common are summed over the group, and
        each rank gives its part of them.
        """
        if not self.sequence_parallel or self.size == 1:
            return x
        return _Part.apply(x, self.size)  # type: ignore[no-any-return, no-untyped-call]


class _Part(Function):
    """Identity; divides the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        return gradient / ctx.size, None


class _Copy(Function):
    """Identity; sums the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        return _reduce(gradient, ctx.tensor), None


class _Reduce(Function):
    """Sums; identity for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        return _reduce(x, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    """[batch, sequence / size, …] -> [batch, sequence, …]; sums and scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return _gather(x, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        return _sum_scatter(gradient, ctx.tensor), None


class _Scatter(Function):
    """[batch, sequence, …] -> the sum's share [batch, sequence / size, …]; gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return _sum_scatter(x, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        return _gather(gradient, ctx.tensor), None


def _reduce(x: Tensor, tensor: TensorGroup, op: Any = dist.ReduceOp.SUM, name: str = "tensor-all-reduce") -> Tensor:
    total = x.clone()
    with tensor.recorder.inside(name), told("all-reduce of the tensor group"):
        dist.all_reduce(total, op, tensor.group)
    tensor.recorder.traffic.all_reduced(total, tensor.group, TENSOR)
    return total


def _gather(x: Tensor, tensor: TensorGroup) -> Tensor:
    x = x.contiguous()
    shares = x.new_empty(tensor.size, *x.shape)
    with tensor.recorder.inside("tensor-all-gather"):
        all_gather(x, shares, tensor.group, "all-gather of the tensor group")
    tensor.recorder.traffic.all_gathered(x, tensor.group, TENSOR)
    return shares.transpose(0, 1).flatten(1, 2)


def _sum_scatter(x: Tensor, tensor: TensorGroup) -> Tensor:
    if x.is_cuda:
        shares = torch.stack(x.chunk(tensor.size, 1))
        own = torch.empty_like(shares[0])
        with tensor.recorder.inside(_REDUCE_SCATTER), told("reduce-scatter of the tensor group"):
            dist.reduce_scatter_tensor(own, shares, group=tensor.group)
        tensor.recorder.traffic.reduce_scattered(shares, tensor.group)
        return own
    total = _reduce(x, tensor, name=_REDUCE_SCATTER)  # gloo has no reduce-scatter
    return total.chunk(tensor.size, 1)[tensor.rank].contiguous()


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


def vocab_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup, mask: Optional[Tensor] = None
) -> Tensor:
    """Mean cross-entropy in fp32 over the first `vocab_size` classes; the vocabulary's padding takes no part.

    logits [batch, sequence, padded vocabulary / size], of which the backward pass makes their gradient where they are
    many; labels [batch, sequence]. With a mask [batch, sequence], the mean is that over the tokens where it is 1;
    elsewhere labels may be anything.
    """
    if mask is None and tensor.size == 1 and logits.numel() <= PART:
        return F.cross_entropy(logits[..., :vocab_size].float().flatten(0, 1), labels.flatten())
    if mask is None:
        return vocab_losses(logits, labels, vocab_size, tensor).mean()
    return _mean(vocab_losses(logits, labels.masked_fill(mask == 0, 0), vocab_size, tensor), mask)


def vocab_losses(
    logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup, smoothing: float = 0.0
) -> Tensor:
    """The same of each token, [batch x sequence]. `smoothing` of a label's probability goes to all classes alike."""
    share = logits.shape[-1]
    first = tensor.rank * share
    classes = max(0, min(share, vocab_size - first))
    if tensor.size == 1 and logits.numel() <= PART:
        few = logits[..., :classes].float().flatten(0, 1)
        return F.cross_entropy(few, labels.flatten(), reduction="none", label_smoothing=smoothing)
    losses: Tensor = _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, 1), labels.flatten() - first, classes, tensor, smoothing, vocab_size
    )
    return losses


def vocab_hits(logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup) -> Tensor:
    """[batch, sequence]: whether no class has a higher logit than the label; the arguments are those of
    `vocab_losses`."""
    share = logits.shape[-1]
    first = tensor.rank * share
    classes = max(0, min(share, vocab_size - first))
    own = labels - first
    elsewhere = (own < 0) | (own >= classes)
    target = logits.gather(-1, own.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1).float()
    target = target.masked_fill(elsewhere, 0.0)
    highest = torch.full_like(target, -torch.inf)
    if classes:
        highest = logits[..., :classes].amax(-1).float()
    if tensor.size > 1:
        target, highest = _reduce(target, tensor), _reduce(highest, tensor, dist.ReduceOp.MAX)
    return target >= highest


def _mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Over those whose mask is 1; 0 if there are none."""
    counts = mask.flatten().float()
    return (losses * counts).sum() / counts.sum().clamp(min=1.0)


class _VocabCrossEntropy(Function):
    """Cross-entropy of logits [rows, classes and padding], whose other classes lie on the ranks of a tensor group.

    A label that lies elsewhere is out of range. Some rows at a time: logits in fp32, their exponentials and their
    gradient, of all rows at once, would take several times the memory of the logits themselves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        classes: int,
        tensor: TensorGroup,
        smoothing: float,
        vocab_size: int,
    ) -> Tensor:
        """`smoothing` of a label's probability is shared out to all `vocab_size` classes of the group."""
        elsewhere = (labels < 0) | (labels >= classes)
        index = labels.masked_fill(elsewhere, 0).unsqueeze(-1)
        own_log_sum = torch.full(labels.shape, -torch.inf, device=logits.device)
        target = torch.zeros_like(own_log_sum)
        sum_of_all = torch.zeros_like(own_log_sum)
        for rows in _parts(logits) if classes else ():
            target[rows] = logits[rows].gather(-1, index[rows]).squeeze(-1).float()
            logarithms = torch.log_softmax(logits[rows, :classes], -1, dtype=torch.float32)
            own_log_sum[rows] = target[rows] - logarithms.gather(-1, index[rows]).squeeze(-1)
            if smoothing:
                sum_of_all[rows] = logits[rows, :classes].sum(-1, dtype=torch.float32)
        log_sum = own_log_sum
        if tensor.size > 1:
            largest = _reduce(own_log_sum, tensor, dist.ReduceOp.MAX)
            parts = [(own_log_sum - largest).exp(), target.masked_fill(elsewhere, 0.0)]
            sums = _reduce(torch.stack([*parts, sum_of_all] if smoothing else parts), tensor)
            log_sum, target, sum_of_all = largest + sums[0].log(), sums[1], sums[-1]
        ctx.save_for_backward(logits, index, elsewhere, own_log_sum - log_sum)
        ctx.classes = classes
        ctx.smoothing, ctx.share = smoothing, smoothing / vocab_size
        if smoothing:
            target = (1.0 - smoothing) * target + ctx.share * sum_of_all
        return log_sum - target

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None, None, None, None, None]:
        logits, index, elsewhere, share = ctx.saved_tensors
        logits = logits.detach()
        ours = (gradient * (1.0 - ctx.smoothing)).masked_fill(elsewhere, 0.0).unsqueeze(-1)
        factor = (share.exp() * gradient).unsqueeze(-1)
        for rows in _parts(logits) if ctx.classes else ():
            part = torch.softmax(logits[rows, : ctx.classes], -1, dtype=torch.float32).mul_(factor[rows])
            if ctx.smoothing:
                part -= gradient[rows].unsqueeze(-1) * ctx.share
            logits[rows, : ctx.classes] = part.scatter_add_(-1, index[rows], -ours[rows])
        logits[:, ctx.classes :] = 0.0
        return logits, None, None, None, None, None


def _parts(logits: Tensor) -> Iterator[slice]:
    """Rows whose logits are taken at once."""
    rows = max(1, (PART if logits.is_cuda else min(PART, CPU_PART)) // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))
