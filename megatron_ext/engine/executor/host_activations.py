"""Activations that lie in the host's memory from a layer's forward to its backward pass."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import chain
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_ext.contract import parallel_config
from megatron_ext.parallel.comm import mark

SLAB = 2**26
"""Bytes of the host's memory that are pinned together: torch rounds each such piece up to a power of 2."""
MOST_OF_VIEW = 4
"""How many times as large as a view, at most, the memory may be that is kept for it, all of it."""


class _Buffer:
    """Bytes of the host's memory; nobody's again, and so another's, when nothing refers to it any more."""

    def __init__(self, memory: Tensor, free: List[Tuple[Tensor, Optional[torch.cuda.Event]]]) -> None:
        self.memory, self._free = memory, free
        self.read: Optional[torch.cuda.Event] = None
        """When a GPU has read it."""

    def __del__(self) -> None:
        self._free.append((self.memory, self.read))


class _Layer:
    """What the backward pass of one layer of a micro-batch needs."""

    def __init__(self, before: Optional[_Layer]) -> None:
        self.before = before
        """The layer whose backward pass comes after this one's."""
        self.here: List[Tensor] = []
        """The bytes that its tensors are views of, on the device; empty while they are on the host alone."""
        self.numbers: Dict[int, int] = {}
        """Their places, by where they lie: several tensors may be views of the same."""
        self.buffers: List[_Buffer] = []
        self.gone: Optional[torch.cuda.Event] = None
        """When they have been copied to the host, until the device's own stream has waited for it."""
        self.arrived: Optional[torch.cuda.Event] = None
        """The same of the way back."""


class _Kept(NamedTuple):
    """What autograd has in the place of a tensor."""

    layer: _Layer
    number: int
    dtype: torch.dtype
    shape: torch.Size
    strides: Sequence[int]
    offset: Any

    def tensor(self) -> Tensor:
        return self.layer.here[self.number].view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class HostActivations:
    """Keeps large tensors that layers save for their backward passes in the host's memory.

    On a GPU one stream takes them there and another one brings them back, while a neighbouring layer computes: two
    layers of activations at most are on the device. The memory is pinned, and the host never waits. Weights and buffers
    of the layers stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._out: Optional[torch.cuda.Stream] = None
        self._in: Optional[torch.cuda.Stream] = None
        if device.type == "cuda":
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._free: Dict[int, List[Tuple[Tensor, Optional[torch.cuda.Event]]]] = defaultdict(list)
        """Buffers by their size, each with the event after which it may be written."""
        self._newest: Optional[_Layer] = None
        """The last layer that has computed, whose tensors are still on the device."""
        self._returning: Optional[_Layer] = None
        """The one that was asked for last in a backward pass."""
        self._last_of: Dict[Any, _Layer] = {}
        """The last layer of a micro-batch in a chunk."""

    def keep(self, modules: Sequence[nn.Module]) -> None:
        """Does so for these layers of a chunk, which compute one after another."""
        for number, module in enumerate(modules):
            module.forward = partial(self._forward, module, module.forward, number == 0)

    def passed(self, key: Any) -> None:
        """Is told that the forward pass of a micro-batch through a chunk has ended."""
        if self._newest is not None:
            self._last_of[key] = self._newest

    def ahead(self, key: Any) -> None:
        """Brings back what the backward pass of a micro-batch needs first, in the place of all else."""
        layer = self._last_of.pop(key, None)
        if layer is not None and not layer.here:
            self.end()
            self._bring(layer)

    def end(self) -> None:
        """Leaves nothing on the device."""
        held, self._newest, self._returning = (self._newest, self._returning), None, None
        for layer in held:
            self._drop(layer)

    def _forward(self, module: nn.Module, forward: Callable[..., Any], first: bool, *taken: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*taken)
        returned, self._returning = self._returning, None
        self._drop(returned)
        layer = _Layer(None if first else self._newest)
        held = chain(module.parameters(), module.buffers())
        own = {tensor.untyped_storage().data_ptr() for tensor in held}
        with saved_tensors_hooks(partial(self._pack, layer, own), self._unpack):
            given = forward(*taken)
        self._take(layer)
        before, self._newest = self._newest, layer
        self._drop(before)
        return given

    def _pack(self, layer: _Layer, own: Set[int], tensor: Tensor) -> Union[Tensor, _Kept]:
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        if tensor.device.type != self._device.type or address in own:
            return tensor
        if size < parallel_config.LEAST_OFFLOADED or size > MOST_OF_VIEW * tensor.nbytes:
            return tensor
        if address not in layer.numbers:
            layer.numbers[address] = len(layer.here)
            whole = tensor.detach().as_strided((size // tensor.element_size(),), (1,), 0)
            layer.here.append(whole.view(torch.uint8))
        number = layer.numbers[address]
        return _Kept(layer, number, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _take(self, layer: _Layer) -> None:
        """Copies what a layer keeps to the host."""
        layer.buffers = [self._buffer(len(one)) for one in layer.here]
        if self._out is None:
            for here, buffer in zip(layer.here, layer.buffers):
                buffer.memory.copy_(here)
            return
        self._out.wait_event(mark())
        with torch.cuda.stream(self._out):
            for here, buffer in zip(layer.here, layer.buffers):
                if buffer.read is not None:
                    self._out.wait_event(buffer.read)
                buffer.memory.copy_(here, non_blocking=True)
            layer.gone = mark()
            for buffer in layer.buffers:
                buffer.read = layer.gone

    def _bring(self, layer: _Layer) -> None:
        """Copies it back to the device."""
        layer.here = [torch.empty_like(buffer.memory, device=self._device) for buffer in layer.buffers]
        if self._in is None:
            for here, buffer in zip(layer.here, layer.buffers):
                here.copy_(buffer.memory)
            return
        self._in.wait_event(mark())
        with torch.cuda.stream(self._in):
            for here, buffer in zip(layer.here, layer.buffers):
                here.copy_(buffer.memory, non_blocking=True)
            layer.arrived = mark()
            for buffer in layer.buffers:
                buffer.read = layer.arrived

    def _unpack(self, kept: Union[Tensor, _Kept]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        layer = kept.layer
        if layer is not self._returning:
            before, self._returning = self._returning, layer
            if before is self._newest:
                self._newest = None
            self._drop(before)
            if not layer.here:
                self._bring(layer)
            if layer.arrived is not None:
                torch.cuda.current_stream().wait_event(layer.arrived)
                layer.arrived = None
            if layer.before is not None and not layer.before.here:
                self._bring(layer.before)
        return kept.tensor()

    def _drop(self, layer: Optional[_Layer]) -> None:
        """Gives up what is on the device, after what copies it."""
        if layer is None or not layer.here or layer is self._newest or layer is self._returning:
            return
        for event in (layer.gone, layer.arrived):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        layer.gone = layer.arrived = None
        layer.here = []

    def _buffer(self, size: int) -> _Buffer:
        free = self._free[size]
        if not free:
            count = max(1, SLAB // size)
            slab = torch.empty(count * size, dtype=torch.uint8)
            slab = slab if self._out is None else slab.pin_memory()
            free.extend((memory, None) for memory in torch.split(slab, size))
        memory, read = free.pop()
        buffer = _Buffer(memory, free)
        buffer.read = read
        return buffer
