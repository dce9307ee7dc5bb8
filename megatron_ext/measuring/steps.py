"""Whole training steps of a rank that has several copies of the model beside each other (`parallel.streams`).

They are the engine's own: copies with one set of weights and a gradient buffer each, run by a thread each, on a GPU on
a CUDA stream of its own. How many have room is found by trying, as in `megatron_ext.measuring.room`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.iteration import schedule
from megatron_ext.engine.executor.executor import Chunk, Executor
from megatron_ext.engine.executor.messages import Message
from megatron_ext.engine.executor.pace import Pace
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.workers import Worker, Workers, copy_stream
from megatron_ext.measuring.laps import LEAST, Lap, Marks, median
from megatron_ext.measuring.passes import RELATIVE, SavedTensors
from megatron_ext.measuring.room import HostMemory, WholeModel
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import DTYPES, Micro, Tensors
from megatron_ext.timeline.recorder import Recorder

FACTOR = 1e-3
"""What the loss is multiplied by: small, so that nothing overflows."""
FORWARD, BACKWARD, COPY, UPDATE = "forward", "backward", "copy", "update"
"""Parts of a step, by the names of a profile's `steps`. The forward pass is the first copy's, COPY adds up gradients,
and the backward pass is the rest until all copies are done."""
PARTS = (FORWARD, BACKWARD, COPY, UPDATE)
WARM_UP = 2
"""Steps that do not count; the first one makes the optimizer's values."""
Copy = Tuple[Stage, FlatWeights, Optional[torch.cuda.Stream]]
"""A copy of the model, with its stream where it runs beside the first one on a GPU."""


class Copies(WholeModel):
    """Runs as many copies of the model as it is asked to."""

    def __init__(
        self, plan: Plan, device: torch.device, memory_bytes: Optional[int], host: Optional[HostMemory] = None
    ) -> None:
        super().__init__(plan, device, memory_bytes, host)
        self._copies: List[Copy] = [(self._stage, self._flat, None)]
        self._marks = Marks(device)

    def close(self) -> None:
        self._marks.close()

    def measured(self, batch: int, counts: Sequence[int], seconds: float) -> List[Dict[str, Any]]:
        """For so many copies each, as far as there is room, with micro-batches of `batch` samples: the `streams` and,
        in milliseconds, the parts of a step, in at most `seconds` for each; `counts` go upwards."""
        found: List[Dict[str, Any]] = []
        for count in counts:
            if self._lacks(batch * count, partial(self._measure, found, batch, count, seconds)) is not None:
                break
        return found

    def _clear(self) -> None:
        self._marks.laps()
        for _, flat, _ in self._copies:
            flat.grad.zero_()

    def _measure(self, found: List[Dict[str, Any]], batch: int, count: int, seconds: float) -> None:
        found.append({"streams": count, **self._times(batch, count, seconds)})

    def _times(self, batch: int, count: int, seconds: float) -> Dict[str, float]:
        micro = self._example(batch)
        if self._memory is not None:
            self._require_room(micro, count)
        while len(self._copies) < count:
            self._copies.append(self._copy())
        first, *copies = map(self._worker, range(count))
        workers = Workers(first, lambda count: schedule(self._plan.schedule, 1, 1, count)[0], self._device, copies)
        try:
            for _ in range(WARM_UP):
                self._step(workers, micro, count)
            self._marks.laps()
            return self._timed(workers, micro, count, time.monotonic() + seconds)
        finally:
            workers.close()

    def _timed(self, workers: Workers, micro: Micro, count: int, until: float) -> Dict[str, float]:
        laps: Dict[str, List[Lap]] = {part: [] for part in PARTS}
        while True:
            self._step(workers, micro, count)
            for part, lap in zip(PARTS, self._marks.laps()):
                laps[part].append(lap)
            found = {part: median([lap.ms for lap in of]) for part, of in laps.items()}
            passes = found[FORWARD].value + found[BACKWARD].value
            known = all(found[part].tight(passes, RELATIVE, RELATIVE) for part in (FORWARD, BACKWARD))
            if (known and len(laps[FORWARD]) >= LEAST) or time.monotonic() > until:
                return {part: one.value for part, one in found.items()}

    def _step(self, workers: Workers, micro: Micro, count: int) -> None:
        """Sets a mark at its beginning and at the end of each of its `PARTS`."""
        self._marks.set()
        workers.pass_all(dict.fromkeys(range(count), micro), FACTOR)  # the first copy's loss sets a mark
        self._marks.set()
        workers.sum_gradients()
        self._marks.set()
        self._optimizer.step(Recorder(None))
        self._marks.set()

    def _require_room(self, micro: Micro, count: int) -> None:
        with SavedTensors() as kept:
            values = {name: micro.inputs[name] for name in self._stage.inputs}
            self._task.loss(self._stage(values), micro, TensorGroup())
        self._require(kept, count)

    def _copy(self) -> Copy:
        dtype = DTYPES[self._plan.train.precision]
        with copy_stream(self._device) as stream:
            stage = self._new_stage()
            stage.place(self._device, dtype)
            return stage, FlatWeights(stage.parameters_by_name(), dtype, self._device, of=self._flat), stream

    def _worker(self, number: int) -> Worker:
        stage, flat, stream = self._copies[number]
        later = WeightGradients(flat.add, flat.add_rows)
        stage.defer_weight_grads(later, stage.shared, flat.adds)
        nothing = Message([], self._device)
        chunks = [Chunk(stage, nothing, nothing)]
        pace = Pace(self._device, self._plan.train.comm_timeout_s)
        loss = self._loss if number else self._marked_loss
        return Worker(Executor(lambda *_: chunks, {}, later, Recorder(None), loss, pace), flat, stage, stream)

    def _loss(self, left: Tensors, micro: Micro) -> Tensor:
        return self._task.loss(left, micro, TensorGroup())

    def _marked_loss(self, left: Tensors, micro: Micro) -> Tensor:
        loss = self._loss(left, micro)
        self._marks.set()
        return loss
