"""Whole weights of replicas that keep a share each: memory that is there only while a bucket is needed."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_ext.engine.gradients.share import Bucket


class WholeWeights:
    """Gives each bucket memory of its own, which comes and goes: parameters stay views of it, and so do tensors that
    autograd keeps of them. A late bucket, whose weights several blocks or stages have, is always there.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        slices: Mapping[str, slice],
        has_late: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parameters`, which lie at `slices` of the flat weights, have their values, and then are views of their
        buckets' memory."""
        self.late = len(buckets) - 1 if has_late else None
        self._weights: List[Tensor] = []
        self.buckets: Dict[int, int] = {}
        """The bucket of a parameter, by its id; none where that is always there."""
        for number, (here, names) in enumerate(buckets):
            weights = torch.zeros(here.stop - here.start, dtype=dtype, device=device)
            self._weights.append(weights)
            for name in names:
                parameter, place = parameters[name], slices[name]
                view = weights[place.start - here.start : place.stop - here.start].view(parameter.shape)
                if number == self.late:
                    view.copy_(parameter.data)
                else:
                    self.buckets[id(parameter)] = number
                parameter.data = view
            if number != self.late:
                self.free(number)

    def of(self, bucket: int) -> Tensor:
        """The weights of a bucket, which have a meaning after they were gathered."""
        return self._weights[bucket]

    def make(self, bucket: int) -> Tensor:
        """The same, with memory for them."""
        weights = self._weights[bucket]
        weights.untyped_storage().resize_(weights.numel() * weights.element_size())
        return weights

    def free(self, bucket: int) -> None:
        """Gives a bucket's memory back."""
        self._weights[bucket].untyped_storage().resize_(0)
