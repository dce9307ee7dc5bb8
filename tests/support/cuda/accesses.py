"""What a GPU's kernels read and write, as marks in the log: a line for each tensor of each operator of torch's.

NCCL's calls have their buffers in the log already, and so are left out here.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MACHINE = ctypes.CDLL(None)
TOUCHES_NOTHING = re.compile(r"(new_)?empty\w*|record_stream|is_pinned|_unsafe_view|resize_")
TAKES_A_SHAPE = re.compile(r"new_\w+|\w+_like")
WRITES_ONLY = re.compile(r"copy_|zero_|fill_|_foreach_(copy|zero)_")


class Accesses(TorchDispatchMode):
    """While it is entered, by one thread and the backward passes that it begins."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "c10d":
            return function(*args, **kwargs)
        name, inputs, outputs = _accessed(function)
        for place, (key, kinds) in enumerate(inputs):
            value = args[place] if place < len(args) else kwargs.get(key)
            for kind in kinds:
                _log(kind, name, value)
        result = function(*args, **kwargs)
        for value, written in zip(result if isinstance(result, (tuple, list)) else (result,), outputs, strict=False):
            if written:
                _log("w", name, value)
        return result


@cache
def _accessed(function: Any) -> tuple[str, list[tuple[str, str]], list[bool]]:
    """Of an operator its name; of each argument its name, and whether what lies there is read (`r`) or written (`w`);
    and of each result whether it is new, and so written."""
    schema = function._schema
    name = schema.name.partition("::")[2]
    if TOUCHES_NOTHING.fullmatch(name):
        return name, [(one.name, "") for one in schema.arguments], []
    inputs = []
    for number, one in enumerate(schema.arguments):
        kinds = "r" if one.alias_info is None else "rw" if one.alias_info.is_write else ""
        if one.is_out or (number == 0 and WRITES_ONLY.fullmatch(name)):
            kinds = "w"
        elif number == 0 and TAKES_A_SHAPE.fullmatch(name):
            kinds = ""
        inputs.append((one.name, kinds))
    return name, inputs, [one.alias_info is None for one in schema.returns]


def _log(kind: str, name: str, value: Any) -> None:
    for tensor in _tensors(value):
        if tensor.is_cuda and tensor.numel():
            steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            size = (sum(steps) + 1) * tensor.element_size()
            stream = torch.cuda.current_stream().cuda_stream
            at = f"{stream:#x}" if stream else "(nil)"
            MACHINE.standin_mark(f"{kind} {at} {tensor.data_ptr():#x} {size} {name}".encode())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


_entered = threading.local()


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has all that a function does on the GPU marked, in whatever thread it is called."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_entered, "here", False):
            return function(*args, **kwargs)
        _entered.here = True
        try:
            with Accesses():
                return function(*args, **kwargs)
        finally:
            _entered.here = False

    return call
