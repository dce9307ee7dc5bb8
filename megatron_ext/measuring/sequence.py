"""The blocks of any task in their order: what they are, what each keeps, and what crosses a cut behind them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Dict, List, Mapping, Sequence, Set, Tuple

import torch
from torch import nn

from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import block_of
from megatron_ext.tasks.stage import untrained
from megatron_ext.tasks.task import Block, Placement, Task, Tensors

LOSS = "loss()"
"""The kind of the loss, which no class is called."""


def described(task: Task, tensor: TensorGroup, dtype: torch.dtype) -> Dict[str, object]:
    """What a profile says of a task's blocks, whatever the micro-batch (docs/formats.md), as a rank of a tensor group
    has them in the model's number format."""
    owners: Dict[str, Set[str]] = {}
    for copy, owner in task.tied.items():
        owners.setdefault(owner, set()).update(block_of(task.blocks, name).name for name in (owner, copy))
    blocks, tied_parameters = [], 0
    for block in task.blocks:  # one after another: all of them may be more than a machine has room for
        module = block.make(tensor)
        blocks.append(_described(block, module, dtype))
        named = module.named_parameters()
        tied_parameters += sum(one.numel() for name, one in named if f"{block.name}.{name}" in owners)
    return {
        "blocks": blocks,
        "wires": list(wires_of(task).values()),
        "tied_parameters": tied_parameters,
        "tied_blocks": max(map(len, owners.values()), default=0),
    }


def _described(block: Block, module: nn.Module, dtype: torch.dtype) -> Dict[str, object]:
    like = torch.empty(0, dtype=dtype)
    fixed = {id(one): one.numel() * (like if changes else one).element_size() for one, changes in untrained(module)}
    found = {
        "name": block.name,
        "kind": block.kind,
        "parameters": sum(one.numel() for one in module.parameters() if one.requires_grad),
        "fixed_bytes": sum(fixed.values()),
    }
    return found if block.placement is Placement.COUNTED else {**found, "held": block.placement.name.lower()}


def first_of_each_kind(task: Task) -> Dict[str, Block]:
    """Returns the first block of each kind."""
    found: Dict[str, Block] = {}
    for block in task.blocks:
        found.setdefault(block.kind, block)
    return found


def _places(blocks: Sequence[Block]) -> Tuple[List[int], int]:
    """Returns how many counted blocks come before each block, and how many there are in all.

    A block of the first stage comes before a cut anywhere, one of the last behind it.
    """
    counted = sum(block.placement is Placement.COUNTED for block in blocks)
    found: List[int] = []
    left = place = counted
    for block in reversed(blocks):
        if block.placement is Placement.COUNTED:
            left -= 1
        if block.placement is not Placement.NEXT:
            place = {Placement.FIRST: -1, Placement.LAST: counted}.get(block.placement, left)
        found.append(place)
    return found[::-1], counted


def wires_of(task: Task) -> Dict[str, List[int]]:
    """Returns, by wire between blocks at different places, the place of its giver, then those of its takers.

    Counted blocks lie at their numbers, those of the first stage at -1, and those of the last one and the loss behind
    all counted ones.
    """
    places, counted = _places(task.blocks)
    found: Dict[str, List[int]] = {}
    for block, place in zip(task.blocks, places):
        for name in block.takes:
            if name in found and place not in found[name]:
                found[name].append(place)
        found.update({name: [place] for name in block.gives})
    for name in task.outputs:
        if counted not in found[name]:
            found[name].append(counted)
    return {name: ends for name, ends in found.items() if len(ends) > 1}


def crossing(task: Task, sizes: Mapping[str, int]) -> List[int]:
    """Bytes that cross a cut behind so many counted blocks, from none to all, with what is handed on; `sizes` are those
    of the wires."""
    _, counted = _places(task.blocks)
    change = [0] * (counted + 2)
    for name, (giver, *takers) in wires_of(task).items():
        change[giver + 1] += sizes[name]
        change[max(takers) + 1] -= sizes[name]
    return list(accumulate(change))[:-1]


@dataclass
class _Storage:
    """Holds wires that somebody may still take."""

    owner: int
    counted: bool


class Ledger:
    """What autograd keeps of each block, every storage once.

    What a block takes from another one is that one's, so that the blocks of a stage keep together what the stage does.
    """

    def __init__(self, task: Task) -> None:
        self.kept = [0] * len(task.blocks)
        """Bytes that each block keeps."""
        self.given = [0] * len(task.blocks)
        """Bytes of what each block gives, and takes of the micro-batch: all that is kept of one that is computed
        again."""
        self._storages: Dict[int, _Storage] = {}
        """Storages by address."""

    def note(self, number: int, inputs: Tensors, left: Tensors, kept: Mapping[int, int]) -> None:
        """Notes what a block takes of the micro-batch, the wires it gives, and the storages that are kept for its
        backward pass, by their addresses."""
        self.given[number] += sum(tensor.nbytes for tensor in inputs.values())
        for address, size in kept.items():
            storage = self._storages.get(address)
            if storage is None:
                self.kept[number] += size
            elif not storage.counted:
                self.kept[storage.owner] += size
                storage.counted = True
        for tensor in left.values():
            address = tensor.untyped_storage().data_ptr()
            if address not in self._storages:
                self._storages[address] = _Storage(number, address in kept)
                self.given[number] += tensor.nbytes

    def note_loss(self, kept: Mapping[int, int]) -> None:
        """Notes the storages that the loss keeps: of wires, such as logits, those that no block has kept before."""
        for address, size in kept.items():
            storage = self._storages.get(address)
            if storage is not None and not storage.counted:
                self.kept[storage.owner] += size
                storage.counted = True

    def forget_all_but(self, wires: Tensors) -> None:
        """Others may come to lie at the address of a wire that nobody takes any more."""
        live = {tensor.untyped_storage().data_ptr() for tensor in wires.values()}
        self._storages = {address: one for address, one in self._storages.items() if address in live}
