"""Which samples a rank's replica takes, from iteration to iteration, whatever their batches are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.iteration import (
    SampleDivision,
    dealt_to,
    firsts,
    samples_of_halves,
    schedule,
    several,
)
from megatron_ext.contract.schedule.schedules import Action
from megatron_ext.data.ahead import Ahead
from megatron_ext.data.samples import Position, Samples
from megatron_ext.engine.results import Stopwatch
from megatron_ext.tasks.cut import Part
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Micro, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BatchAssignment:
    """Says which samples a rank's replica takes. All ranks of a replica have the same."""

    def __init__(self, plan: Plan, place: Place, start: Position) -> None:
        """The iterations after `start` go on with its samples."""
        self.start = start
        shares = tuple(plan.micro_batches)
        self.division = SampleDivision(shares, (plan.micro_batch_size,) * len(shares), several(plan.streams or ()))
        """How replicas share the samples of the iterations to come."""
        self.taken: NDArray[np.int64] = np.array(plan.taken_by(place.stage, place.dp))
        """The numbers of this replica's micro-batches among those of the iteration."""
        self._replica = place.dp // (plan.context or 1)
        self._even = plan.layout.even

    @property
    def size(self) -> int:
        """Samples of each of this replica's micro-batches."""
        return self.division.sizes[self._replica]

    @property
    def streams(self) -> int:
        """Micro-batches that this replica takes beside each other."""
        return self.division.copies[self._replica]

    @property
    def count(self) -> int:
        """Micro-batches of all replicas."""
        return sum(self.division.shares)

    def consumed(self, iteration: int) -> int:
        """Samples that were taken up to the end of an iteration, the last one or one with this division."""
        return self.start.consumed(iteration, self.division.samples)

    def divide(self, iteration: int, division: SampleDivision) -> None:
        """Has the iterations after this one, the last one so far, be divided like this."""
        self.start = Position(iteration, self.consumed(iteration))
        self.division = division
        self.taken = np.array(dealt_to(self._replica, division.shares))

    def own(self, iteration: int) -> NDArray[np.int64]:
        """[micro-batches, size]: the numbers of this replica's samples."""
        begins = self.consumed(iteration - 1) + np.array(firsts(self.division))
        return begins[self.taken][:, None] + np.arange(self.size)

    def keys(self, count: int) -> Sequence[int]:
        """The numbers that actions give this replica's first micro-batches of an iteration."""
        return range(count) if self._even else self.taken[:count].tolist()

    def sizes(self, samples: Samples, iteration: int) -> Sequence[Mapping[str, int]]:
        """Returns the sizes of the micro-batches of all replicas, where each has its own."""
        if not samples.varying:
            return ()
        first = self.consumed(iteration - 1)
        begins = firsts(self.division)
        ends = [*begins[1:], self.division.samples]
        return [samples.sizes(first + np.arange(begin, end)) for begin, end in zip(begins, ends)]

    def halves(self, micros: Sequence[Optional[Micro]]) -> Tuple[List[Optional[Micro]], List[Optional[Micro]]]:
        """This replica's micro-batches, those that are even ones of the iteration first."""
        even, odd = ([micro for number, micro in zip(self.taken, micros) if number % 2 == half] for half in (0, 1))
        return even, odd

    def samples_of_halves(self) -> Tuple[int, int]:
        """Returns the samples of the even and of the odd micro-batches of all replicas."""
        return samples_of_halves(self.division)


class ReplicaBatches:
    """What an engine and a rehearsal have in common: how replicas share the samples of their iterations."""

    _plan: Plan
    _place: Place
    _actions: Sequence[Action]
    assignment: BatchAssignment
    stopwatch: Optional[Stopwatch] = None
    """There is one where anything adapts."""

    @property
    def division(self) -> SampleDivision:
        """How replicas share the samples of the iterations to come."""
        return self.assignment.division

    @property
    def global_batch_size(self) -> int:
        """Samples of each of these."""
        return self.division.samples

    def consumed(self, iteration: int) -> int:
        """Samples that were taken up to the end of an iteration, the last one or one with this division."""
        return self.assignment.consumed(iteration)

    def divide(self, iteration: int, division: SampleDivision) -> None:
        """Has the iterations after this one, the last one so far, be divided like this."""
        self.assignment.divide(iteration, division)
        self._actions = self._scheduled(len(self.assignment.taken))

    def _scheduled(self, micro_batches: int) -> Sequence[Action]:
        """Returns what this rank does with so many, by the plan's schedule."""
        plan = self._plan
        return schedule(plan.schedule, plan.pipeline, plan.chunks, micro_batches)[self._place.stage]


class BatchLoader:
    """Gives a rank micro-batches on its device."""

    def __init__(self, task: Task, stages: Sequence[Union[Stage, Part]], device: torch.device, helpers: int) -> None:
        """`helpers` prepare samples ahead."""
        self._task = task
        self._device = device
        self._ahead = Ahead(helpers, device)
        self._takes_inputs = any(stage.inputs for stage in stages)
        self.looks_at_samples = any(stage.inputs or stage.last for stage in stages)
        """Whether any stage needs to know what samples hold."""

    def micros(
        self,
        samples: Samples,
        numbers: NDArray[np.int64],
        keys: Sequence[int],
        coming: Iterable[NDArray[np.int64]] = (),
    ) -> Dict[int, Optional[Micro]]:
        """Micro-batches by `keys`, of the samples with these numbers [micro-batches, samples of each]; those that are
        `coming` afterwards, in their order and perhaps without end, may be prepared meanwhile."""
        firsts = numbers[:, 0].tolist()
        if samples.varying:
            return {key: self._sized(samples, of, first) for key, of, first in zip(keys, numbers, firsts)}
        if not self.looks_at_samples:
            return {key: Micro({}, {}, first) for key, first in zip(keys, firsts)}
        if samples.ahead and self._takes_inputs and self._ahead.helps:
            prepared = self._ahead.take(samples, numbers, coming)
            return {key: self._micro(held, first) for key, held, first in zip(keys, prepared, firsts)}
        held = self._held(samples, numbers)
        # Each name's tensors at once: taken one after another they cost twice as much Python.
        each = [self._moved(torch.from_numpy(array)).unbind() for array in held.values()]
        return {
            key: self._task.micro(dict(zip(held, of)))._replace(first=first)
            for key, of, first in zip(keys, zip(*each), firsts)
        }

    def _sized(self, samples: Samples, numbers: NDArray[np.int64], first: int) -> Micro:
        """One that has a shape of its own, which ranks know that have no other use for it."""
        if not self.looks_at_samples:
            return Micro({}, {}, first, sizes=samples.sizes(numbers))
        held = {name: torch.from_numpy(array) for name, array in self._held(samples, numbers).items()}
        return self._micro(held, first)._replace(sizes=samples.sizes(numbers))

    def _micro(self, held: Mapping[str, Tensor], first: int) -> Micro:
        return self._task.micro({name: self._moved(tensor) for name, tensor in held.items()})._replace(first=first)

    def _held(self, samples: Samples, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        return samples.batch(numbers) if self._takes_inputs else samples.targets(numbers)

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the device. From pinned memory a GPU takes it in its turn, and the host goes on."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
