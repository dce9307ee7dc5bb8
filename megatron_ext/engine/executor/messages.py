"""What crosses a cut for a micro-batch: the wires of it, as one flat tensor for each number format."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.events import TENSOR
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import BLOCK, SCALE_BYTES, Compress, compressed_bytes
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.replay import AnyAction
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.parallel.comm import Peer, all_gather, all_reduce, annotate_errors
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Task, Tensors

# Numbers in 8 bits, by block: what goes from stage to stage with `parallel.compress=int8`.
#
# A block's scale is its largest absolute number divided by 127; each number is rounded to a multiple of it, half to
# even. Where a block has a number that is not finite, nothing of what is restored is, so that fp16's loss scaler
# notices.

LARGEST = 127


def quantised(numbers: Tensor) -> Tensor:
    """Returns int8 [`compressed_bytes(n)`] from n numbers of any shape: the scales' bytes, then the rounded numbers."""
    flat = numbers.detach().flatten().float()
    count, blocks = flat.numel(), -(-flat.numel() // BLOCK)
    rows = pad(flat, (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    scales = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True) / LARGEST
    rounded = (rows / scales).round_().clamp_(-LARGEST, LARGEST)  # of zeros 0 / 0, which a scale of 0 restores as 0
    found = torch.empty(compressed_bytes(count), dtype=torch.int8, device=flat.device)
    found[: SCALE_BYTES * blocks].view(torch.float32).copy_(scales.view(-1))
    found[SCALE_BYTES * blocks :].copy_(rounded.view(-1)[:count])
    return found


def restored(message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Returns the `count` numbers [`count`] of what `quantised` gives, in another number format."""
    blocks = -(-count // BLOCK)
    scales = message[: SCALE_BYTES * blocks].view(torch.float32)
    rows = pad(message[SCALE_BYTES * blocks :], (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    return (rows * scales.view(blocks, 1)).view(-1)[:count].to(dtype)


Channels = Dict[Kind, List[List[Peer]]]
"""For each kind of message, to or from whom that of micro-batch m goes: those at m modulo the length of the list. A
receive has one peer; a kind that a rank never exchanges is missing."""
RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


def channels(layout: Layout, place: Place, chunks: int, groups: Groups) -> Channels:
    """A rank's. With several chunks the last stage is followed by the first.

    Between tensor groups of unlike sizes rank j of the receiving one takes what rank j mod t of the sending one, of t
    ranks, has: all of a group have the same.
    """
    stage, last = place.stage, layout.stages - 1
    before, after = (stage - 1) % layout.stages, (stage + 1) % layout.stages
    sides: List[Tuple[Kind, int, Optional[dist.ProcessGroup]]] = []
    if stage > 0 or chunks > 1:
        sides.append((Kind.RECV_FORWARD, before, groups.forward if stage > 0 else groups.forward_wrap))
        sides.append((Kind.SEND_BACKWARD, before, groups.backward if stage > 0 else groups.backward_wrap))
    if stage < last or chunks > 1:
        sides.append((Kind.SEND_FORWARD, after, groups.forward if stage < last else groups.forward_wrap))
        sides.append((Kind.RECV_BACKWARD, after, groups.backward if stage < last else groups.backward_wrap))
    found: Channels = {}
    for kind, other, group in sides:
        own, theirs = layout.tensors[stage], layout.tensors[other]
        ends = [place.tp % theirs] if kind in RECEIVES else [tp for tp in range(theirs) if tp % own == place.tp]
        met = layout.met(stage, place.dp, other)
        found[kind] = [
            [Peer(layout.rank(other, replica, tp), group) for tp in ends if replica in met]
            for replica in (met if layout.even else range(layout.replicas[other]))
        ]
    return found


def actions_by_channel(actions: Sequence[AnyAction], kind: Kind, ways: int) -> List[List[AnyAction]]:
    """The actions of a kind for each of so many ways that its messages go, as in `Channels`."""
    found: List[List[AnyAction]] = [[] for _ in range(ways)]
    for action in actions:
        if action.kind is kind:
            found[action.micro_batch % ways].append(action)
    return found


def warm_up(groups: Groups, peers: Channels, place: Place, stages: int, device: torch.device) -> None:
    """One message through every group and channel, in an order in which no rank waits for one that waits for it.

    All ranks call it. nccl connects ranks at their first message; they wait there for each other, with calls that may
    also wait for whatever the GPU is doing: with receives posted ahead of time, for ever. First come the groups
    of each kind, in one order for all ranks. Then the channels, in one order as well: between the stages 0 and 1, 2 and
    3 and so on, then 1 and 2, 3 and 4, for most of them at once; the way from the last stage to the first comes last.
    """
    message = torch.zeros(1, device=device)
    with annotate_errors("connecting to all ranks"):
        dist.all_reduce(message)
    for what in ("tensor", "data", "model", *(("replicas", "across") if groups.replicas is not groups.data else ())):
        all_reduce(message, getattr(groups, what), f"connecting the {what} group")
    for group in groups.meetings.values():
        all_reduce(message, group, "connecting the islands")
    for part in groups.by_node or ():
        all_reduce(message, part, "connecting the data group's nodes")
    for parts in groups.tied:
        for copy in parts:
            all_reduce(message, copy.group, "connecting the ranks that share a parameter")
    before = (Kind.RECV_FORWARD, Kind.SEND_BACKWARD)
    forward = (Kind.RECV_FORWARD, Kind.SEND_FORWARD)

    def turn(channel: Tuple[Kind, Peer]) -> Tuple[bool, int, bool, Tuple[int, int]]:
        kind, peer = channel
        wraps = place.stage == (0 if kind in before else stages - 1)
        ends = (peer.rank, place.rank) if kind in RECEIVES else (place.rank, peer.rank)
        return wraps, (place.stage - 1 if kind in before else place.stage) % 2, kind not in forward, ends

    every = [(kind, peer) for kind, ways in peers.items() for way in ways for peer in way]
    for kind, peer in sorted(every, key=turn):
        exchange = dist.recv if kind in RECEIVES else dist.send
        with annotate_errors(f"connecting to rank {peer.rank}"):
            exchange(message, peer.rank, group=peer.group)
    message.cpu()


ALONE = TensorGroup()


class Content(NamedTuple):
    """One tensor of a message."""

    name: str
    shape: Tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    shared: Optional[int] = None
    """The dimension of which this rank has a share, where a whole tensor goes over the cut."""
    in_int8: bool = False
    """Whether it is sent in 8 bits."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Message:
    """The tensors that go over a cut together; both sides know them, so that nothing describes them on the way."""

    def __init__(
        self, contents: Sequence[Content], device: torch.device, tensor: TensorGroup = ALONE, scattered: bool = False
    ) -> None:
        """`scattered`: all ranks of both tensor groups, which are of one size, have the same tensors; each sends its
        part of the flat ones, and those that receive put them together."""
        self.contents = tuple(contents)
        self._parts = tensor.size if scattered else 1
        self._device = device
        self._tensor = tensor
        by_format: Dict[Tuple[torch.dtype, bool], List[Content]] = {}
        for content in contents:
            by_format.setdefault((content.dtype, content.in_int8), []).append(content)
        self._formats = list(by_format.values())
        self._whole_ones = [_sent(group) for group in self._formats]
        self.likes = [torch.empty(self._part(shape), dtype=kind, device=device) for shape, kind in self._whole_ones]
        """Tensors like those that are sent, in their order."""

    def gradients(self, others: Sequence[Content] = ()) -> Message:
        """What goes back over the cut, with `others` behind it."""
        contents = [*(one for one in self.contents if one.gradient), *others]
        return Message(contents, self._device, self._tensor, self._parts > 1)

    def pack(self, tensors: Mapping[str, Tensor]) -> List[Tensor]:
        """The tensors to send. Raises EngineError: a tensor is not as the other side expects it."""
        shared = [one for one in self.contents if one.shared is not None]
        if shared:
            tensors = {**tensors, **{one.name: self._whole(tensors[one.name], one) for one in shared}}
        for one in self.contents:
            found = tensors[one.name]
            if tuple(found.shape) != one.shape or found.dtype != one.dtype:
                raise EngineError(
                    f"another stage expects {one.name} with the shape {list(one.shape)} of {one.dtype}, but it is "
                    f"{list(found.shape)} of {found.dtype} in this micro-batch; what crosses a cut must have one shape "
                    "in all micro-batches: pad it, or move the cut with parallel.partition"
                )
        packed = [
            tensors[group[0].name].contiguous()
            if len(group) == 1
            else torch.cat([tensors[one.name].flatten() for one in group])
            for group in self._formats
        ]
        every = [quantised(flat) if group[0].in_int8 else flat for group, flat in zip(self._formats, packed)]
        return every if self._parts == 1 else [self._own_part(flat) for flat in every]

    def unpack(self, received: Sequence[Tensor]) -> Tensors:
        """The inverse: parts of what was received, by name."""
        found: Tensors = {}
        if self._parts > 1:
            received = [self._gathered(part, *whole) for part, whole in zip(received, self._whole_ones)]
        for group, flat in zip(self._formats, received):
            if group[0].in_int8:
                flat = restored(flat, sum(one.numel for one in group), group[0].dtype)
                flat = flat.view(group[0].shape) if len(group) == 1 else flat
            if len(group) == 1:
                found[group[0].name] = flat
                continue
            for one, part in zip(group, torch.split(flat, [one.numel for one in group])):
                found[one.name] = part.view(one.shape)
        for one in self.contents:
            if one.shared is not None:
                here = self._tensor.positions(one.shape[one.shared])
                own = found[one.name].narrow(one.shared, here.start, here.stop - here.start)
                found[one.name] = own.contiguous()
        return found

    def _part(self, shape: Tuple[int, ...]) -> Tuple[int, ...]:
        """The shape of what is sent of a tensor of this one; the last rank's part may end in zeros."""
        return shape if self._parts == 1 else (-(-math.prod(shape) // self._parts),)

    def _own_part(self, whole: Tensor) -> Tensor:
        flat = whole.detach().flatten()
        (length,) = self._part(tuple(flat.shape))
        own = flat[self._tensor.rank * length : (self._tensor.rank + 1) * length]
        return own if len(own) == length else pad(own, (0, length - len(own)))

    def _gathered(self, part: Tensor, shape: Tuple[int, ...], _: torch.dtype) -> Tensor:
        """Put together from the parts of the tensor group, all of which call it."""
        self._tensor.recorder.traffic.all_gathered(part, self._tensor.group, TENSOR)
        parts = part.new_empty(self._parts, len(part))
        all_gather(part, parts, self._tensor.group, "putting together what came from another stage")
        return parts.view(-1)[: math.prod(shape)].view(shape)

    def _whole(self, share: Tensor, one: Content) -> Tensor:
        """Put together from the shares of the tensor group, all of which call it."""
        assert one.shared is not None
        if self._tensor.size == 1:
            return share
        shares = share.new_empty(self._tensor.size, *share.shape)
        all_gather(share.detach().contiguous(), shares, self._tensor.group, "gathering what goes to another stage")
        return torch.cat(list(shares), one.shared)


def _sent(group: Sequence[Content]) -> Tuple[Tuple[int, ...], torch.dtype]:
    """The shape and the number format in which tensors of one format are sent."""
    numel = sum(one.numel for one in group)
    if group[0].in_int8:
        return (compressed_bytes(numel),), torch.int8
    return group[0].shape if len(group) == 1 else (numel,), group[0].dtype


def message_of(
    task: Task,
    wires: Sequence[str],
    micro_batch_size: int,
    tensor: TensorGroup,
    dtype: torch.dtype,
    device: torch.device,
    whole: bool = False,
    fixed_for: Optional[int] = None,
    own_sizes: Sequence[Tuple[str, int]] = (),
    compress: Optional[Compress] = None,
    scattered: bool = False,
) -> Message:
    """The message that carries these wires of a task, whose own number format is `dtype`.

    With sequence parallelism each rank sends its share of them to the rank that has the same; where the other stage's
    tensor group has another size, the `whole` of them. `fixed_for` is the micro-batch size of wires without a named
    one: their first dimension of that size; `own_sizes` are those that the micro-batch has instead of the task's.
    With `compress` activations, which are what a gradient comes back for, are sent in 8 bits; `scattered`, each rank
    sends its part.
    """
    sizes = {**task.sizes(micro_batch_size), **dict(own_sizes)}
    sequences = {SEQUENCE, DECODER_SEQUENCE} & sizes.keys()
    if not whole:
        for name in sequences:
            own = tensor.positions(sizes[name])
            sizes[name] = own.stop - own.start
    contents = []
    known = task.wires_at(micro_batch_size)
    for wire in (known[name] for name in wires):
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in wire.dims)
        if known is task.wires and fixed_for in wire.dims and not any(isinstance(dim, str) for dim in wire.dims):
            batch = wire.dims.index(fixed_for)
            shape = (*shape[:batch], micro_batch_size, *shape[batch + 1 :])
        shared = next((at for at, dim in enumerate(wire.dims) if whole and dim in sequences), None)
        kind = dtype if wire.dtype is None else wire.dtype
        in_int8 = compress == Compress.int8 and wire.gradient and not wire.exact
        contents.append(Content(wire.name, shape, kind, wire.gradient, shared, in_int8))
    return Message(contents, device, tensor, scattered)
