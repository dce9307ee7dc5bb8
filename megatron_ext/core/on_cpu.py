"""Sends what megatron.core asks of CUDA to the CPU, where a plan's device is one. Nothing of it is loaded on a GPU.

megatron.core names the device `cuda` in its sources. What makes or moves a tensor puts the CPU in its place; streams,
events and the states of random number generators have stand-ins. A mode of all of torch's functions would do it with
fewer words, and take a fifth of a small model's time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")
_CUDA = "torch.cuda."
_MAKERS = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn", "randint"),
    *("randperm", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("asarray", "scalar_tensor", "empty_strided", "logspace", "tril_indices", "triu_indices"),
)
"""Functions of torch that are told a device."""
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
"""Those of a tensor."""


def _elsewhere(keywords: Dict[str, Any]) -> Dict[str, Any]:
    if _cuda(keywords.get("device")):
        keywords["device"] = _CPU
    if keywords.get("pin_memory"):
        keywords["pin_memory"] = False  # which there is none of without a GPU
    return keywords


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What makes a tensor, on the CPU where it is asked for CUDA."""

    @wraps(make)
    def made(*args: Any, **keywords: Any) -> Tensor:
        return make(*args, **_elsewhere(keywords))

    return made


def _moved(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(to)
    def moved(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return to(tensor, *(_CPU if _cuda(one) else one for one in args), **_elsewhere(keywords))

    return moved


def _named(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a type the name that it has on CUDA, by which an optimizer knows fp32 from 16 bits."""

    @wraps(type_of)
    def named(tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        found = type_of(tensor, *args, **keywords)
        return found.replace("torch.", _CUDA) if isinstance(found, str) else found

    return named


def _cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _Stream:
    """A stream or an event of CUDA: on a CPU all that was begun has ended."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., "_Stream"]:
        return lambda *_, **__: self


def as_it_is(function: Any = None, **_: Any) -> Any:
    """In place of torch.compile, as a function or with options as a decorator."""
    return as_it_is if function is None else function


@contextmanager
def uncompiled() -> Iterator[None]:
    """What is imported of megatron.core has no function for torch's compiler: it would compile for GPUs, and its import
    takes longer than all else that megatron.core needs."""
    compiles = torch.compile
    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiles


_begun: List[bool] = []


def begin() -> None:
    """From now on, for the rest of this process."""
    if _begun:
        return
    with uncompiled():
        from megatron.core import dist_checkpointing  # noqa: F401  (asks for CUDA itself, and has to find none)
        from megatron.core.tensor_parallel import random
    if "torch._dynamo" in sys.modules:  # megatron.core may have been imported before, for the compiler
        torch._dynamo.config.disable = True
    stream = _Stream()
    stand_ins: Dict[Any, Dict[str, Any]] = {
        torch.cuda: {
            "current_device": lambda: _CPU,
            "synchronize": lambda *_: None,
            "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream,
            "stream": lambda _: nullcontext(),
            "Stream": _Stream,
            "Event": _Stream,
            "empty_cache": lambda: None,
        },
        torch: {name: _on_cpu(getattr(torch, name)) for name in _MAKERS},
        Tensor: {
            **{name: _on_cpu(getattr(Tensor, name)) for name in _METHODS},
            "record_stream": lambda *_: None,
            "cuda": lambda tensor, *_, **__: tensor,
            "to": _moved(Tensor.to),
            "type": _named(Tensor.type),
        },
        random: {"_get_cuda_rng_state": lambda *_, **__: None, "_set_cuda_rng_state": lambda *_, **__: None},
        random.CudaRNGStatesTracker: {"fork": lambda *_, **__: nullcontext()},
    }
    stand_ins[dist] = {
        "all_to_all_single": _counted(dist.all_to_all_single),
        "all_gather": _padded(dist.all_gather),
        "reduce_scatter": _summed,
    }
    for owner, names in stand_ins.items():
        for name, stand_in in names.items():
            setattr(owner, name, stand_in)
    _begun.append(True)


def begin_script(ranks: int) -> None:
    """The same for Megatron-LM's script, which looks for GPUs itself and finds `ranks` of them."""
    begin()
    torch.compile = as_it_is  # type: ignore[assignment]  # it would compile for the GPUs that it finds
    found: Dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: ranks,
        "set_device": lambda _: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
        **{f"{most}memory_{kind}": lambda *_: 0 for most in ("", "max_") for kind in ("allocated", "reserved")},
    }
    for name, stand_in in found.items():
        setattr(torch.cuda, name, stand_in)
    with suppress(ImportError):  # of kernels that its options leave out; newer versions build none
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda _: None


def _counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """gloo wants counts as numbers where megatron.core gives it tensors of them."""

    def all_to_all(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Optional[Iterable[Any]] = None,
        input_split_sizes: Optional[Iterable[Any]] = None,
        *options: Any,
        **named: Any,
    ) -> Any:
        sizes = [
            None if one is None else [int(size) for size in one] for one in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, input, *sizes, *options, **named)

    return all_to_all


def _padded(gather: Callable[..., Any]) -> Callable[..., Any]:
    """gloo wants tensors of one size, where ranks with experts have different numbers of tokens."""

    def all_gather(tensors: List[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        most = max(len(one) for one in tensors) if tensor.dim() else 0
        if not tensor.dim() or all(len(one) == most for one in tensors):
            return gather(tensors, tensor, group, async_op)
        own = tensor.new_zeros(most, *tensor.shape[1:])
        own[: len(tensor)] = tensor
        whole = [torch.empty_like(own) for _ in tensors]
        gather(whole, own, group)
        for target, found in zip(tensors, whole):
            target.copy_(found[: len(target)])
        return None

    return all_gather


def _summed(output: Tensor, tensors: List[Tensor], group: Any = None, **_: object) -> None:
    """gloo has no sum of which each rank gets a part of its own size."""
    whole = torch.cat(tensors)
    dist.all_reduce(whole, group=group)
    begin = sum(len(one) for one in tensors[: dist.get_rank(group)])
    output.copy_(whole[begin : begin + len(output)])
