"""Sends what megatron.core asks of CUDA to the CPU, where a plan's device is one. Nothing of it is loaded on a GPU.

megatron.core names the device `cuda` in its sources. A mode of torch's functions puts the CPU in its place; streams,
events and the states of random number generators, which are not functions of torch, have stand-ins.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext, suppress
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_CUDA = "torch.cuda."


class _OnCpu(TorchFunctionMode):
    """Has every function of torch that is asked for CUDA give a tensor on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", _CUDA)  # by which an optimizer knows fp32 from 16 bits
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # which there is none of without a GPU
        if kwargs and "device" in kwargs and _cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if func is Tensor.to and len(args) > 1 and _cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _Stream:
    """A stream or an event of CUDA: on a CPU all that was begun has ended."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., "_Stream"]:
        return lambda *_, **__: self


_begun: List[_OnCpu] = []


def begin() -> None:
    """From now on, for the rest of this process."""
    if _begun:
        return
    from megatron.core import dist_checkpointing  # noqa: F401  (asks for CUDA itself, and has to find none)
    from megatron.core.tensor_parallel import random

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
        Tensor: {"record_stream": lambda *_: None},
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
    mode = _OnCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _begun.append(mode)


def begin_script(ranks: int) -> None:
    """The same for Megatron-LM's script, which looks for GPUs itself and finds `ranks` of them."""
    begin()
    import torch._dynamo

    torch._dynamo.config.disable = True  # it would compile for the GPUs that it finds
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
