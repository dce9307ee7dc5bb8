"""Cross-entropy over a vocabulary that a tensor group shares, without a copy of all logits in fp32.

On a GPU each pass over the logits is one kernel; on a CPU, and where there is no compiler, they are taken in parts.
"""

from __future__ import annotations

from typing import Any, Iterator, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatron_ext.parallel.fused import Fused, fuses
from megatron_ext.parallel.tensor_parallel import TensorGroup, reduce

PART = 2**22
"""Logits in fp32 at once: few enough to need little memory, and many enough to keep a GPU busy."""
CPU_PART = 2**18
"""The same on a CPU: few enough to stay in its cache."""


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
    return _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, 1), labels.flatten() - first, classes, tensor, smoothing, vocab_size
    )


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
        target, highest = reduce(target, tensor), reduce(highest, tensor, dist.ReduceOp.MAX)
    return target >= highest


def _mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Over those whose mask is 1; 0 if there are none."""
    counts = mask.flatten().float()
    return (losses * counts).sum() / counts.sum().clamp(min=1.0)


class _VocabCrossEntropy(Function):
    """Cross-entropy of logits [rows, classes and padding], whose other classes lie on the ranks of a tensor group.

    A label that lies elsewhere is out of range. Logits in fp32, their exponentials and their gradient would take
    several times the memory of the logits themselves: they are there within a kernel only, or of some rows at a time.
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
        ctx.whole = classes > 0 and fuses(logits.device)
        own_log_sum = torch.full(labels.shape, -torch.inf, device=logits.device)
        target = torch.zeros_like(own_log_sum)
        sum_of_all = torch.zeros_like(own_log_sum)
        if ctx.whole:
            own_log_sum, sum_of_all = _log_sums(logits, classes, smoothing > 0)
            target = logits.gather(-1, index).squeeze(-1).float()
        for rows in _parts(logits) if classes and not ctx.whole else ():
            target[rows] = logits[rows].gather(-1, index[rows]).squeeze(-1).float()
            logarithms = torch.log_softmax(logits[rows, :classes], -1, dtype=torch.float32)
            own_log_sum[rows] = target[rows] - logarithms.gather(-1, index[rows]).squeeze(-1)
            if smoothing:
                sum_of_all[rows] = logits[rows, :classes].sum(-1, dtype=torch.float32)
        log_sum = own_log_sum
        if tensor.size > 1:
            largest = reduce(own_log_sum, tensor, dist.ReduceOp.MAX)
            parts = [(own_log_sum - largest).exp(), target.masked_fill(elsewhere, 0.0)]
            sums = reduce(torch.stack([*parts, sum_of_all] if smoothing else parts), tensor)
            log_sum, target, sum_of_all = largest + sums[0].log(), sums[1], sums[-1]
        ctx.save_for_backward(logits, index, elsewhere, log_sum if ctx.whole else own_log_sum - log_sum)
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
        if ctx.whole:
            _gradient(logits, ctx.classes, share, index, gradient, ours, ctx.share)
            return logits, None, None, None, None, None
        factor = (share.exp() * gradient).unsqueeze(-1)
        for rows in _parts(logits) if ctx.classes else ():
            part = torch.softmax(logits[rows, : ctx.classes], -1, dtype=torch.float32).mul_(factor[rows])
            if ctx.smoothing:
                part -= gradient[rows].unsqueeze(-1) * ctx.share
            logits[rows, : ctx.classes] = part.scatter_add_(-1, index[rows], -ours[rows])
        logits[:, ctx.classes :] = 0.0
        return logits, None, None, None, None, None


@Fused
def _log_sums(logits: Tensor, classes: int, with_sums: bool) -> Tuple[Tensor, Tensor]:
    """[rows] each: the logarithm of the sum of the classes' exponentials, and the sum of their logits if asked for."""
    wide = logits[:, :classes].float()
    log_sums = torch.logsumexp(wide, -1)
    return log_sums, wide.sum(-1) if with_sums else torch.zeros_like(log_sums)


@Fused
def _gradient(
    logits: Tensor, classes: int, log_sum: Tensor, index: Tensor, gradient: Tensor, ours: Tensor, each: float
) -> None:
    """Puts the gradient of logits [rows, classes and padding] in their place: of each class its probability times
    `gradient` [rows], less `each` of that for smoothing, and less `ours` [rows, 1] where it is the label `index`."""
    column = torch.arange(logits.shape[-1], device=logits.device)
    of_loss = ((logits.float() - log_sum.unsqueeze(-1)).exp() - each) * gradient.unsqueeze(-1)
    of_loss = of_loss - torch.where(column == index, ours, 0.0)
    logits.copy_(torch.where(column < classes, of_loss, 0.0))


def _parts(logits: Tensor) -> Iterator[slice]:
    """Rows whose logits are taken at once."""
    rows = max(1, (PART if logits.is_cuda else min(PART, CPU_PART)) // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))
