"""What a micro-batch takes in each block of a task, counted by passing one on torch's device meta."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring.live_bytes import LiveBytes, attention_as_on_gpu
from megatron_ext.measuring.sequence import crossing, described, wires_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import DTYPES, Block, Placement, Task
from megatron_ext.timeline.recorder import Recorder
from megatron_ext.timeline.usage import Traffic

# Layers that compute what others before them have computed: they stand by while a micro-batch is counted.
#
# A layer of the third or a later place of its kind takes what the second one takes, so that it need not compute.

Looks = Tuple[torch.Size, torch.dtype, bool]
"""A tensor's shape, format, and whether gradients go through it."""
COMPUTED = 2
"""Layers of a kind that compute: the first one may make what others share, such as masks."""


class Repeated:
    """Which blocks stand for others, and what they give."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.like: Dict[int, int] = {}
        """For each block that is like one before it, the number of that one."""
        self._given: Dict[int, List[Looks]] = {}
        of_kind: Dict[str, List[int]] = {}
        computed: Set[int] = set()
        last = max((n for n, block in enumerate(blocks) if block.placement is Placement.COUNTED), default=-1)
        for number, block in enumerate(blocks):
            known = of_kind.setdefault(block.kind, [])
            if block.placement is Placement.COUNTED and number != last and len(known) == COMPUTED:
                self.like[number] = known[-1]
                continue
            known.append(number)
            computed |= {number, number + 1}  # what a block gives, the next one keeps
        self.standing_by = [number for number in self.like if number not in computed]

    def note(self, number: int, given: Sequence[Tensor]) -> None:
        """Takes note of what a block gives that has computed."""
        self._given[number] = [(one.shape, one.dtype, one.requires_grad) for one in given]

    def stand_by(self, number: int, module: nn.Module) -> None:
        """Has a block give tensors that look like what the one gave that it is like."""

        def forward(*taken: Tensor) -> Any:
            given: Tuple[Tensor, ...] = _Alike.apply(self._given[self.like[number]], *taken)  # type: ignore[no-untyped-call]
            return given if len(given) > 1 else given[0]

        module.forward = forward


class _Alike(Function):
    """Tensors without content, through which gradients go."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Looks], *taken: Tensor) -> Tuple[Tensor, ...]:
        ctx.taken = [(one.shape, one.dtype) for one in taken]
        device = taken[0].device
        found = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in given)
        ctx.mark_non_differentiable(*(one for one, (_, _, passes) in zip(found, given) if not passes))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Optional[Tensor], ...]:
        device = gradients[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in ctx.taken]
        return (None, *(one if needed else None for one, needed in zip(made, ctx.needs_input_grad[1:])))


META = torch.device("meta")


class Traced(NamedTuple):
    """Bytes by block, and behind them those of the loss."""

    kept: List[int]
    """From a block's forward to its backward pass: every storage once, with the block that made it."""
    passing: List[int]
    """At most at once in its forward or its backward pass, beside what it and those before it keep."""
    dropped: List[int]
    """What it gives, as far as the blocks behind it do not keep it."""
    forward: List[List[float]]
    """Operations of its forward pass, bytes that kernels read and write, and kernels; all-reduces of the tensor group,
    and their bytes."""
    backward: List[List[float]]
    """The same of its backward pass."""
    always: int
    """What all blocks together hold, however many micro-batches there are, such as masks."""
    wires: Dict[str, int]
    """Bytes of each wire."""


def counted(plan: Plan, sizes: Sequence[int], tensor: int) -> Dict[str, Any]:
    """Counts what a profile says of a model's blocks (docs/profile.md, `modules` and `sequence`), and `Traced`, for
    micro-batches of these sizes, of a rank in a tensor group of this size, with and without recomputation."""
    group = TensorGroup(tensor)
    plain, again = (task_of(replace(plan, recompute=way)) for way in (Recompute.none, Recompute.full))
    with META:
        found = described(plain, group, DTYPES[plan.train.precision])
    columns: Dict[str, List[Any]] = {}
    for size in sizes:
        one, two = (traced(task, size, plan.train.precision, group) for task in (plain, again))
        for name, values in (
            *(("kept", one.kept), ("given", two.kept), ("passing", one.passing), ("passing_again", two.passing)),
            *(("dropped", one.dropped), ("forward", one.forward), ("backward", one.backward)),
            ("always", [one.always]),
            *(("crossing", crossing(plain, one.wires)), ("wires", [one.wires[name] for name in wires_of(plain)])),
        ):
            columns.setdefault(name, []).append(values)
    return {"module": found, "sizes": list(sizes), "bytes": columns}


