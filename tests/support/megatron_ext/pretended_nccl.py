"""torch.distributed with nccl on pretended GPUs: gloo carries the messages, and what NCCL refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.megatron_ext.pretended_tensors import CPU, Gpus, Message, device_of, extent

_FORMATS = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
}


class UnderWay:
    """A message that has begun: until `wait`, nothing may use its tensor."""

    def __init__(
        self, gpus: Gpus, work: Any, tensor: Tensor, message: Message, finish: Callable[[], object] = lambda: None
    ) -> None:
        self._gpus = gpus
        self._finish = finish
        self._work = work
        self._tensor = tensor
        self._message = message
        gpus.under_way.append(message)

    def wait(self) -> bool:
        with self._gpus.trust():
            done: bool = self._work.wait()
            self._finish()
            if self._gpus.aside is not None:
                self._gpus.aside.append(self._tensor.untyped_storage())
        if self._message in self._gpus.under_way:
            self._gpus.under_way.remove(self._message)
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class Nccl:
    """The doubles by their names in `torch.distributed`."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._real = {name: getattr(dist, name) for name in self._names()}

    @property
    def doubles(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in self._names()}

    @staticmethod
    def _names() -> tuple[str, ...]:
        return (
            *("init_process_group", "isend", "irecv", "send", "recv", "all_reduce", "broadcast", "reduce"),
            *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier", "all_gather_object"),
            "broadcast_object_list",
        )

    def init_process_group(self, backend: str, **kwargs: Any) -> None:
        assert backend == "nccl", f"ranks with a GPU meet by nccl, not {backend}"
        self._call("init_process_group", "gloo", **kwargs)

    def isend(self, tensor: Tensor, dst: int, group: Any = None) -> UnderWay:
        return self._begin("isend", tensor, False, dst, group)

    def irecv(self, tensor: Tensor, src: int, group: Any = None) -> UnderWay:
        return self._begin("irecv", tensor, True, src, group)

    def send(self, tensor: Tensor, dst: int, group: Any = None) -> None:
        self.isend(tensor, dst, group).wait()

    def recv(self, tensor: Tensor, src: int, group: Any = None) -> int:
        self.irecv(tensor, src, group).wait()
        return src

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        begun = self._begin("all_reduce", tensor, True, op, group, True)
        return begun if async_op else begun.wait() and None

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        begun = self._begin("broadcast", tensor, True, src, group, True)
        return begun if async_op else begun.wait() and None

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        begun = self._begin("reduce", tensor, True, dst, op, group, True)
        return begun if async_op else begun.wait() and None

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        for part in (output_tensor, input_tensor):
            self._fit("all_gather_into_tensor", part)
        with self._gpus.trust():
            ranks = dist.get_world_size(group)
            shares = [torch.empty_like(input_tensor) for _ in range(ranks)]
            work = dist.all_gather(shares, input_tensor.clone(), group, True)
        message = Message(*extent(output_tensor), True, "all_gather_into_tensor")

        def put() -> None:
            for own, share in zip(output_tensor.view(ranks, *input_tensor.shape), shares, strict=True):
                own.copy_(share)

        begun = UnderWay(self._gpus, work, output_tensor, message, put)
        return begun if async_op else begun.wait() and None

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        for part in (input, output):
            self._fit("all_to_all_single", part)
        with self._gpus.trust():
            got, given = torch.empty_like(output), input.clone()
        work = self._call("all_to_all_single", got, given, output_split_sizes, input_split_sizes, group, True)
        message = Message(*extent(output), True, "all_to_all_single")
        begun = UnderWay(self._gpus, work, output, message, lambda: output.copy_(got))
        return begun if async_op else begun.wait() and None

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        for part in (input, output):
            self._fit("reduce_scatter_tensor", part)
        with self._gpus.trust():
            total = input.clone().view(dist.get_world_size(group), *output.shape)
        own = dist.get_rank(group)
        work = self._call("all_reduce", total, dist.ReduceOp.SUM, group, True)
        message = Message(*extent(input), True, "reduce_scatter_tensor")
        begun = UnderWay(self._gpus, work, input, message, lambda: output.copy_(total[own]))
        return begun if async_op else begun.wait() and None

    def barrier(self, group: Any = None) -> None:
        self._call("barrier", group)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self._call("all_gather_object", object_list, obj, group)

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, group: Any = None) -> None:
        self._call("broadcast_object_list", object_list, src, group)

    def _begin(self, name: str, tensor: Tensor, written: bool, *args: Any) -> UnderWay:
        self._fit(name, tensor)
        work = self._call(name, tensor, *args)
        return UnderWay(self._gpus, work, tensor, Message(*extent(tensor), written, name))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._gpus.trust():
            return self._real[name](*args, **kwargs)

    def _fit(self, name: str, tensor: Tensor) -> None:
        device = device_of(tensor) or CPU
        if device != torch.device("cuda", self._gpus.current):
            raise RuntimeError(f"{name}: no backend for a tensor on {device}; NCCL needs one on this rank's GPU")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: Tensors must be contiguous")
        if tensor.dtype not in _FORMATS:
            raise TypeError(f"{name}: Unconvertible NCCL type {tensor.dtype}")
