"""From what a rank's backward passes leave to the gradients of the whole global batch, and of half of it."""

from __future__ import annotations

from collections import Counter
from typing import AbstractSet, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.reduce import GradientReducer
from megatron_ext.engine.gradients.scatter import ScatteringReducer
from megatron_ext.parallel.comm import all_reduce
from megatron_ext.parallel.groups import Groups, TiedPart
from megatron_ext.tasks.cut import ties
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import DTYPES, Running, Task
from megatron_ext.timeline.recorder import Recorder

AT_ONCE = 2**22
"""Numbers that are summed, or change places, together: few, for they take memory in fp64."""


def late_names(
    plan: Plan, task: Task, place: Place, named: Sequence[Tuple[str, nn.Parameter]], owned: Mapping[str, nn.Parameter]
) -> AbstractSet[str]:
    """Name the parameters of a rank with a sharded optimizer whose gradients are summed over others than replicas, too:
    those of which other stages have copies and, with sequence parallelism, those that all of a tensor group have.

    `named` and `owned` are all that the rank has, by name, and by the owner's name where they are tied.
    """
    layout, late = plan.layout, set()
    if not plan.sharded_optimizer or layout.replicas[place.stage] == 1:
        return frozenset()
    if plan.sequence_parallel and layout.tensors[place.stage] > 1:
        late = {name for name, _ in named if task.shard(name) is None}
    tied = {id(owned[owner]) for owner, of in ties(task, plan.partition, plan.pipeline) if place.stage in of}
    return late | {name for name, parameter in named if id(parameter) in tied}


class HalfGradients:
    """The half gradients of one rank. It takes as much memory as the gradients, from `keep` to the end of
    `compared`."""

    def __init__(
        self, flat: FlatWeights, elsewhere: Sequence[slice], model: Optional[dist.ProcessGroup], copies: int
    ) -> None:
        """`elsewhere` are parts of the flat gradients that another rank of the `model` group has, too, and counts; each
        weight is held by `copies` ranks of that group."""
        self._gradient = flat.grad
        self._kept = slice(0, flat.share.length)
        self._counted_elsewhere = [flat.share.within(part) for part in elsewhere]
        self._model = model
        self._copies = copies
        self._even: Optional[Tensor] = None

    def keep(self) -> None:
        """When the even micro-batches of this rank have added to the gradient, and no others."""
        self._even = self._gradient.clone()

    def compared(self, reduce: Callable[[], None]) -> Tuple[float, float, float]:
        """When the whole gradient was reduced: the squared norms of the even micro-batches' part and of the whole, and
        their dot product, over the whole model. `reduce` does with that part in the gradient's place what was done with
        the whole one.

        All ranks call it together; the gradient then is as it was.
        """
        assert self._even is not None
        whole, self._even = self._even, None  # it becomes the whole one's place for a while
        _swap(self._gradient, whole)
        reduce()
        even = self._gradient
        sums = torch.stack([self._dot(even, even), self._dot(whole, whole), self._dot(even, whole)])
        all_reduce(sums, self._model, "all-reduce of the products of gradients")
        _swap(self._gradient, whole)
        found: List[float] = (sums / self._copies).tolist()
        return found[0], found[1], found[2]

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        found = _dot(a[self._kept], b[self._kept])
        for part in self._counted_elsewhere:
            found = found - _dot(a[part], b[part])
        return found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in _pieces(a, b):
        total += x.double().dot(y.double())
    return total


def _swap(a: Tensor, b: Tensor) -> None:
    for x, y in _pieces(a, b):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)


def _pieces(a: Tensor, b: Tensor) -> Iterator[Tuple[Tensor, Tensor]]:
    yield from zip(torch.split(a, AT_ONCE), torch.split(b, AT_ONCE))


