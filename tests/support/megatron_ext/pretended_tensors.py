"""Tensors that count as a GPU's on a machine that has none: real numbers in the CPU's memory, and a device beside them.

torch's own stand-in, FakeTensorMode, cannot serve: a torch built without CUDA has no autograd for its tensors, and they
have no numbers, so that nothing which depends on one could run. Here every storage is marked with the device that it
would lie on. As on a GPU, an operation refuses tensors of different devices, and NumPy one that is not the CPU's.
Beyond what a GPU does, it is refused to touch what a message under way still reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
_EQUAL = ("aten::cat", "aten::stack", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_")
"""Operations that take no number from the CPU either."""


class Message(NamedTuple):
    """Memory that a message under way still uses."""

    start: int
    stop: int
    written: bool
    """By the message; else it is only read."""
    what: str


@dataclass
class Gpus:
    """What one process knows of its pretended GPUs."""

    count: int
    current: int = 0
    under_way: list[Message] = field(default_factory=list)
    aside: list[Any] | None = None
    """What may be used on a stream of its own, the storages that a message has brought there; None on the usual one."""
    trusted: int = 0
    """Above 0 while the stand-in itself works with tensors."""

    def device(self, named: Any) -> torch.device:
        """The device that a name means, with its index."""
        device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if not 0 <= index < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    @contextmanager
    def trust(self) -> Iterator[None]:
        self.trusted += 1
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self.trusted -= 1


def device_of(tensor: Tensor) -> torch.device | None:
    """Where a tensor lies; None if no operation has said so yet."""
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), "pretended_device", None)


def put(tensor: Tensor, device: torch.device) -> None:
    with torch._C.DisableTorchFunction():
        tensor.untyped_storage().pretended_device = device  # type: ignore[attr-defined]


def extent(tensor: Tensor) -> tuple[int, int]:
    """First and last address, exclusive."""
    with torch._C.DisableTorchFunction():
        if tensor.numel() == 0:
            return 0, 0
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return start, start + (last + 1) * tensor.element_size()


def tensors_in(*values: Any) -> list[Tensor]:
    """Those in arguments and results, which torch nests in lists, tuples and dictionaries."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


class Operations(TorchDispatchMode):
    """Sees every operation that is computed, also those of backward passes."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        gpus = self._gpus
        if gpus.trusted or func.namespace == "c10d":
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given = tensors_in(args, kwargs)
            device = self._common_device(func, given)
            if gpus.under_way:
                self._refuse_under_way(func, args, kwargs)
            if gpus.aside is not None and any(tensor.untyped_storage() not in gpus.aside for tensor in given):
                raise RuntimeError(f"{func} on a stream that has not waited for what it uses")
            out = func(*args, **kwargs)
            for tensor in tensors_in(out) if device is not None else ():
                if device_of(tensor) is None:
                    put(tensor, device)
            return out

    def _common_device(self, func: Any, given: list[Tensor]) -> torch.device | None:
        """Of all tensors but numbers that the CPU holds, where they may be. None if nothing is known of any."""
        name = func._schema.name
        known = [(tensor, device) for tensor in given if (device := device_of(tensor)) is not None]
        counting = [
            device
            for index, (tensor, device) in enumerate(known)
            if tensor.dim() or device != CPU or name in _EQUAL or (index == 0 and name.endswith("_"))
        ] or [device for _, device in known]
        if len(set(counting)) > 1 and name != "aten::copy_":
            shapes = ", ".join(f"{list(tensor.shape)} on {device}" for tensor, device in known)
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} was given {shapes}")
        device = counting[0] if counting else None
        for tensor in given:
            if device is not None and device_of(tensor) is None:
                put(tensor, device)
        return device

    def _refuse_under_way(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = func._schema
        if any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns):
            return  # a view touches nothing
        if any(part in schema.name for part in ("empty", "::new_", "_like")):
            return  # nor does what only takes the shape
        named = [*zip(schema.arguments, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        for argument, value in named:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value):
                start, stop = extent(tensor)
                for message in self._gpus.under_way:
                    if start < message.stop and message.start < stop and (writes or message.written):
                        verb = "writes to" if writes else "reads"
                        raise RuntimeError(f"{func} {verb} what {message.what} still uses: nobody has waited for it")


def is_pinned(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), "pretended_pinned", False)


def grouping() -> Callable[..., Any]:
    """What torch's optimizers group their tensors by, which C++ tells them."""
    by_own = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def by_pretended(lists: Any, with_indices: bool = False) -> Any:
        found = by_own(lists, with_indices)
        return {(device_of(group[0][0][0]) or CPU, dtype): group for (_, dtype), group in found.items()}

    return by_pretended


