"""What embedding, layers and head of a model take on a rank: the engine's own modules, forward and backward apart."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Callable, Dict, List, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from megatron_ext.contract.plan import ModelConfig, Plan
from megatron_ext.engine.flat import FlatWeights
from megatron_ext.engine.optimizer import DataGroup, Optimizer
from megatron_ext.engine.precision import DTYPES
from megatron_ext.measuring.laps import Lap, Marks
from megatron_ext.measuring.medians import LEAST, Median, median
from megatron_ext.parallel.tensor_parallel import TensorGroup, vocab_cross_entropy
from megatron_ext.tasks.gpt import Stage
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.timeline.recorder import Recorder

LAYERS = 4
"""Layers in a row, or as many as the model has: so weights come from memory as often as in a stage of a few layers, and
what a pass costs once is shared out."""
LAPS = ("embedding.forward", "layer.forward", "head.forward", "head.backward", "layer.backward", "embedding.backward")
"""Of a pass, in their order."""
RELATIVE = 0.02
OF_PASS = 0.005
"""Times are known once half of each median's 95 % confidence interval is at most `RELATIVE` of it, or `OF_PASS` of a
whole pass, in which an embedding may hardly count."""
T = TypeVar("T")


class Parts:
    """One rank's share of a model of some layers, and a micro-batch that goes through it again and again."""

    def __init__(
        self, plan: Plan, model: ModelConfig, tensor: TensorGroup, micro_batch_size: int, device: torch.device
    ) -> None:
        """`model` has the vocabulary padded for the tensor size; the number format is that of `plan.train`."""
        self.layers = min(LAYERS, model.layers)
        alone = replace(
            plan, tensor=tensor.size, pipeline=1, chunks=1, partition=[self.layers], recompute="none", model=model
        )
        self._device = device
        self._tensor = tensor
        self._vocab_size = model.vocab_size
        self._train = plan.train
        stage = Stage(alone, 0, tensor)
        assert stage.embedding is not None and stage.head is not None
        self._embedding, self._head = stage.embedding, stage.head
        self._layers = list(stage.layers.values())
        self._flat = FlatWeights(stage.parameters_by_name(), DTYPES[plan.train.precision], device)
        if self._flat.fused and not plan.train.compile:  # as in the engine
            stage.put_off(WeightGradients(self._flat.add))
        source = torch.Generator().manual_seed(plan.train.seed)
        samples = torch.randint(model.vocab_size, (micro_batch_size, model.sequence_length + 1), generator=source)
        self._tokens, self._labels = samples[:, :-1].to(device), samples[:, 1:].to(device)
        self._marks = Marks(device)
        self.laps: Dict[str, List[Lap]] = {name: [] for name in LAPS}
        """Of every pass so far; those of the layers are a layer's share."""

    def forward_and_backward(self, passes: int) -> None:
        """So many passes, timed; a GPU gets them one after another, and need not wait for its host."""
        for _ in range(passes):
            self._pass()
        laps = self._marks.laps()
        for first in range(0, len(laps), len(LAPS) + 1):  # from the end of a pass to the next is none of them
            for name, lap in zip(LAPS, laps[first:]):
                self.laps[name].append(lap.shared(self._count(name)))

    def _pass(self) -> None:
        marks = self._marks
        marks.set()
        embedded = self._embedding(self._tokens)
        marks.set()
        entered = embedded.detach().requires_grad_()
        left = self._through_layers(entered)
        marks.set()
        last = left.detach().requires_grad_()
        loss = self._loss(last)
        marks.set()
        loss.backward()  # type: ignore[no-untyped-call]
        marks.set()
        torch.autograd.backward([left], [last.grad])
        marks.set()
        torch.autograd.backward([embedded], [entered.grad])
        marks.set()

    def medians(self) -> Dict[str, Median]:
        return {name: median([lap.ms for lap in laps]) for name, laps in self.laps.items()}

    def disturbed(self) -> float:
        """The part of all the time that passed in which other processes had this rank's processor."""
        every = [lap for laps in self.laps.values() for lap in laps]
        waited = sum(lap.waited_ms for lap in every)
        return waited / (waited + sum(lap.ms for lap in every))

    def known(self) -> bool:
        """Whether the medians are known well enough."""
        if len(self.laps[LAPS[0]]) < LEAST:
            return False
        found = self.medians()
        whole = sum(one.value * self._count(name) for name, one in found.items())
        return all(one.tight(whole / self._count(name), RELATIVE, OF_PASS) for name, one in found.items())

    def kept_bytes(self) -> Dict[str, int]:
        """What autograd keeps of each part from forward to backward pass, but for weights; of a layer, its share."""
        embedded, of_embedding = self._kept(lambda: self._embedding(self._tokens))
        entered = embedded.detach().requires_grad_()
        left, of_layers = self._kept(lambda: self._through_layers(entered))
        last = left.detach().requires_grad_()
        _, of_head = self._kept(lambda: self._loss(last))
        return {"embedding": of_embedding, "layer": round(of_layers / self.layers), "head": of_head}

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

    def _count(self, lap: str) -> int:
        """How many of what the lap is of go through it in a pass."""
        return self.layers if lap.startswith("layer") else 1

    def _through_layers(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x

    def _loss(self, x: Tensor) -> Tensor:
        return vocab_cross_entropy(self._head(x), self._labels, self._vocab_size, self._tensor)

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
