"""A model whose blocks are measured, such as a user's module, as costs see it: its blocks and their bytes as profiles
have them, in the place of a formula."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from conf.schema.model import Model

LOSS = "loss()"
"""The kind of the loss, as megatron_ext.measuring.sequence calls it."""


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """What a block's forward or backward pass computes and sends, by `MeasuredModule.sizes`."""

    operations: tuple[int, ...]
    traffic: tuple[int, ...]
    """Bytes that kernels read and write."""
    kernels: int
    sums: float = 0
    """All-reduces of the tensor group; a gathering counts as half of one."""
    sum_bytes: tuple[float, ...] = ()
    """Bytes of all of them."""


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """What is known of a block whose bytes were counted without a GPU, by `MeasuredModule.sizes`."""

    passing: tuple[int, ...]
    """Bytes that are there for a moment of its passes, beside what it and those before it keep."""
    passing_again: tuple[int, ...]
    """The same if it is computed again."""
    dropped: tuple[int, ...]
    """Bytes that it gives and that no block behind it keeps."""
    forward: PassCounts
    backward: PassCounts


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    name: str
    kind: str
    """The name under which its times are known."""
    held: str | None
    """None: a partition counts it; else `first`, `last` or `next`, where it lies."""
    parameters: int
    fixed_bytes: int
    """Bytes of what is not trained: buffers, and frozen parameters."""
    kept: tuple[int, ...]
    """Bytes that autograd keeps of a micro-batch, by `MeasuredModule.sizes`."""
    given: tuple[int, ...]
    """Bytes that are kept of it where it is computed again."""
    counts: BlockCounts | None = None
    """None: the block was measured, which says nothing of this."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWire:
    giver: int
    """Where it lies, as in `megatron_ext.contract.models.pieces.Wire`."""
    takers: tuple[int, ...]
    bytes: tuple[int, ...]
    """Bytes of a micro-batch, one for each of `MeasuredModule.sizes`."""


class MeasuredModule(Model):
    """A model of a measured family whose blocks are known. Two are the same only if they are one."""

    def __init__(
        self,
        model: Model,
        *,
        digest: str,
        sequence: Sequence[MeasuredBlock],
        sizes: Sequence[int],
        crossing: Sequence[Sequence[int]],
        wires: Sequence[MeasuredWire],
        tied_parameters: int,
        tied_blocks: int,
        tensor: int = 1,
        always: int | None = None,
    ) -> None:
        """
        Args:
            model: of which the number of blocks is that of the counted ones from now on.
            digest: as `conf.blocks_of_module.digest_of`.
            sequence: all blocks in their order, and the loss as one that lies on the last stage.
            sizes: micro-batch sizes that were measured, which increase.
            crossing: by how many counted blocks are before a cut, the bytes of a micro-batch that cross it, by `sizes`.
            wires: that lead from a block to others; none: they are not known.
            tied_parameters: that several blocks have copies of.
            tied_blocks: that have copies of one parameter, at most.
            tensor: the size of the tensor group of which all this is a rank's.
            always: bytes of a stage, whatever its blocks and micro-batches; None: the blocks were measured.
        """
        layers = sum(block.held is None for block in sequence)
        for key in fields(Model):
            object.__setattr__(self, key.name, layers if key.name == "layers" else getattr(model, key.name))
        self.digest = digest
        self.sequence = tuple(sequence)
        self.sizes = tuple(sizes)
        self.crossing = tuple(map(tuple, crossing))
        self.wires = tuple(wires)
        self.tied_parameters = tied_parameters
        self.tied_blocks = tied_blocks
        self.tensor = tensor
        self.always = always
        self.groups: Mapping[int, MeasuredModule] = {tensor: self}
        """What a rank has of the model, by the size of its tensor group."""
        self.refused: Mapping[int, str] = {}
        """Why the model cannot have tensor groups of other sizes."""
        self.alone: MeasuredModule | None = None
        """All weights of the model trained without a tensor group, as counted, where that was measured."""
        self._by_name = {block.name: block for block in sequence}

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def of_rank(self, tensor: int) -> MeasuredModule:
        """What a rank in a tensor group of this size has; the model as it is, where that is not known."""
        return self.groups.get(tensor, self)

    def parameters(self) -> int:
        """Weights of the model; those that several blocks have copies of count once."""
        whole = self.of_rank(1)
        return sum(block.parameters for block in whole.sequence) - whole.tied_parameters * max(0, whole.tied_blocks - 1)

    def block(self, name: str) -> MeasuredBlock:
        return self._by_name[name]

    def kept(self, name: str, micro_batch_size: int) -> float:
        """Bytes of a block that are there from its forward to its backward pass."""
        return between(self.sizes, self.block(name).kept, micro_batch_size)

    def given(self, name: str, micro_batch_size: int) -> float:
        """The same if it is computed again."""
        return between(self.sizes, self.block(name).given, micro_batch_size)

    def passing(self, name: str, micro_batch_size: int, *, again: bool) -> float:
        """Bytes of a counted block that are there for a moment."""
        counts = self.block(name).counts
        assert counts is not None
        return between(self.sizes, counts.passing_again if again else counts.passing, micro_batch_size)

    def dropped(self, name: str, micro_batch_size: int) -> float:
        """Bytes that a counted block gives and that no other keeps."""
        counts = self.block(name).counts
        assert counts is not None
        return between(self.sizes, counts.dropped, micro_batch_size)

    def messages(self, micro_batch_size: int) -> list[int]:
        """Bytes that cross a cut behind so many counted blocks."""
        return [round(between(self.sizes, values, micro_batch_size)) for values in self.crossing]


def in_groups(modules: Sequence[MeasuredModule], refused: Mapping[int, str]) -> MeasuredModule:
    """The first of these, which are one model as ranks in tensor groups of unlike sizes have it."""
    groups = {one.tensor: one for one in modules}
    for one in modules:
        one.groups, one.refused = groups, refused
    return modules[0]


def between(sizes: Sequence[int], values: Sequence[float], wanted: int) -> float:
    """Bytes at a micro-batch size, from those at `sizes`, which increase: what a micro-batch takes is a constant and so
    much for each sample, so that a line between neighbours goes on beyond them."""
    if len(sizes) == 1:
        return values[0] * wanted / sizes[0]
    right = min(max(bisect_left(sizes, wanted), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = (wanted - low) / (high - low)
    return max(0.0, values[right - 1] + share * (values[right] - values[right - 1]))