def properties(gpus: Gpus) -> dict[str, property]:
    """Of tensors. No mode could answer them: none sees what Python does while torch is at work, as in hooks."""

    def device(tensor: Tensor) -> torch.device:
        return CPU if gpus.trusted else device_of(tensor) or CPU

    return {
        "device": property(device),
        "is_cuda": property(lambda tensor: device(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
    }


class Calls(TorchFunctionMode):
    """Sees what is called from Python: there a device can be named."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus
        tensor = torch.Tensor
        self._own: dict[Any, Callable[..., Any]] = {
            tensor.grad.__set__: self._set_grad,
            tensor.to: self._to,
            tensor.cpu: lambda x: self._to(x, "cpu"),
            tensor.cuda: lambda x, device="cuda", non_blocking=False: self._to(x, device, non_blocking=non_blocking),
            tensor.pin_memory: self._pin,
            tensor.is_pinned: is_pinned,
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
            tensor.tolist: self._tolist,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._gpus.trusted:
            return func(*args, **kwargs)
        if func in self._own:
            return self._own[func](*args, **kwargs)
        if kwargs.get("device") is None:
            out = func(*args, **kwargs)
            for tensor in tensors_in(out):
                if device_of(tensor) is None:
                    put(tensor, next((device_of(t) for t in tensors_in(args, kwargs) if device_of(t)), CPU))
            return out
        device = self._gpus.device(kwargs["device"])
        with self._gpus.trust():
            out = func(*args, **{**kwargs, "device": CPU})
        put(out, device)
        return out

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (device_of(args[0]), args[0].dtype, *args[1:])
        with self._gpus.trust():
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        source = device_of(tensor) or CPU
        target = source if device is None else self._gpus.device(device)
        if target == source:
            return tensor.to(dtype or tensor.dtype, copy=copy)
        if target == CPU and non_blocking:
            raise RuntimeError("a copy to the CPU that nobody waits for")
        with self._gpus.trust():
            moved = tensor.to(dtype or tensor.dtype, copy=True)
        put(moved, target)
        return moved

    def _pin(self, tensor: Tensor) -> Tensor:
        if device_of(tensor) not in (None, CPU):
            raise RuntimeError(f"cannot pin a tensor on {device_of(tensor)}: only dense CPU tensors can be pinned")
        with self._gpus.trust():
            pinned = tensor.clone()
            pinned.untyped_storage().pretended_pinned = True  # type: ignore[attr-defined]
        put(pinned, CPU)
        return pinned

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (device_of(tensor) or CPU) != CPU:
            raise TypeError(f"can't convert {device_of(tensor)} device type tensor to numpy")
        return tensor.numpy(*args, **kwargs)

    def _tolist(self, tensor: Tensor) -> Any:
        with self._gpus.trust():
            return tensor.tolist()

    @staticmethod
    def _set_grad(tensor: Tensor, grad: Tensor | None) -> None:
        if grad is not None and (device_of(grad) or CPU) != (device_of(tensor) or CPU):
            raise RuntimeError("assigned grad has data located on a different device")
        tensor.grad = grad
