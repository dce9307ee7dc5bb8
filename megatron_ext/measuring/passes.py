"""Passes of a micro-batch through parts of a model, timed again and again until their medians are known."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import groupby
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring.laps import LEAST, Lap, Marks, Median, median
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import DTYPES, Tensors
from megatron_ext.timeline.recorder import Recorder

RELATIVE = 0.02
OF_PASS = 0.005
"""Times are known once half of each median's 95 % confidence interval is at most `RELATIVE` of it, or `OF_PASS` of a
whole pass, in which an embedding may hardly count."""


class Updates(NamedTuple):
    """What an optimizer does with a rank's weights."""

    fill: Callable[[], object]
    """Gives gradients, of 1e-3 before they are scaled."""
    step: Callable[[], object]
    """Updates all weights once."""
    numel: int
    """Weights."""


class Passes(ABC):
    """One rank's share of a model's parts, and what they take."""

    def __init__(self, device: torch.device, laps: Sequence[Tuple[Optional[str], int]]) -> None:
        """`laps` are those of a pass, from one mark to the next: `<kind>.forward` or `<kind>.backward` and of how many
        blocks, or None for what is not to be timed."""
        self._device = device
        self._marks = Marks(device)
        self._laps = list(laps)
        self.laps: Dict[str, List[Lap]] = {name: [] for name, _ in self._timed}
        """A block's share of every pass so far."""

    @property
    def _timed(self) -> List[Tuple[str, int]]:
        return [(name, count) for name, count in self._laps if name is not None]

    @abstractmethod
    def _pass(self) -> None:
        """Sets a mark at its beginning and at the end of each of its laps."""

    @abstractmethod
    def kept_bytes(self) -> Dict[str, int]:
        """Returns by kind what autograd keeps of a block from forward to backward pass, but for weights."""

    @abstractmethod
    def updates(self) -> Updates:
        """Makes an optimizer of all these weights."""

    def forward_and_backward(self, passes: int) -> None:
        """Times so many passes; a GPU gets them one after another, and need not wait for its host."""
        for _ in range(passes):
            self._pass()
        laps = self._marks.laps()
        for first in range(0, len(laps), len(self._laps) + 1):  # from the end of a pass to the next is none of them
            for (name, count), lap in zip(self._laps, laps[first:]):
                if name is not None:
                    self.laps[name].append(lap.shared(count))

    def medians(self) -> Dict[str, Median]:
        return {name: median([lap.ms for lap in laps]) for name, laps in self.laps.items()}

    def disturbed(self) -> float:
        """The part of all the time that passed in which other processes had this rank's processor."""
        every = [lap for laps in self.laps.values() for lap in laps]
        waited = sum(lap.waited_ms for lap in every)
        return waited / (waited + sum(lap.ms for lap in every))

    def passes(self) -> int:
        """How many there have been."""
        name = self._timed[0][0]
        return len(self.laps[name]) // sum(other == name for other, _ in self._timed)

    def known(self) -> bool:
        """Whether the medians are known well enough."""
        if any(len(laps) < LEAST for laps in self.laps.values()):
            return False
        found = self.medians()
        whole = sum(found[name].value * count for name, count in self._timed)
        return all(found[name].tight(whole / count, RELATIVE, OF_PASS) for name, count in self._timed)

    def peak_bytes(self) -> int:
        """The most that the GPU's allocator holds during a pass, more than before it."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._pass()
        self._marks.laps()
        return torch.cuda.max_memory_allocated(self._device) - before

    def optimizer_ns(self, seconds: float) -> Median:
        """Measures a whole optimizer step, per parameter, until it is known or `seconds` have passed.

        It changes the weights.
        """
        updates, marks = self.updates(), self._marks
        laps: List[Lap] = []
        until = time.monotonic() + seconds
        found = Median(0.0, 0.0)
        while not (laps and (found.tight(found.value, RELATIVE, RELATIVE) or time.monotonic() > until)):
            updates.fill()
            marks.set()
            updates.step()
            marks.set()
            laps += marks.laps()
            found = median([lap.ms for lap in laps[1:] or laps])  # the first one makes Adam's state
        factor = 1e6 / updates.numel
        return Median(found.value * factor, found.spread * factor)

    def close(self) -> None:
        self._marks.close()


class OwnPasses(Passes):
    """Passes through blocks of tdpp's own, whose weights and gradients are flat."""

    def __init__(
        self, flat: FlatWeights, train: TrainConfig, device: torch.device, laps: Sequence[Tuple[Optional[str], int]]
    ) -> None:
        super().__init__(device, laps)
        self._flat = flat
        self._train = train

    def updates(self) -> Updates:
        optimizer = Optimizer(self._flat, self._train)
        recorder, grad = Recorder(None), self._flat.grad
        return Updates(
            lambda: grad.fill_(optimizer.scaler.scale * 1e-3),
            lambda: optimizer.step(recorder),
            self._flat.weight.numel(),
        )


def cut_off(tensors: Tensors) -> Tensors:
    """Returns the same tensors, in which a backward pass ends."""
    return {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}


