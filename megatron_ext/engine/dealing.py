"""Which samples a rank's replica takes, from iteration to iteration, whatever their batches are."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.deal import Division, dealt_to, firsts, samples_of_halves, several
from megatron_ext.data.samples import Position, Samples
from megatron_ext.tasks.task import Micro

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Dealing:
    """Of one rank; it is the same on all of a replica."""

    def __init__(self, plan: Plan, place: Place, start: Position) -> None:
        """The iterations after `start` go on with its samples."""
        self.start = start
        shares = tuple(plan.micro_batches)
        self.division = Division(shares, (plan.micro_batch_size,) * len(shares), several(plan.streams or ()))
        """Of the iterations to come."""
        self.taken: NDArray[np.int64] = np.array(plan.taken_by(place.stage, place.dp))
        """The numbers of this replica's micro-batches among those of the iteration."""
        self._replica = place.dp
        self._even = plan.layout.even

    @property
    def size(self) -> int:
        """Samples of each of this replica's micro-batches."""
        return self.division.sizes[self._replica]

    @property
    def count(self) -> int:
        """Micro-batches of all replicas."""
        return sum(self.division.shares)

    def consumed(self, iteration: int) -> int:
        """Samples that were taken up to the end of an iteration, the last one or one with this division."""
        return self.start.consumed(iteration, self.division.samples)

    def divide(self, iteration: int, division: Division) -> None:
        """Has the iterations after this one, the last one so far, be divided like this."""
        self.start = Position(iteration, self.consumed(iteration))
        self.division = division
        self.taken = np.array(dealt_to(self._replica, division.shares))

    def own(self, iteration: int) -> NDArray[np.int64]:
        """[micro-batches, size]: the numbers of this replica's samples."""
        begins = self.consumed(iteration - 1) + np.array(firsts(self.division))
        samples: NDArray[np.int64] = begins[self.taken][:, None] + np.arange(self.size)
        return samples

    def keys(self, count: int) -> Sequence[int]:
        """The numbers that actions give this replica's first micro-batches of an iteration."""
        return range(count) if self._even else self.taken[:count].tolist()

    def sizes(self, samples: Samples, iteration: int) -> Sequence[Mapping[str, int]]:
        """Of the micro-batches of all replicas, where each has its own."""
        if not samples.varying:
            return ()
        first = self.consumed(iteration - 1)
        return [samples.sizes(first + np.arange(begin, end)) for begin, end in self._ranges()]

    def halves(self, micros: Sequence[Optional[Micro]]) -> Tuple[List[Optional[Micro]], List[Optional[Micro]]]:
        """This replica's micro-batches, those that are even ones of the iteration first."""
        even, odd = ([micro for number, micro in zip(self.taken, micros) if number % 2 == half] for half in (0, 1))
        return even, odd

    def samples_of_halves(self) -> Tuple[int, int]:
        """Of the even and the odd micro-batches of all replicas."""
        return samples_of_halves(self.division)

    def _ranges(self) -> List[Tuple[int, int]]:
        """Of each micro-batch, among the samples of the iteration."""
        begins = firsts(self.division)
        return list(zip(begins, [*begins[1:], self.division.samples]))
