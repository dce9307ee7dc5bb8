"""What the blocks of any task take on a rank: one of each kind is timed, with what the blocks before it give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional

import torch

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.core.parts import KINDS, ModelParts
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring.passes import LAYERS, Chain, OwnPasses, SavedTensors, Updates, cut_off, few_layers
from megatron_ext.measuring.sequence import LOSS, Ledger, crossing, described, first_of_each_kind, wires_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import Part
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import DTYPES, Block, Task, Tensors


class CoreParts(Chain):
    """One rank's share of megatron.core's model of some layers, and a micro-batch that goes through it again and again.

    The embedding, the layers and the head are chunks of their own, each with megatron.core's sums of gradients around
    it, as stages have them.
    """

    def __init__(
        self, plan: Plan, model: ModelConfig, tensor: TensorGroup, micro_batch_size: int, device: torch.device
    ) -> None:
        """`model` has the vocabulary padded for the tensor size, and `tensor` is megatron.core's group
        (`megatron_ext.core.parts.tensor_group`)."""
        few = few_layers(model)
        self.layers = few.layers
        self._counts = [*zip(KINDS, (1, few.layers, 1))]
        self._task = task_of(replace(plan, model=few, recompute=Recompute.none))
        self._tensor = tensor
        self._lr = plan.train.lr
        self._parts = ModelParts(plan, few, tensor, self._task)
        source = torch.Generator().manual_seed(plan.train.seed)
        self._micro = self._task.example(micro_batch_size, source).to(device)
        super().__init__(device, self._both_ways())

    def _through(self, part: int, entered: Tensors) -> Tensors:
        tokens = self._micro.inputs["tokens"] if part == 0 else None
        left = self._parts.forward(part, entered.get("logits"), tokens)
        if part < len(KINDS) - 1:
            return {"logits": left}
        return {"loss": self._task.loss({"logits": left}, self._micro, self._tensor)}

    def _is_weight(self, address: int) -> bool:
        return self._parts.are_weights(address)

    def updates(self) -> Updates:
        scale = self._parts.optimizer.scaler.scale
        return Updates(
            lambda: self._parts.fill_gradients(scale * 1e-3),
            lambda: self._parts.update(self._lr),
            self._parts.numel,
        )


GRADIENT = 1e-3
"""The gradient of each number that leaves a block: small enough that no sum of gradients becomes infinite, and no
denormal."""


class _Timed(NamedTuple):
    """A block of a kind, or the loss."""

    stage: Optional[Stage]
    """None: the loss."""
    wires: Tensors
    """That it takes."""
    gradients: Tensors
    """The gradients of what it gives."""


class Kinds(OwnPasses):
    """One block of each kind with what it takes of a micro-batch, and the loss.

    No more of the model than these blocks is on the device at once, so that one that needs a pipeline can be measured.
    A pass goes through each as often in a row as there are blocks of its kind, up to `LAYERS` times, and back only
    after the last one, as a stage's does. Otherwise what one block works with would lie in caches that a stage
    overflows, and no memory would stay taken from one block to the next: the C library hands what is free to the
    system, and getting it back takes as long as a small block does.
    """

    def __init__(self, plan: Plan, micro_batch_size: int, device: torch.device) -> None:
        self._task = task = task_of(replace(plan, micro_batch_size=micro_batch_size, recompute=Recompute.none))
        self._precision = plan.train.precision
        self._compiled = plan.train.compile
        source = torch.Generator().manual_seed(plan.train.seed)
        self._micro = task.example(micro_batch_size, source).to(device)
        stages = {kind: _alone(task, block) for kind, block in first_of_each_kind(task).items()}
        flat = self._placed([*stages.values()], device)
        names = [*stages, LOSS]
        blocks = Counter(block.kind for block in task.blocks)
        self._rows = {kind: max(1, min(LAYERS, blocks[kind])) for kind in names}
        """How often a block of a kind is passed in a row."""
        there = [(f"{kind}.forward", count) for kind, count in self._rows.items()]
        back = [(f"{kind}.backward", count) for kind, count in reversed([*self._rows.items()])]
        super().__init__(flat, plan.train, device, [*there, *back])
        self._kinds: Dict[str, _Timed] = {}
        self._kept: Dict[str, int] = {}
        self._walk(stages)
        self._kinds = {kind: self._kinds[kind] for kind in names}

    def module(self) -> Dict[str, object]:
        """What a profile says of the blocks, whatever the micro-batch."""
        return described(self._task, TensorGroup(), DTYPES[self._precision])

    def sequence(self) -> Dict[str, List[int]]:
        """Bytes of a micro-batch: kept and given by each block, crossing behind so many of the counted ones, and of
        each of the wires."""
        ledger = self._ledger
        return {"kept": ledger.kept, "given": ledger.given, "crossing": self._crossing, "wires": self._wires}

    def kept_bytes(self) -> Dict[str, int]:
        return self._kept

    def _placed(self, stages: List[Stage], device: torch.device) -> FlatWeights:
        """Returns them with all that they hold on the device."""
        dtype = DTYPES[self._precision]
        for stage in stages:
            stage.initialise(1)
        named = [
            (f"{number}.{name}", one) for number, stage in enumerate(stages) for name, one in stage.parameters_by_name()
        ]
        flat = FlatWeights(named, dtype, device)
        for stage in stages:
            stage.place(device, dtype)
            if not self._compiled:  # as in the engine
                stage.defer_weight_grads(WeightGradients(flat.add, flat.add_rows), (), flat.adds)
        return flat

    def _walk(self, stages: Dict[str, Stage]) -> None:
        """Goes through all blocks once, and takes note of what one of each kind takes and what every one keeps."""
        task, ledger = self._task, Ledger(self._task)
        last_use = {name: number for number, block in enumerate(task.blocks) for name in block.takes}
        last_use.update(dict.fromkeys(task.outputs, len(task.blocks)))
        wires: Tensors = {}
        sizes: Dict[str, int] = {}
        first = first_of_each_kind(task)
        for number, block in enumerate(task.blocks):
            stage, weights = stages[block.kind], self._flat
            if first[block.kind] is not block:
                stage = _alone(task, block)
                weights = self._placed([stage], self._device)
            taken = {name: wires[name] for name in stage.part.enters}
            with SavedTensors() as kept:
                left = self._through(stage, taken)
            for tensor in (weights.weight, *stage.parameters(), *stage.buffers()):  # what the stage has anyway
                kept.sizes.pop(tensor.untyped_storage().data_ptr(), None)
            ledger.note(number, {name: self._micro.inputs[name] for name in stage.inputs}, left, kept.sizes)
            if first[block.kind] is block:
                self._kinds[block.kind] = _Timed(stage, taken, _gradients(left))
                self._kept[block.kind] = sum(kept.sizes.values())
            sizes.update({name: tensor.nbytes for name, tensor in left.items()})
            wires.update(cut_off(left))
            wires = {name: tensor for name, tensor in wires.items() if last_use.get(name, -1) > number}
            ledger.forget_all_but(wires)
        with SavedTensors() as kept:
            loss = self._task.loss(wires, self._micro, TensorGroup())
        self._kinds[LOSS] = _Timed(None, wires, _gradients({"loss": loss}))
        ledger.note_loss(kept.sizes)
        shared = {tensor.untyped_storage().data_ptr() for tensor in wires.values()}
        self._kept[LOSS] = sum(size for address, size in kept.sizes.items() if address not in shared)
        self._ledger, self._crossing = ledger, crossing(task, sizes)
        self._wires = [sizes[name] for name in wires_of(task)]

    def _through(self, stage: Optional[Stage], taken: Tensors) -> Tensors:
        if stage is None:
            return {"loss": self._task.loss(taken, self._micro, TensorGroup())}
        return stage({**taken, **{name: self._micro.inputs[name] for name in stage.inputs}})

    def _pass(self) -> None:
        marks = self._marks
        rows = [(one, self._rows[kind]) for kind, one in self._kinds.items()]
        taken = [[cut_off(one.wires) for _ in range(count)] for one, count in rows]
        passed: List[Tensors] = []
        marks.set()
        for (one, _), each in zip(rows, taken):
            passed += [self._through(one.stage, wires) for wires in each]
            marks.set()
        for one, count in reversed(rows):
            for _ in range(count):
                backward(passed.pop(), one.gradients)
            marks.set()


def _alone(task: Task, block: Block) -> Stage:
    """A stage of one block, which gives all its wires to the next one."""
    inputs = tuple(name for name in task.inputs if name in block.takes)
    enters = tuple(dict.fromkeys(name for name in block.takes if name not in inputs))
    part = Part(number=0, blocks=(block,), inputs=inputs, enters=enters, leaves=block.gives, last=False)
    return Stage(task, part, TensorGroup(), {})


def _gradients(left: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, GRADIENT) for name, tensor in left.items() if tensor.requires_grad}
