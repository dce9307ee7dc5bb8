"""The part of a rank's flat weights that it keeps, where replicas share them out."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

Bucket = Tuple[slice, List[str]]
"""A slice of the flat weights, and the names of the parameters in it."""


class Share:
    """The same part of every bucket, so that a bucket is reduce-scattered as soon as its gradients are there.

    What a replica keeps of its share alone, in fp32, lies together: the parts of all buckets, one after another.
    """

    def __init__(self, buckets: Sequence[Bucket], proportions: Sequence[int] = (1,), rank: int = 0) -> None:
        """`proportions` are those of the parts that replicas have, in their order; `buckets` cover the flat weights,
        and their lengths are multiples of the sum of these."""
        self.shares = len(proportions)
        self.buckets = [here for here, _ in buckets]
        self._proportions = None if len({*proportions}) == 1 else proportions
        unit = sum(proportions)
        before, own = sum(proportions[:rank]), proportions[rank]
        self.parts: List[Tuple[slice, slice]] = []
        """For each bucket, this rank's part in the flat weights, and where it lies among what the rank keeps."""
        for here in self.buckets:
            step, rest = divmod(here.stop - here.start, unit)
            assert rest == 0 and here.start % unit == 0, "a bucket cannot be shared out"
            start, kept = here.start + before * step, here.start // unit * own
            self.parts.append((slice(start, start + own * step), slice(kept, kept + own * step)))
        if self.shares == 1:  # of all buckets together, which no copy takes apart
            whole = slice(0, self.buckets[-1].stop if self.buckets else 0)
            self.parts = [(whole, whole)]

    def sizes(self, bucket: int) -> Optional[List[int]]:
        """Return the lengths of all replicas' parts of a bucket, one after another; None where they are equal."""
        if self._proportions is None:
            return None
        here = self.buckets[bucket]
        step = (here.stop - here.start) // sum(self._proportions)
        return [step * number for number in self._proportions]

    def within_bucket(self, bucket: int) -> slice:
        """Return where this rank's part of a bucket lies in it."""
        here, first = self.parts[bucket][0], self.buckets[bucket].start
        return slice(here.start - first, here.stop - first)

    @property
    def length(self) -> int:
        """Count the numbers that this rank keeps."""
        return self.parts[-1][1].stop if self.parts else 0

    def of(self, flat: Tensor) -> Tensor:
        """This rank's share of a tensor that is laid out like the flat weights: a view of it where it is all of it."""
        if self.shares == 1 or not self.parts:  # a stage may have no parameters
            return flat
        return torch.cat([flat[here] for here, _ in self.parts])

    def put(self, kept: Tensor, flat: Tensor, part: slice = slice(None)) -> None:
        """Copies what this rank keeps to its places in `flat`; with `part`, which needs a single share, that alone."""
        if self.shares == 1:
            flat[part].copy_(kept[part])
            return
        for here, own in self.parts:
            flat[here].copy_(kept[own])

    def places(self, part: slice) -> List[Tuple[slice, slice]]:
        """Return where a part of what this rank keeps belongs in the flat weights, each with where that lies in it."""
        found = []
        for here, own in self.parts:
            start, stop = max(own.start, part.start), min(own.stop, part.stop)
            if start < stop:
                shift = here.start - own.start
                found.append((slice(start + shift, stop + shift), slice(start - part.start, stop - part.start)))
        return found

    def compact(self, flat: Tensor) -> None:
        """Moves this rank's parts of `flat` to its beginning, one after another; the rest then has no meaning."""
        for here, own in self.parts:
            if here != own:
                part = flat[here]
                # Parts only move down, past what has moved already; near the beginning both places can overlap.
                flat[own].copy_(part.clone() if here.start < own.stop else part)

    def within(self, here: slice) -> slice:
        """Where a parameter's part of this share lies among what the rank keeps; empty where it has none of it."""
        for (own, kept), bucket in zip(self.parts, self.buckets if self.shares > 1 else [self.parts[0][0]]):
            if bucket.start <= here.start < bucket.stop:
                start = min(max(here.start, own.start), own.stop)
                stop = max(start, min(here.stop, own.stop))
                return slice(kept.start + start - own.start, kept.start + stop - own.start)
        return slice(0, 0)


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
        weights.untyped_storage().resize_(weights.nbytes)
        return weights

    def free(self, bucket: int) -> None:
        """Gives a bucket's memory back."""
        self._weights[bucket].untyped_storage().resize_(0)
