"""The weights of a stage and their gradients, each in one flat buffer, and the gradients' all-reduce."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.comm import told


class FlatWeights:
    """Lays all parameters of a stage out in one tensor, last layer first.

    The backward pass finishes gradients in this order, so a bucket of them is one slice of `grad`. `weight`
    is itself a parameter with `.grad`: one tensor for the optimizer. The parameters and their gradients are
    views, and gradients accumulate in place.
    """

    def __init__(self, named: List[Tuple[str, nn.Parameter]]) -> None:
        ordered = list(reversed(named))
        total = sum(parameter.numel() for _, parameter in ordered)
        like = ordered[0][1] if ordered else torch.empty(0)
        self.weight = nn.Parameter(torch.empty(total, dtype=like.dtype, device=like.device))
        self.grad = torch.zeros_like(self.weight)
        self.weight.grad = self.grad
        self.slices: Dict[str, slice] = {}
        self.shapes: Dict[str, torch.Size] = {}
        self.parameters = dict(ordered)
        start = 0
        for name, parameter in ordered:
            here = slice(start, start + parameter.numel())
            self.slices[name], self.shapes[name] = here, parameter.shape
            self.weight.data[here] = parameter.data.flatten()
            parameter.data = self.weight.data[here].view(parameter.shape)
            parameter.grad = self.grad[here].view(parameter.shape)
            start = here.stop

    def view(self, name: str, flat: Tensor) -> Tensor:
        """The part of a tensor laid out like `weight` that belongs to the parameter `name`."""
        return flat[self.slices[name]].view(self.shapes[name])


class GradientReducer:
    """Sums gradients over the data-parallel group, a bucket as soon as the backward pass has filled it."""

    def __init__(self, flat: FlatWeights, group: Optional[dist.ProcessGroup], bucket_bytes: int) -> None:
        self._flat = flat
        self._group = group
        self._buckets = _buckets(flat, bucket_bytes)
        self._missing: List[int] = []
        self._works: List[dist.Work] = []
        self._hooks: List[object] = []
        if group is not None:
            for number, (_, names) in enumerate(self._buckets):
                for name in names:
                    self._watch(flat.parameters[name], number)

    def arm(self) -> None:
        """Call before the last backward pass of an iteration: from now on full buckets are sent."""
        if self._group is not None:
            self._missing = [len(names) for _, names in self._buckets]

    def finish(self) -> None:
        """Waits until all gradients are summed; a mean needs its factor in the loss."""
        with told("all-reduce of the gradients"):
            for work in self._works:
                work.wait()
        self._works.clear()
        assert not any(self._missing), "a parameter got no gradient"

    def _watch(self, parameter: nn.Parameter, bucket: int) -> None:
        # The node that adds to .grad has no public name; it runs its hooks after the addition, in every torch
        # since 1.0, where register_post_accumulate_grad_hook needs torch 2.1.
        accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        accumulate.register_hook(lambda *_: self._arrived(bucket))  # type: ignore[union-attr]
        self._hooks.append(accumulate)

    def _arrived(self, bucket: int) -> None:
        if not self._missing:
            return  # an earlier micro-batch
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            with told("all-reduce of the gradients"):
                here, _ = self._buckets[bucket]
                work = dist.all_reduce(self._flat.grad[here], group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
            if not any(self._missing):
                self._missing = []


def _buckets(flat: FlatWeights, bucket_bytes: int) -> List[Tuple[slice, List[str]]]:
    """Neighbouring parameters in slices of at least `bucket_bytes`, but for the last one."""
    buckets: List[Tuple[slice, List[str]]] = []
    names: List[str] = []
    start = 0
    for name, here in flat.slices.items():
        names.append(name)
        if (here.stop - start) * flat.weight.element_size() >= bucket_bytes:
            buckets.append((slice(start, here.stop), names))
            start, names = here.stop, []
    if names:
        buckets.append((slice(start, flat.weight.numel()), names))
    return buckets
