"""Samples of alike length beside each other, so that little of a micro-batch is padding.

Some global batches at a time are sorted by length and dealt out anew: each has samples of alike length, and they come
in a random order. Which samples these are does not change, and nothing but the samples' numbers decides about it, so
that every layout, and a run that goes on, has the same ones in the same iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from megatron_ext.data.samples import Orders, Samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STREAM = 1
"""Beside the seed: other random numbers than those that the order of an epoch follows from."""


class Side(NamedTuple):
    """What has one length in a sample, and is padded to the longest of its micro-batch."""

    size: str
    """The size of the task's wires that it sets (`Task.sizes`)."""
    arrays: Tuple[str, ...]
    """Arrays of a sample, [longest] each."""
    longest: int


class BatchAssignment(NamedTuple):
    """How training samples are dealt out anew."""

    batches: int
    """That are sorted together."""
    batch_size: int
    """The global one."""
    seed: int

    @property
    def window(self) -> int:
        """Samples that are sorted together."""
        return self.batches * self.batch_size

    def whole(self, samples: int) -> int:
        """So many, and what the last window has beyond."""
        return -(-samples // self.window) * self.window


class Bucketed(Samples):
    """Other samples, sorted by length, whose batches are trimmed to their longest.

    With a `assignment` they are for training, and `inner` has whole windows; else they are held-out ones, which are all
    sorted, for nothing is learned from their order.
    """

    varying = True

    def __init__(
        self,
        inner: Samples,
        samples: int,
        split: str,
        sides: Sequence[Side],
        multiple: int,
        assignment: Optional[BatchAssignment] = None,
    ) -> None:
        """Lengths are rounded up to a `multiple`. `inner.lengths` has a column for each of both `sides`; samples are
        sorted by the second, and where that is the same by the first."""
        super().__init__(samples, split)
        self._inner = inner
        self._sides = sides
        self._multiple = multiple
        self._assignment = assignment
        self._window = samples if assignment is None else assignment.window
        self._orders = Orders(self._window, self._by_length)
        self.in_epoch = inner.in_epoch
        self.order: Dict[str, float] = dict(inner.order)
        if assignment is not None:
            self.order.update({"bucketing": assignment.batches, "global_batch_size": assignment.batch_size})

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        return self._inner.sample(int(self._dealt(np.array([number]))[0]))

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._inner.lengths(self._dealt(numbers))

    def sizes(self, numbers: NDArray[np.int64]) -> Dict[str, int]:
        longest = self.lengths(numbers.ravel()).max(0).tolist()
        rounded = (-(-length // self._multiple) * self._multiple for length in longest)
        return {side.size: min(side.longest, length) for side, length in zip(self._sides, rounded)}

    def batch(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        batch, sizes = super().batch(numbers), self.sizes(numbers)
        for side in self._sides:
            for name in side.arrays:
                batch[name] = np.ascontiguousarray(batch[name][..., : sizes[side.size]])
        return batch

    def _dealt(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[samples]: which of the `inner` samples these are."""
        return numbers // self._window * self._window + self._orders.places(numbers)

    def _by_length(self, window: int) -> NDArray[np.int64]:
        """The order in which a window takes its samples."""
        first = window * self._window
        # Sources grow and shrink by turns, so that they are alike where targets of two lengths meet.
        source, target = self._inner.lengths(np.arange(first, first + self._window)).T
        order: NDArray[np.int64] = np.lexsort((np.where(target % 2, -source, source), target))
        if self._assignment is None:
            return order
        random = np.random.RandomState([self._assignment.seed, window, _STREAM])
        batches = order.reshape(self._assignment.batches, self._assignment.batch_size)
        return batches[random.permutation(len(batches))].ravel()
