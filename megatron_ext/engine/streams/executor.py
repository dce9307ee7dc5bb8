"""Takes the steps of a rank whose micro-batches stream through the stages."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

from torch import Tensor

from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.contract.schedule.streams import Step
from megatron_ext.engine.executor.executor import Executor, Key
from megatron_ext.engine.streams.scaling import SCALE, StageScale
from megatron_ext.tasks.task import Micro


class StreamingExecutor(Executor):
    """Takes a rank's steps, as the executor of a schedule takes its actions."""

    def take(
        self,
        steps: Sequence[Step],
        micro_batches: Mapping[int, Optional[Micro]],
        factors: Mapping[int, Any],
        show: Callable[[int], None],
        passed: Callable[[Step, Optional[Tensor]], None],
        update: Callable[[Step], None],
    ) -> None:
        """Micro-batches, and the factors of their losses, are by number. Before a pass `show` is given the version of
        the weights that it meets; after it, `passed` is given its loss, if there is one."""
        self._expect(steps, micro_batches)
        for step in steps:
            kind, m, chunk = step.action
            key = m, chunk
            self._recorder.micro_batch, self._recorder.chunk = key
            if kind is Kind.FORWARD:
                show(step.version)
                self._forward(key, micro_batches[m], factors[m])
                passed(step, self._losses.pop() if self._losses else None)
            elif kind is Kind.BACKWARD:
                show(step.version)
                self._backward(kind, key)
                passed(step, None)
            elif kind is Kind.UPDATE:
                update(step)
            else:
                self._exchange(kind, key)

    def empty(self) -> None:
        """Waits until all was sent."""
        self._flush()


class ScaledExecutor(StreamingExecutor):
    """With fp16, where each stage has a loss scale of its own."""

    _beside_gradients = (SCALE,)
    scale: StageScale

    def _backward(self, kind: Kind, key: Key) -> None:
        received = self._gradients_left.pop(key, {})
        self._gradients_left[key], sent = self.scale.entering(self._left[key], received)
        super()._backward(kind, key)
        if key in self._gradients_entered:
            self._gradients_entered[key][SCALE.name] = sent
