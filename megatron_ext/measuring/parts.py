"""What the blocks of a model take on a rank, by kind: the engine's own modules, forward and backward apart."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, nn

from megatron_ext.contract.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.flat import FlatWeights
from megatron_ext.engine.optimizer import DataGroup, Optimizer
from megatron_ext.measuring.laps import Lap, Marks
from megatron_ext.measuring.medians import LEAST, Median, median
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.families import task_of
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import DTYPES, Tensors
from megatron_ext.timeline.recorder import Recorder

LAYERS = 4
"""Layers in a row, or as many as the model has: so weights come from memory as often as in a stage of a few layers, and
what a pass costs once is shared out."""
RELATIVE = 0.02
OF_PASS = 0.005
"""Times are known once half of each median's 95 % confidence interval is at most `RELATIVE` of it, or `OF_PASS` of a
whole pass, in which an embedding may hardly count."""
T = TypeVar("T")


def few_layers(model: ModelConfig) -> ModelConfig:
    """The same model with `LAYERS` of each kind, or as many as it has."""
    few = [min(LAYERS, count) for _, count in model.kinds()]
    return replace(model, layers=few[0], decoder_layers=few[1] if len(few) > 1 else None)


class Parts:
    """One rank's share of a model of some layers, and a micro-batch that goes through it again and again."""

    def __init__(
        self, plan: Plan, model: ModelConfig, tensor: TensorGroup, micro_batch_size: int, device: torch.device
    ) -> None:
        """`model` has the vocabulary padded for the tensor size; the number format is that of `plan.train`."""
        few = few_layers(model)
        self.layers = few.counted
        task = task_of(replace(plan, model=few, recompute="none"))
        held = [list(blocks) for _, blocks in groupby(task.blocks, key=lambda block: block.kind)]
        self._counts = [(blocks[0].kind, len(blocks)) for blocks in held]
        """Neighbours of one kind, and how many they are."""
        self._device = device
        self._tensor = tensor
        self._task = task
        self._train = plan.train
        owned: Dict[str, nn.Parameter] = {}
        self._stages = [Stage(task, part, tensor, owned) for part in cut_between(task, held)]
        for stage in self._stages:
            stage.initialise(1)
        self._flat = FlatWeights(
            [named for stage in self._stages for named in stage.parameters_by_name()],
            DTYPES[plan.train.precision],
            device,
        )
        if not plan.train.compile:  # as in the engine
            shared = [parameter for stage in self._stages for parameter in stage.shared]
            for stage in self._stages:
                stage.put_off(WeightGradients(self._flat.add, self._flat.add_rows), shared, self._flat.adds)
        source = torch.Generator().manual_seed(plan.train.seed)
        self._micro = task.example(micro_batch_size, source).to(device)
        self._marks = Marks(device)
        ways = [(f"{kind}.forward", count) for kind, count in self._counts]
        self._laps = ways + [(f"{kind}.backward", count) for kind, count in reversed(self._counts)]
        """Of a pass, in their order, and how many blocks each is of."""
        self.laps: Dict[str, List[Lap]] = {name: [] for name, _ in self._laps}
        """Of every pass so far, a block's share."""

    def forward_and_backward(self, passes: int) -> None:
        """So many passes, timed; a GPU gets them one after another, and need not wait for its host."""
        for _ in range(passes):
            self._pass()
        laps = self._marks.laps()
        for first in range(0, len(laps), len(self._laps) + 1):  # from the end of a pass to the next is none of them
            for (name, count), lap in zip(self._laps, laps[first:]):
                self.laps[name].append(lap.shared(count))

    def _pass(self) -> None:
        marks = self._marks
        marks.set()
        entered: Tensors = {}
        passed: List[Tuple[Tensors, Tensors]] = []
        for stage in self._stages:
            left = self._through(stage, entered)
            marks.set()
            passed.append((entered, left))
            entered = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in left.items()}
        gradients: Dict[str, Optional[Tensor]] = {}
        for entered, left in reversed(passed):
            roots = [name for name, tensor in left.items() if tensor.requires_grad]
            torch.autograd.backward([left[name] for name in roots], [gradients.get(name) for name in roots])
            gradients = {name: tensor.grad for name, tensor in entered.items()}
            marks.set()

    def _through(self, stage: Stage, entered: Tensors) -> Tensors:
        """What leaves a stage; of the last one, the loss."""
        left = stage({**entered, **{name: self._micro.inputs[name] for name in stage.inputs}})
        return {"loss": self._task.loss(left, self._micro, self._tensor)} if stage.last else left

    def medians(self) -> Dict[str, Median]:
        return {name: median([lap.ms for lap in laps]) for name, laps in self.laps.items()}

    def disturbed(self) -> float:
        """The part of all the time that passed in which other processes had this rank's processor."""
        every = [lap for laps in self.laps.values() for lap in laps]
        waited = sum(lap.waited_ms for lap in every)
        return waited / (waited + sum(lap.ms for lap in every))

    def passes(self) -> int:
        """How many there have been."""
        return len(self.laps[self._laps[0][0]]) // sum(name == self._laps[0][0] for name, _ in self._laps)

    def known(self) -> bool:
        """Whether the medians are known well enough."""
        if any(len(laps) < LEAST for laps in self.laps.values()):
            return False
        found = self.medians()
        whole = sum(found[name].value * count for name, count in self._laps)
        return all(found[name].tight(whole / count, RELATIVE, OF_PASS) for name, count in self._laps)

    def kept_bytes(self) -> Dict[str, int]:
        """By kind, what autograd keeps of a block from forward to backward pass, but for weights."""
        found: Dict[str, int] = {}
        entered: Tensors = {}
        for stage, (kind, count) in zip(self._stages, self._counts):
            left, kept = self._kept(partial(self._through, stage, entered))
            found[kind] = round(kept / count)
            entered = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in left.items()}
        return found

    def peak_bytes(self) -> int:
        """The most that the GPU's allocator holds during a pass, more than before it."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._pass()
        self._marks.laps()
        return torch.cuda.max_memory_allocated(self._device) - before

    def optimizer_ns(self, seconds: float) -> Median:
        """Of a whole optimizer step, per parameter; measured until it is known or `seconds` have passed.

        It changes the weights.
        """
        optimizer = Optimizer(self._flat, self._train, None, DataGroup(1, 0, None), False, [])
        recorder, marks = Recorder(None), self._marks
        laps: List[Lap] = []
        until = time.monotonic() + seconds
        found = Median(0.0, 0.0)
        while not (laps and (found.tight(found.value, RELATIVE, RELATIVE) or time.monotonic() > until)):
            self._flat.grad.fill_(optimizer.scaler.scale * 1e-3)
            marks.set()
            optimizer.step(recorder)
            marks.set()
            laps += marks.laps()
            found = median([lap.ms for lap in laps[1:] or laps])  # the first one makes Adam's state
        factor = 1e6 / self._flat.weight.numel()
        return Median(found.value * factor, found.spread * factor)

    def close(self) -> None:
        self._marks.close()

    def _kept(self, function: Callable[[], T]) -> Tuple[T, int]:
        """What a function returns, and the bytes of the storages that its backward pass needs."""
        storages: Dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function()
        storages.pop(self._flat.weight.untyped_storage().data_ptr(), None)
        return result, sum(storages.values())


def told_medians(found: Dict[str, Median], kept: Dict[str, int]) -> Dict[str, Dict[str, float]]:
    """By part, what a profile tells of it (docs/formats.md)."""
    parts: Dict[str, Dict[str, float]] = {}
    for name, one in found.items():
        part, way = name.split(".")
        parts.setdefault(part, {}).update({way: one.value, f"{way}_spread": one.spread})
    for part, size in kept.items():
        parts[part]["activation_bytes"] = size
    return parts


def groups_of(ranks_of_nodes: Sequence[Sequence[int]], size: int) -> List[List[int]]:
    """Tensor groups inside nodes, as many as there are ranks for; what is left over of a node is in none."""
    return [
        list(ranks[first : first + size]) for ranks in ranks_of_nodes for first in range(0, len(ranks) - size + 1, size)
    ]