class SavedTensors:
    """Takes note, while it is entered, of the storages that autograd keeps for a backward pass.

    It holds their tensors, so that no other one is at the same address.
    """

    def __init__(self) -> None:
        self.sizes: Dict[int, int] = {}
        """Bytes by address."""
        self._held: List[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        self._held.append(tensor)
        return tensor


class Chain(Passes):
    """Parts of a model that a micro-batch goes through one after another; of the last one comes the loss."""

    _counts: Sequence[Tuple[str, int]]
    """The kind of each part's blocks, and how many they are."""

    @abstractmethod
    def _through(self, part: int, entered: Tensors) -> Tensors:
        """What leaves a part; of the last one, the loss."""

    @abstractmethod
    def _is_weight(self, address: int) -> bool:
        """Whether a storage at this address is one of weights."""

    def _both_ways(self) -> List[Tuple[Optional[str], int]]:
        """The laps of a pass."""
        ways = [(f"{kind}.forward", count) for kind, count in self._counts]
        return [*ways, *((f"{kind}.backward", count) for kind, count in reversed(self._counts))]

    def _pass(self) -> None:
        marks = self._marks
        marks.set()
        entered: Tensors = {}
        passed: List[Tuple[Tensors, Tensors]] = []
        for part in range(len(self._counts)):
            left = self._through(part, entered)
            marks.set()
            passed.append((entered, left))
            entered = cut_off(left)
        gradients: Dict[str, Optional[Tensor]] = {}
        for entered, left in reversed(passed):
            backward(left, gradients)
            gradients = {name: tensor.grad for name, tensor in entered.items()}
            marks.set()

    def kept_bytes(self) -> Dict[str, int]:
        found: Dict[str, int] = {}
        entered: Tensors = {}
        for part, (kind, count) in enumerate(self._counts):
            with SavedTensors() as kept:
                left = self._through(part, entered)
            sizes = [size for address, size in kept.sizes.items() if not self._is_weight(address)]
            found[kind] = round(sum(sizes) / count)
            entered = cut_off(left)
        return found


LAYERS = 4
"""Layers in a row, or as many as the model has: so weights come from memory as often as in a stage of a few layers, and
what a pass costs once is shared out."""


def few_layers(model: ModelConfig) -> ModelConfig:
    """The same model with `LAYERS` in a row, or as many as it has."""
    decoder = min(LAYERS, model.decoder_count) or None
    return replace(model, layers=min(LAYERS, model.layers), decoder_layers=decoder)


class Parts(Chain, OwnPasses):
    """One rank's share of a model of some layers, and a micro-batch that goes through it again and again."""

    def __init__(
        self, plan: Plan, model: ModelConfig, tensor: TensorGroup, micro_batch_size: int, device: torch.device
    ) -> None:
        """`model` has the vocabulary padded for the tensor size; the number format is that of `plan.train`."""
        few = few_layers(model)
        self.layers = few.counted
        task = task_of(replace(plan, model=few, recompute=Recompute.none))
        held = [list(blocks) for _, blocks in groupby(task.blocks, key=lambda block: block.kind)]
        self._counts = [(blocks[0].kind, len(blocks)) for blocks in held]
        """Neighbours of one kind, and how many they are."""
        self._tensor = tensor
        self._task = task
        owned: Dict[str, nn.Parameter] = {}
        self._stages = [Stage(task, part, tensor, owned) for part in cut_between(task, held)]
        for stage in self._stages:
            stage.initialise(1)
        flat = FlatWeights(
            [named for stage in self._stages for named in stage.parameters_by_name()],
            DTYPES[plan.train.precision],
            device,
        )
        if not plan.train.compile:  # as in the engine
            shared = [parameter for stage in self._stages for parameter in stage.shared]
            for stage in self._stages:
                stage.defer_weight_grads(WeightGradients(flat.add, flat.add_rows), shared, flat.adds)
        source = torch.Generator().manual_seed(plan.train.seed)
        self._micro = task.example(micro_batch_size, source).to(device)
        super().__init__(flat, plan.train, device, self._both_ways())

    def _through(self, part: int, entered: Tensors) -> Tensors:
        stage = self._stages[part]
        left = stage({**entered, **{name: self._micro.inputs[name] for name in stage.inputs}})
        return {"loss": self._task.loss(left, self._micro, self._tensor)} if stage.last else left

    def _is_weight(self, address: int) -> bool:
        return address == self._flat.weight.untyped_storage().data_ptr()


def medians_by_part(found: Dict[str, Median], kept: Dict[str, int]) -> Dict[str, Dict[str, float]]:
    """Returns what a profile says of each part (docs/formats.md)."""
    parts: Dict[str, Dict[str, float]] = {}
    for name, one in found.items():
        part, _, way = name.rpartition(".")
        parts.setdefault(part, {}).update({way: one.value, f"{way}_spread": one.spread})
    for part, size in kept.items():
        parts[part]["activation_bytes"] = size
    return parts


def groups_of(ranks_of_nodes: Sequence[Sequence[int]], size: int) -> List[List[int]]:
    """Tensor groups inside nodes, as many as there are ranks for; what is left over of a node is in none."""
    return [
        list(ranks[first : first + size]) for ranks in ranks_of_nodes for first in range(0, len(ranks) - size + 1, size)
    ]
