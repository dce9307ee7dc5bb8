"""Samples by number, whatever they hold: every task gives its own, and every layout takes the same of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np

from megatron_ext.contract.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")
NUMBERS_OF_A_SPLIT = 1 << 40
"""Samples are numbered over all splits: those of the n-th from n times this on."""


class Position(NamedTuple):
    """How far a run was in its data when it was started or resumed."""

    iteration: int = 0
    samples: int = 0
    """Consumed up to the end of that iteration, whatever the global batch sizes were."""

    def consumed(self, iteration: int, global_batch_size: int) -> int:
        """Samples consumed up to the end of an `iteration` that is not before this one."""
        return self.samples + (iteration - self.iteration) * global_batch_size

    def share(
        self, iteration: int, numbers: NDArray[np.int64], global_batch_size: int, micro_batch_size: int
    ) -> NDArray[np.int64]:
        """[micro-batches, micro_batch_size]: the samples of these micro-batches of an `iteration` after it.

        They belong to the global batch of that iteration, the samples that follow those of the one before: together
        replicas have the same ones, however they share them.
        """
        first = self.consumed(iteration - 1, global_batch_size)
        return first + numbers[:, None] * micro_batch_size + np.arange(micro_batch_size)


BEGINNING = Position()


class Split(NamedTuple):
    """How much of which part of a corpus is gone through, and in which order."""

    samples: int
    seed: int
    weights: Tuple[float, ...] = (1.0, 0.0, 0.0)
    """Parts of the documents for each of `SPLITS`."""
    name: str = "train"
    """One of `SPLITS`."""
    cache: Optional[str] = None
    """Where maps of samples lie (see `megatron_ext.data.map_places`)."""


class Orders:
    """In which order each epoch takes a split's samples; the same whatever was asked for before."""

    _KEPT = 2
    """In memory: a global batch may lie over the end of an epoch."""

    def __init__(self, count: int, made: Callable[[int], NDArray[np.int64]]) -> None:
        """`made` gives the order of an epoch [count]."""
        self._count = count
        self._made = made
        self._orders: Dict[int, NDArray[np.int64]] = {}

    @classmethod
    def drawn(cls, count: int, *seeds: int) -> Orders:
        """Random ones, which no version of numpy changes."""
        return cls(count, lambda epoch: np.random.RandomState([*seeds, epoch]).permutation(count))

    def place(self, number: int) -> int:
        """Which of the split's samples a number means; numbers count on from epoch to epoch."""
        epoch, place = divmod(number, self._count)
        return int(self._of(epoch)[place])

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n]: the same of many [n]."""
        epochs, found = np.divmod(numbers, self._count)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = self._of(epoch)[found[here]]
        return found

    def _of(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            if len(self._orders) == self._KEPT:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = self._made(epoch)
        return self._orders[epoch]


class Samples(ABC):
    """The samples of a split, numbered from 0; the same on every rank."""

    order: Dict[str, float]
    """What the order of the samples follows from: if equal, two runs have the same samples in the same order."""
    in_epoch: Optional[int] = None
    """How many go through the split once; None: nobody knows."""
    ahead = False
    """Whether other processes prepare them before they are needed (`megatron_ext.data.ahead`)."""
    source = "the data"
    """Where they come from, for messages."""
    varying = False
    """Whether micro-batches have shapes of their own, which `sizes` says; `batch` is then given one at a time."""

    def __init__(self, samples: int, split: str = "train") -> None:
        self._samples = samples
        self._first_number = SPLITS.index(split) * NUMBERS_OF_A_SPLIT

    def __len__(self) -> int:
        return self._samples

    @abstractmethod
    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """What one sample holds, by name; a name's arrays have the same shape in all samples. Raises DataError: the
        sample cannot be used."""

    def targets(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        """What `batch` gives, or as much of it as a rank needs that takes no inputs."""
        return self.batch(numbers)

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[numbers, …]: how much is not padding, of each of these samples, where they are padded."""
        raise NotImplementedError

    def sizes(self, numbers: NDArray[np.int64]) -> Dict[str, int]:
        """The named sizes of the wires of a micro-batch of these samples, as far as they are not the task's own."""
        return {}

    def batch(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        """Samples of these numbers, by name: each of `numbers`' shape and its own after it.

        `number`, of `numbers`' shape, says which samples these are: no two of a run have the same, of any split.
        """
        wanted = numbers.ravel().tolist()
        for number in (min(wanted), max(wanted)):
            if not 0 <= number < self._samples:
                raise IndexError(f"sample {number} of {self._samples}")
        found = [self.sample(number) for number in wanted]
        stacked = {name: np.stack([sample[name] for sample in found]) for name in found[0]}
        batch = {name: content.reshape(numbers.shape + content.shape[1:]) for name, content in stacked.items()}
        return {**batch, "number": numbers + self._first_number}


def check_token_ids(tokens: NDArray[Any], size: int, what: Callable[[], str], vocabulary: str, remedy: str) -> None:
    """Checks the ids of what is called `what()`, which only a message needs, against a vocabulary of this size. Raises
    DataError: one is not in it; the message ends with the `remedy`."""
    if not len(tokens):
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise DataError(f"{what()} has token id {wrong}, but {vocabulary} allows 0 to {size - 1}; {remedy}")
