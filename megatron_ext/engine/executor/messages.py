"""What crosses a cut for a micro-batch: the wires of it, as one flat tensor for each number format."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.parallel.comm import all_gather
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Task, Tensors

ALONE = TensorGroup()


class Content(NamedTuple):
    """One tensor of a message."""

    name: str
    shape: Tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    shared: Optional[int] = None
    """The dimension of which this rank has a share, where a whole tensor goes over the cut."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Message:
    """The tensors that go over a cut together; both sides know them, so that nothing describes them on the way."""

    def __init__(self, contents: Sequence[Content], device: torch.device, tensor: TensorGroup = ALONE) -> None:
        self.contents = tuple(contents)
        self._device = device
        self._tensor = tensor
        by_dtype: Dict[torch.dtype, List[Content]] = {}
        for content in contents:
            by_dtype.setdefault(content.dtype, []).append(content)
        self._formats = list(by_dtype.values())
        self.likes = [
            torch.empty(
                group[0].shape if len(group) == 1 else (sum(one.numel for one in group),),
                dtype=group[0].dtype,
                device=device,
            )
            for group in self._formats
        ]
        """Tensors like those that are sent, in their order."""

    def gradients(self, others: Sequence[Content] = ()) -> Message:
        """What goes back over the cut, with `others` behind it."""
        return Message([*(one for one in self.contents if one.gradient), *others], self._device, self._tensor)

    def pack(self, tensors: Mapping[str, Tensor]) -> List[Tensor]:
        """The tensors to send.

        Raises:
            EngineError: a tensor is not as the other side expects it.
        """
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
        return [
            tensors[group[0].name].contiguous()
            if len(group) == 1
            else torch.cat([tensors[one.name].flatten() for one in group])
            for group in self._formats
        ]

    def unpack(self, received: Sequence[Tensor]) -> Tensors:
        """The inverse: parts of what was received, by name."""
        found: Tensors = {}
        for group, flat in zip(self._formats, received):
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

    def _whole(self, share: Tensor, one: Content) -> Tensor:
        """Put together from the shares of the tensor group, all of which call it."""
        assert one.shared is not None
        if self._tensor.size == 1:
            return share
        shares = share.new_empty(self._tensor.size, *share.shape)
        all_gather(share.detach().contiguous(), shares, self._tensor.group, "gathering what goes to another stage")
        return torch.cat(list(shares), one.shared)


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
) -> Message:
    """The message that carries these wires of a task, whose own number format is `dtype`.

    With sequence parallelism each rank sends its share of them to the rank that has the same; where the other stage's
    tensor group has another size, the `whole` of them. `fixed_for` is the micro-batch size of wires without a named
    one: their first dimension of that size; `own_sizes` are those that the micro-batch has instead of the task's.
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
        contents.append(Content(wire.name, shape, dtype if wire.dtype is None else wire.dtype, wire.gradient, shared))
    return Message(contents, device, tensor)