def traced(task: Task, micro_batch_size: int, precision: str, tensor: TensorGroup) -> Traced:
    """Counts what torch's allocator would give on a GPU, in one forward and one backward pass.

    Parameters that several blocks share are counted as on several stages, each of which has a copy: on one stage the
    first gradient of them waits for the others (`fasop.costs.memory`).
    """
    task.tied = {}
    live = LiveBytes()
    messages = _Sums(live, tensor.size)
    recorder = Recorder(None)
    recorder.traffic = messages
    tensor = tensor._replace(recorder=recorder)
    with META:
        (part,) = cut_between(task, [list(task.blocks)])
        stage = Stage(task, part, tensor, {})
    weights = FlatWeights(stage.parameters_by_name(), DTYPES[precision], META)
    stage.place(META, DTYPES[precision])
    micro = task.example(micro_batch_size, torch.Generator().manual_seed(0)).to(META)
    repeated, behind, wires = Repeated(task.blocks), len(task.blocks), {}
    for number in repeated.standing_by:
        repeated.stand_by(number, stage.blocks[number])
    given: List[List[Any]] = [[] for _ in range(behind)]
    for number, (block, module) in enumerate(zip(task.blocks, stage.blocks)):

        def left(_: Any, args: Any, out: Any, number: int = number, names: Sequence[str] = block.gives) -> None:
            outs = dict(zip(names, out if isinstance(out, tuple) else (out,)))
            wires.update({name: one.nbytes for name, one in outs.items()})
            repeated.note(number, [*outs.values()])
            storages = {id(one): one for one in (out.untyped_storage() for out in outs.values())}
            given[number] = [(weakref.ref(one), one.nbytes()) for one in storages.values()]
            for one in outs.values():
                if one.requires_grad:  # whose gradient comes first when the backward pass comes to the block
                    one.register_hook(lambda gradient: live.begin(number))

        module.register_forward_pre_hook(lambda *_, number=number: live.begin(number))
        module.register_forward_hook(left)
    with attention_as_on_gpu(), live:
        outputs = stage({name: micro.inputs[name] for name in stage.inputs})
        live.begin(behind)
        loss = task.loss(outputs, micro, tensor)
        del outputs
        kept, peaks = live.kept(), dict(live.peaks)
        dropped = [sum(size for one, size in of if one() is None) for of in given]
        forward = _passed(live, messages, behind)
        live.peaks.clear()
        live.begin(behind)
        backward({"loss": loss}, {})
        del loss
    stays = live.kept()
    del weights
    always = [stays.get(number, 0) for number in range(behind + 1)]
    own = [kept.get(number, 0) - stays.get(number, 0) for number in range(behind + 1)]
    passing, there = [], sum(always)
    for number, size in enumerate(own):
        there += size
        passing.append(max(0, peaks.get(number, 0) - there, live.peaks.get(number, 0) - there))
    back = _passed(live, messages, behind)
    columns: List[List[Any]] = [own, passing, dropped, forward, back, always]
    for of in columns:
        for number, other in repeated.like.items():
            of[number] = of[other]
    return Traced(own, passing, [*dropped, 0], forward, back, sum(always), wires)


def _passed(live: LiveBytes, messages: _Sums, behind: int) -> List[List[float]]:
    """What each block and the loss computed and sent since this was last asked for."""
    numbers = range(behind + 1)
    found = [[*live.work.get(one, (0, 0, 0)), *messages.of.get(one, (0.0, 0.0))] for one in numbers]
    live.work.clear()
    messages.of.clear()
    return found


class _Sums(Traffic):
    """Counts what goes through a tensor group, in all-reduces, by the block that computes."""

    def __init__(self, live: LiveBytes, ranks: int) -> None:
        super().__init__()
        self._live = live
        self._ranks = ranks
        self.of: Dict[int, List[float]] = {}

    def all_reduced(self, tensor: Tensor, group: Optional[dist.ProcessGroup], kind: str = "") -> None:
        self._note(1, tensor.nbytes)

    def all_gathered(self, own: Tensor, group: Optional[dist.ProcessGroup], kind: str = "") -> None:
        """The second half of an all-reduce of all shares."""
        self._note(0.5, own.nbytes * self._ranks / 2)

    def _note(self, count: float, size: float) -> None:
        found = self.of.setdefault(self._live.part, [0.0, 0.0])
        found[0] += count
        found[1] += size