class Gradients:
    """The gradients of one rank's stages."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        place: Place,
        groups: Groups,
        stages: Sequence[Stage],
        owned: Mapping[str, nn.Parameter],
        flat: FlatWeights,
        recorder: Recorder,
    ) -> None:
        """`owned` has the parameters of all `stages`, by the owner's name where they are tied."""
        self._groups = groups
        self._recorder = recorder
        named = [pair for stage in stages for pair in stage.parameters_by_name()]
        used = Counter(id(parameter) for stage in stages for parameter in stage.parameters())
        uses = {name: used[id(parameter)] for name, parameter in named}
        self._flat = flat
        self._first = plan.layout.even
        """Whether late gradients are summed over other groups before they are over the replicas, as they are where a
        sharded optimizer leaves a rank its share alone; not where a rank stands for several of another stage."""
        dtype = DTYPES[plan.reduce_dtype or "fp32"]
        self._reducer: GradientReducer
        if flat.scatters:
            rounds = [len(plan.taken_by(place.stage, dp)) for dp in range(plan.layout.replicas[place.stage])]
            in_order = len({*rounds}) > 1
            self._reducer = ScatteringReducer(
                flat, groups.data, recorder, uses, dtype, groups.by_node, max(rounds), in_order
            )
        else:
            self._reducer = GradientReducer(
                flat, groups.data, recorder, uses, dtype, late_whole=not self._first, by_node=groups.by_node
            )
        common = [parameter for name, parameter in named if task.shard(name) is None]
        several = plan.sequence_parallel and plan.layout.tensors[place.stage] > 1
        self._common = [flat.gradient(parameter) for parameter in common] if several else []
        """Those of the weights that every rank of the tensor group has, where each computes a part of them."""
        self._tied: List[Tuple[Tensor, TiedPart]] = []
        """Parts of those of parameters of which other stages have copies, too."""
        self._owners: List[bool] = []
        """Whether this rank is the one of the owner's stage that gives such a part."""
        elsewhere = {id(parameter) for parameter in common} if place.tp > 0 else set()
        for (owner, of_stages), parts_here in zip(ties(task, plan.partition, plan.pipeline), groups.tied):
            if place.stage in of_stages:
                gradient = flat.gradient(owned[owner])
                self._tied += [(gradient.chunk(part.parts)[part.part], part) for part in parts_here]
                self._owners += [part.gives and place.stage == of_stages[0] for part in parts_here]
                if place.stage != of_stages[0]:
                    elsewhere.add(id(owned[owner]))
        self.elsewhere = [here for name, here in flat.slices.items() if id(flat.parameters[name]) in elsewhere]
        """Where, in the flat weights, those lie that another rank has, too, and counts in the norm."""
        copies = plan.copies_in_model_group(place.stage)
        self._halves = HalfGradients(flat, self.elsewhere, groups.model, copies)

    @property
    def ends(self) -> List[int]:
        """List where, in the flat weights, that ends which is summed over the replicas in messages of its own, but for
        the last one."""
        return self._reducer.ends

    def begin(self, micro_batches: int, at_once: bool = False) -> None:
        """Starts an iteration of this many micro-batches on this rank; `at_once`: all are summed in `reduce`."""
        self._reducer.begin(micro_batches, at_once)

    def begin_aside(self) -> None:
        """Starts passes whose gradients are zero, and are not summed."""
        self._reducer.begin_aside()

    def reduce(self, summed: Optional[Callable[[int], None]] = None) -> None:
        """Sums them over the replicas, and what the ranks of a tensor group, or several stages, have in common.

        `summed` is as that of `GradientReducer.finish`. A sharded optimizer's share then lies at the beginning of the
        flat gradients (`Share.compact`).
        """
        if self._flat.has_late and self._first:
            self._sum_common()
            self._reducer.finish(summed)
        else:
            self._reducer.finish(summed)
            self._sum_common()
        if not self._flat.scatters:
            self._flat.share.compact(self._flat.grad)

    def _sum_common(self) -> None:
        if self._common:
            with self._recorder.span("layernorm-grads-all-reduce"):
                together = torch.cat([gradient.flatten() for gradient in self._common])
                all_reduce(together, self._groups.tensor, "all-reduce of the norms' gradients")
                self._recorder.traffic.all_reduced(together, self._groups.tensor)
                sizes = [gradient.numel() for gradient in self._common]
                for gradient, total in zip(self._common, torch.split(together, sizes)):
                    gradient.copy_(total.view_as(gradient))
        for gradient, part in self._tied:
            with self._recorder.span("embedding-grads-all-reduce"):
                if not part.gives:  # another rank of the group has the same, and gives it
                    gradient.zero_()
                all_reduce(gradient, part.group, "all-reduce of the gradient of a tied parameter")
                self._recorder.traffic.all_reduced(gradient, part.group)

    def copy_tied(self, flat: Tensor) -> None:
        """Gives all copies of a tied parameter the values of its owner, in a tensor laid out like the flat weights."""
        for (gradient, part), owner in zip(self._tied, self._owners):
            copy = flat[gradient.storage_offset() :][: gradient.numel()]
            if not owner:
                copy.zero_()
            all_reduce(copy, part.group, "handing out a tied parameter")
            self._recorder.traffic.all_reduced(copy, part.group)

    def keep_even(self) -> None:
        """When this rank's even micro-batches have added to them, and no others."""
        self._halves.keep()

    def compared(self, scale: float) -> Tuple[float, float, float]:
        """After `reduce`: the squared norms of the even micro-batches' part and of the whole, and their dot product,
        over the whole model and without the loss scale. All ranks call it."""
        even, whole, product = (value / scale**2 for value in self._halves.compared(self.reduce))
        return even, whole, product


class RunningStatistics:
    """Keeps the running statistics of a rank's stages."""

    def __init__(self, stages: Sequence[nn.Module], group: Optional[dist.ProcessGroup]) -> None:
        """`group` has the replicas."""
        self._modules = [module for stage in stages for module in stage.modules() if isinstance(module, Running)]
        self._group = group

    def begin(self) -> None:
        """Forgets what was gathered: before the first pass of an iteration."""
        for module in self._modules:
            module.gathered.zero_()

    def gathered(self) -> Optional[Tensor]:
        """A copy of what passes have left since `begin`; None without such statistics."""
        return torch.cat([module.gathered for module in self._modules]) if self._modules else None

    def finish(self, micro_batches: int, skipped: bool) -> None:
        """An iteration of so many, over all replicas. What a pass that overflowed found counts as little as its
        gradients do."""
        found = self.gathered()
        if found is not None:
            self.take(found, micro_batches, skipped)

    @torch.no_grad()
    def take(self, mean: Tensor, micro_batches: int, skipped: bool = False) -> None:
        """What all replicas gathered, of which `mean` is this one's, from so many micro-batches."""
        all_reduce(mean, self._group, "all-reduce of running statistics")
        if skipped:
            return
        mean /= micro_batches
        sizes = [len(module.gathered) for module in self._modules]
        for module, part in zip(self._modules, torch.split(mean, sizes)):
            module.update(part)
