"""The weights of a rank in one flat buffer, and the sum of their gradients in another."""

from __future__ import annotations

import math
from functools import partial
from typing import AbstractSet, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.layout import lcm
from megatron_ext.engine.gradients.share import Bucket, Share, WholeWeights

GRADIENT_BYTES = 4
"""Bytes of a sum of gradients, which is in fp32."""
LARGE = 2**20
"""Numbers of a weight from which on it pays on a CPU to call Python from autograd, and to have no gradient of its own
that is added to the sum."""
SMALL, TOGETHER = 2**16, 16
"""Numbers of a weight below which a GPU adds its gradient with those of others, and how many these are at most where
somebody waits for them: such an addition takes less time than the launch of its kernel."""

ALIGNED_BYTES = 16
"""At multiples of which the weights lie: products of groups of matrices, as experts have them, refuse other ones on a
GPU."""


class FlatWeights:
    """Lays all parameters of a rank out in one tensor, last layer first.

    The backward pass finishes gradients in this order, so a bucket of them is one slice of `grad`. Parameters
    become views of `weight`, which has the model's precision; gradients of all micro-batches are summed in fp32.
    """

    def __init__(
        self,
        named: List[Tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        device: torch.device,
        shares: Sequence[int] = (1,),
        of: Optional[FlatWeights] = None,
        *,
        rank: int = 0,
        bucket_bytes: float = math.inf,
        late: AbstractSet[str] = frozenset(),
        parts: int = 1,
        scatters: bool = False,
        blocks: Optional[Mapping[str, str]] = None,
    ) -> None:
        """`named` are fp32 parameters, first to last layer, which go to `device` in the format `dtype`.

        `initial` keeps their values in fp32, where they were: a GPU need not have room for what a sharded optimizer
        does not keep. Gradients are summed in buckets of at least `bucket_bytes`; those of the parameters in `late`,
        which wait for more than the backward pass, have the last one to themselves. Zeros between parameters align
        them, and zeros at the end of each bucket make its length a multiple of `parts` and of the sum of `shares`: in
        this proportion replicas keep it, of which this is number `rank`. With `of`, whose parameters these are copies
        of, the weights are the same memory, and the gradients are not. If it `scatters` gradients, `grad` has those of
        this replica's share alone, and those of a bucket are there from the first one until somebody takes them. With
        `blocks`, the block of each parameter, so has `weight`: the parameters are views of `whole`, where a bucket has
        those of one block alone.
        """
        ordered = [pair for pair in reversed(named) if pair[0] not in late]
        ordered += [pair for pair in reversed(named) if pair[0] in late]
        self.parameters = dict(ordered)
        step = ALIGNED_BYTES // torch.empty(0, dtype=dtype).element_size()
        multiple = lcm([sum(shares), parts, step])
        self.buckets: List[Bucket] = (
            _buckets(ordered, bucket_bytes, late, multiple, step, blocks) if of is None else of.buckets
        )
        """Neighbouring parameters, and where they lie."""
        self.slices: Dict[str, slice] = {}
        for here, names in self.buckets:
            start = here.start
            for name in names:
                self.slices[name] = slice(start, start + self.parameters[name].numel())
                start = _aligned(self.slices[name].stop, step)
        self.has_late = bool(late)
        self.share: Share = Share(self.buckets, shares, rank) if of is None else of.share
        self.kept = self.share if blocks is None else Share([(slice(0, self.share.length), [])])
        """Where what this replica keeps lies in `weight`."""
        self.numel = length = self.buckets[-1][0].stop if self.buckets else 0
        """The length of a tensor laid out like all weights."""
        before = ordered[0][1].device if ordered else device
        kept = length if blocks is None else self.share.length
        self.weight: Tensor = torch.zeros(kept, dtype=dtype, device=device) if of is None else of.weight
        same = (dtype, device) == (torch.float32, before) and blocks is None
        self.initial = self.weight if same or of is not None else torch.zeros(length, device=before)
        self.scatters = scatters
        self.grad = torch.zeros(self.share.length if scatters else length, device=device)
        self._sums: Dict[int, Tensor] = {}
        """The sums that wait to be scattered, by bucket; always those of a late one."""
        self._bucket_of = {name: number for number, (_, names) in enumerate(self.buckets) for name in names}
        self._fused = fuses(dtype, device)
        self._names = {id(parameter): name for name, parameter in ordered}
        self._arrived: Optional[Callable[[str], None]] = None
        self._waiting: List[str] = []
        """Whose gradients autograd has left, to be added together."""
        self._hooked: List[object] = []
        self.whole: Optional[WholeWeights] = None
        """All weights of a bucket while it is needed, where `weight` has this replica's share alone."""
        if of is None:
            for name, parameter in ordered:
                self.view(name, self.initial).copy_(parameter.data)
        if blocks is not None:
            self.whole = WholeWeights(self.buckets, self.parameters, self.slices, self.has_late, dtype, device)
            self.weight.copy_(self.share.of(self.initial))
        elif of is None and not same:
            self.weight.copy_(self.initial)
        for name, parameter in ordered:
            if self.whole is None:
                parameter.data = self.view(name, self.weight)
            if self._adds_in_place(parameter):
                parameter.grad = self.view(name, self.grad)
            else:
                self._after_each_gradient(parameter, partial(self._move, name))

    def view(self, name: str, flat: Tensor) -> Tensor:
        """The part of a tensor laid out like `weight` that belongs to the parameter `name`."""
        return flat[self.slices[name]].view(self.parameters[name].shape)

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The sum of a parameter's gradients so far, fp32; if it `scatters`, of those that wait for it."""
        return self._sum(self._names[id(parameter)]).view(parameter.shape)

    def where(self, parameter: nn.Parameter) -> slice:
        """Where a parameter lies."""
        return self.slices[self._names[id(parameter)]]

    def _sum(self, name: str) -> Tensor:
        if not self.scatters:
            return self.grad[self.slices[name]]
        bucket, here = self._bucket_of[name], self.slices[name]
        first = self.buckets[bucket][0].start
        return self.sums(bucket)[here.start - first : here.stop - first]

    def sums(self, bucket: int) -> Tensor:
        """The sums of a bucket's gradients."""
        here = self.buckets[bucket][0]
        if not self.scatters:
            return self.grad[here]
        if bucket not in self._sums:
            self._sums[bucket] = self.grad.new_zeros(here.stop - here.start)
        return self._sums[bucket]

    def take(self, bucket: int) -> Tensor:
        """The sums of a bucket, which begin anew, if it `scatters`."""
        sums = self.sums(bucket)
        del self._sums[bucket]
        return sums

    def own(self, bucket: int, sums: Tensor) -> Tensor:
        """This replica's part of the sums of a bucket."""
        return sums[self.share.within_bucket(bucket)]

    def keep(self, bucket: int, own: Tensor) -> None:
        """Adds the sums of this replica's part of a bucket to those before, if it `scatters`."""
        self.grad[self.share.parts[bucket][1]].add_(own)

    def _adds_in_place(self, parameter: nn.Parameter) -> bool:
        """Whether autograd itself adds to the sum."""
        return not self.scatters and parameter.dtype == self.grad.dtype

    def adds(self, parameter: nn.Parameter) -> bool:
        """Whether `add` and `add_rows` are the better way for a weight's gradient than autograd's own."""
        return self._fused or (not self.weight.is_cuda and parameter.numel() >= LARGE)

    def add(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Adds the gradient `left @ right`, which does not come through autograd's own accumulation."""
        total = self.gradient(parameter)
        if left.dtype == total.dtype:
            total.addmm_(left, right)
        elif self._fused:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:
            total.add_(left @ right)
        self._came(parameter)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradients: Tensor) -> None:
        """Adds the gradients [n, width] of rows [n] of a table, summed where a row came several times."""
        distinct, places = torch.unique(rows, return_inverse=True)
        # What F.embedding has for all rows of its table, and so equal to it to the last bit.
        sums = torch.ops.aten.embedding_dense_backward(gradients, places, len(distinct), -1, False)
        total = self.gradient(parameter)
        total.index_add_(0, distinct, sums.to(total.dtype))
        self._came(parameter)

    def _came(self, parameter: nn.Parameter) -> None:
        if self._arrived is not None:
            self._arrived(self._names[id(parameter)])

    def tell(self, arrived: Callable[[str], None]) -> None:
        """Has `arrived` called with a parameter's name whenever a micro-batch's gradient of it was added."""
        self._arrived = arrived
        for name, parameter in self.parameters.items():
            if self._adds_in_place(parameter):
                self._after_each_gradient(parameter, partial(arrived, name))

    def _move(self, name: str) -> None:
        """Adds what autograd left in a parameter's gradient, if it does not add to the sum itself."""
        parameter = self.parameters[name]
        assert parameter.grad is not None
        together = parameter.is_cuda and not self.scatters  # whose buckets would wait for the gradients of others
        if together and parameter.numel() < SMALL and hasattr(torch, "_foreach_copy_"):
            if not self._waiting:  # the backward pass ends with what is then left
                torch.autograd.Variable._execution_engine.queue_callback(self._move_together)
            self._waiting.append(name)
            if self._arrived is not None and len(self._waiting) == TOGETHER:
                self._move_together()
            return
        self.gradient(parameter).add_(parameter.grad)
        parameter.grad = None
        if self._arrived is not None:
            self._arrived(name)

    @torch.no_grad()
    def _move_together(self) -> None:
        """Adds what is waiting, in two kernels."""
        names, self._waiting = self._waiting, []
        if not names:
            return
        sums = [self.grad[self.slices[name]] for name in names]
        wide = self.grad.new_empty(sum(map(len, sums)))
        parts = wide.split_with_sizes([len(total) for total in sums])
        torch._foreach_copy_(parts, [self.parameters[name].grad.flatten() for name in names])  # type: ignore[union-attr]
        torch._foreach_add_(sums, parts)
        for name in names:
            self.parameters[name].grad = None
            if self._arrived is not None:
                self._arrived(name)

    def _after_each_gradient(self, parameter: nn.Parameter, call: Callable[[], None]) -> None:
        """Has `call` called whenever autograd has added to a parameter's gradient, in the order of registration."""
        # The node that adds to .grad has no public name; it runs its hooks after the addition in every torch
        # since 1.0, where register_post_accumulate_grad_hook needs torch 2.1.
        nothing = parameter.new_empty(0, *parameter.shape)  # for which no memory of the weight is asked for
        accumulate = (parameter * nothing).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        accumulate.register_hook(lambda *_: call())  # type: ignore[union-attr]
        self._hooked.append(accumulate)


def _buckets(
    ordered: Sequence[Tuple[str, nn.Parameter]],
    least_bytes: float,
    late: AbstractSet[str],
    multiple: int,
    step: int,
    blocks: Optional[Mapping[str, str]],
) -> List[Bucket]:
    found: List[Bucket] = []
    names: List[str] = []
    start = stop = 0
    for number, (name, parameter) in enumerate(ordered, 1):
        names.append(name)
        stop = _aligned(stop + parameter.numel(), step)
        ends = number == len(ordered) or (ordered[number][0] in late and name not in late)
        ends = ends or (blocks is not None and name not in late and blocks[name] != blocks[ordered[number][0]])
        if ends or ((stop - start) * GRADIENT_BYTES >= least_bytes and name not in late):
            stop = _aligned(stop, multiple)
            found.append((slice(start, stop), names))
            start, names = stop, []
    return found


def _aligned(number: int, step: int) -> int:
    """The first multiple of `step` that is not less."""
    return number + -number % step


def fuses(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a gradient, a product of matrices in `dtype`, is best added to its sum in fp32 by the product itself.

    On a GPU that saves a gradient of its own and two passes over it, which for small micro-batches take as long as the
    product. With 16-bit matrices torch can do so since 2.8, on most GPUs: it is tried, for there is nothing that tells.
    On a CPU it depends on the weight (`LARGE`).
    """
    if device.type != "cuda" or dtype == torch.float32:
        return device.type == "cuda"
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17.0).all())
