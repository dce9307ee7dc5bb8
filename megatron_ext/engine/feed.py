"""Micro-batches of samples, on the device of a rank whose stages have a use for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_ext.data.ahead import Ahead
from megatron_ext.data.samples import Samples
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Micro, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Feed:
    """Of one rank."""

    def __init__(self, task: Task, stages: Sequence[Stage], device: torch.device, helpers: int) -> None:
        """With so many helpers, for samples that are prepared ahead."""
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
