"""What each stage of a pipeline holds of a task, and what crosses the cuts between them."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.tasks.task import Block, Placement, Task


class Part(NamedTuple):
    """What one virtual stage holds."""

    number: int
    blocks: Tuple[Block, ...]
    inputs: Tuple[str, ...]
    """Inputs of the micro-batch that its blocks take."""
    enters: Tuple[str, ...]
    """Wires that come from the stage before: taken here, or handed on."""
    leaves: Tuple[str, ...]
    """Wires that go to the next stage; of the last one, what the loss takes."""
    last: bool


def cut(task: Task, partition: Sequence[int]) -> List[Part]:
    """The virtual stages of a task, of which each holds so many counted blocks. Raises EngineError: the blocks do not
    fit together (see `check`), or the partition has another number of them."""
    check(task)
    return cut_between(task, _held(task.blocks, partition))


def cut_between(task: Task, held: Sequence[Sequence[Block]]) -> List[Part]:
    """The virtual stages that hold these blocks, all of the task's in their order.

    Neighbours hand on what skips over them: a wire crosses every cut between the stage that gives it and the last one
    that takes it.
    """
    given = {name: stage for stage, blocks in enumerate(held) for block in blocks for name in block.gives}
    until = {name: len(held) - 1 for name in task.outputs}
    for stage, blocks in enumerate(held):
        for block in blocks:
            until.update({name: max(stage, until.get(name, 0)) for name in block.takes if name in given})
    wires = [name for name in task.wires if name in given]
    parts = []
    for stage, blocks in enumerate(held):
        last = stage == len(held) - 1
        taken = {name for block in blocks for name in block.takes}
        parts.append(
            Part(
                number=stage,
                blocks=tuple(blocks),
                inputs=tuple(name for name in task.inputs if name in taken),
                enters=tuple(name for name in wires if given[name] < stage <= until.get(name, -1)),
                leaves=task.outputs
                if last
                else tuple(name for name in wires if given[name] <= stage < until.get(name, -1)),
                last=last,
            )
        )
    return parts


def ties(task: Task, partition: Sequence[int], pipeline: int) -> List[Tuple[str, List[int]]]:
    """Parameters of which several stages of the pipeline have a copy: the owner's name, and the stages in order."""
    stage_of = {
        block.name: virtual % pipeline for virtual, part in enumerate(cut(task, partition)) for block in part.blocks
    }
    holders: Dict[str, Set[int]] = {}
    for copy, owner in task.tied.items():
        holders.setdefault(owner, set()).update(stage_of[block_of(task.blocks, name).name] for name in (owner, copy))
    return [(owner, sorted(stages)) for owner, stages in holders.items() if len(stages) > 1]


def block_of(blocks: Sequence[Block], parameter: str) -> Block:
    """The block whose parameter has this name in the whole model."""
    return max((block for block in blocks if parameter.startswith(f"{block.name}.")), key=lambda block: len(block.name))


def check(task: Task) -> None:
    """Whether every wire is given once, and before it is taken. Raises EngineError: it is not; the message names the
    blocks."""
    names: Set[str] = set()
    giver: Dict[str, Block] = {}
    for block in task.blocks:
        if block.name in names:
            raise EngineError(f"two blocks are called {block.name}; give each a name of its own")
        names.add(block.name)
        for name in block.gives:
            if name in giver or name in task.inputs:
                other = f"block {giver[name].name}" if name in giver else "the micro-batch"
                raise EngineError(f"block {block.name} gives {name}, but so does {other}; rename one of them")
            if name not in task.wires:
                raise EngineError(f"block {block.name} gives {name}, which is not among the task's wires")
            giver[name] = block
    given = set(task.inputs)
    for block in task.blocks:
        for name in block.takes:
            if name not in giver and name not in task.inputs:
                known = ", ".join([*task.inputs, *giver][:10])
                raise EngineError(f"block {block.name} takes {name}, which no block gives; there are {known}")
            if name not in given:
                raise EngineError(_out_of_order(block, name, giver))
        given.update(block.gives)
    for name in task.outputs:
        if name not in giver:
            raise EngineError(f"the loss takes {name}, which no block gives")
    for copy, owner in task.tied.items():
        for name in (copy, owner):
            if not any(name.startswith(f"{block.name}.") for block in task.blocks):
                raise EngineError(f"{copy} is tied to {owner}, but no block has a parameter {name}")


def _out_of_order(block: Block, name: str, giver: Dict[str, Block]) -> str:
    """The message for a block that takes a wire which is given later: in a cycle, or only in the wrong order."""
    way, seen = [block.name], {block.name}
    waiting = [(giver[name], [giver[name].name])]
    while waiting:
        current, path = waiting.pop()
        if current.name == block.name:
            return f"the blocks {' -> '.join(reversed([*way, *path]))} take what each other gives: a cycle"
        for wire in current.takes:
            before = giver.get(wire)
            if before is not None and (before.name == block.name or before.name not in seen):
                seen.add(before.name)
                waiting.append((before, [*path, before.name]))
    return f"block {block.name} takes {name}, which {giver[name].name} gives only after it; put that block first"


def _held(blocks: Sequence[Block], partition: Sequence[int]) -> List[List[Block]]:
    """The blocks of each stage, in their order."""
    counted = sum(block.placement is Placement.COUNTED for block in blocks)
    if sum(partition) != counted:
        raise EngineError(
            f"parallel.partition={'-'.join(map(str, partition))} has {sum(partition)} blocks, "
            f"but the model has {counted}"
        )
    held: List[List[Block]] = [[] for _ in partition]
    stages = iter([stage for stage, count in enumerate(partition) for _ in range(count)])
    waiting: List[Block] = []
    for block in blocks:
        waiting.append(block)
        if block.placement is not Placement.NEXT:
            ends = {Placement.FIRST: 0, Placement.LAST: len(partition) - 1}
            held[ends[block.placement] if block.placement in ends else next(stages)] += waiting
            waiting = []
    return held
