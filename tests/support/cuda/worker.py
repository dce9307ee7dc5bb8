"""What a node's agent starts, under the stand-in for CUDA: `python worker.py PLAN NODE [JOB]`.

Runs with the CUDA build of torch, and so has torch and numpy alone. JOB is `profile` or `doctor`; without one the ranks
train, and the log has a mark before and after each iteration and each pass of a micro-batch. With JOB `fused` they do
so, too, and torch.compile makes kernels with Triton, which takes longer. With JOB `watched` the log also has what each
kernel reads and writes, gradients are summed in several buckets, and an offloaded optimizer has several pieces. BESIDE
in the environment names a folder of more packages, such as transformers.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from megatron_ext import train, worker
from megatron_ext.contract import parallel_config
from megatron_ext.core.engine import CoreEngine
from megatron_ext.engine import engine
from megatron_ext.engine.executor.executor import Executor
from megatron_ext.engine.gradients import flat
from megatron_ext.engine.streams.streaming import StreamingEngine
from tests.support.cuda.accesses import watched

MACHINE = ctypes.CDLL(None)
sys.path += filter(None, [os.environ.get("BESIDE")])  # behind the CUDA build's own, of which torch is one


def marked(of: type) -> None:
    step = of.step  # type: ignore[attr-defined]

    def between_marks(self: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        MACHINE.standin_mark(f"peak {torch.cuda.max_memory_allocated()}".encode())
        MACHINE.standin_mark(f"begin {iteration}".encode())
        try:
            return step(self, iteration, *args, **kwargs)
        finally:
            MACHINE.standin_mark(f"peak {torch.cuda.max_memory_allocated()}".encode())
            MACHINE.standin_mark(f"end {iteration}".encode())

    of.step = between_marks  # type: ignore[attr-defined]


def marked_loading() -> None:
    """A mark with the peak of the pass that loads kernels."""
    pass_once = engine.Engine.pass_once

    def with_mark(self: Any) -> None:
        pass_once(self)
        MACHINE.standin_mark(f"peak {torch.cuda.max_memory_allocated()}".encode())

    engine.Engine.pass_once = with_mark


def marked_pass(name: str) -> None:
    """A mark before and after this pass of a micro-batch, `_forward` or `_backward`."""
    pass_ = getattr(Executor, name)

    def between_marks(self: Executor, *given: Any) -> None:
        number, _ = next(one for one in given if isinstance(one, tuple))
        MACHINE.standin_mark(f"micro {number}".encode())
        pass_(self, *given)
        MACHINE.standin_mark(b"rest")

    setattr(Executor, name, between_marks)


@cache
def marking(kind: str) -> Callable[..., Any]:
    """A backend of torch.compile's that makes the same graphs as others, at once, and a mark for each."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        MACHINE.standin_mark(f"graph {kind}".encode())
        return lookup_backend("aot_eager")(graph, inputs)

    return backend


def compiled(compile_: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """What is compiled of a module is named by its class."""
    return compile_(function, backend=marking(type(getattr(function, "__self__", function)).__name__))


def on_host(of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: of_tensor(tensor.cpu())


def finite(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """What no kernel computed is what memory held before, by chance not a number, which would end the run."""

    def known(value: Any) -> Any:
        if isinstance(value, list):
            return [known(one) for one in value]
        return 0.0 if isinstance(value, float) and not math.isfinite(value) else value

    return lambda tensor: known(read(tensor))


def main(plan: str, node: str, job: str | None = None) -> int:
    for each in (engine.Engine, StreamingEngine, CoreEngine):
        marked(each)
    marked_loading()
    for name in ("_forward", "_backward"):
        marked_pass(name)
    for name in ("item", "tolist"):
        setattr(torch.Tensor, name, finite(getattr(torch.Tensor, name)))
    torch.backends.cudnn.enabled = False  # the stand-in has none of it: torch's own kernels take its place
    if job == "watched":
        job = None
        train.Training.run = watched(train.Training.run)
        Executor.run = watched(Executor.run)
        engine.BUCKET_BYTES = parallel_config.PIECE = 4096  # so that there are several
    parallel_config.LEAST_OFFLOADED = 256  # so that what tiny layers keep is enough
    if job == "fused":
        job = None
    else:
        torch.compile = partial(compiled, torch.compile)
    # Whether a GPU has the product that adds to fp32 is found out by its result, and no product computes here.
    flat.fuses = lambda dtype, device: device.type == "cuda"
    if job == "doctor":  # it looks at what an all-reduce gave, and no kernel does
        for name in ("min", "max"):
            setattr(torch.Tensor, name, on_host(getattr(torch.Tensor, name)))
        return importlib.import_module("megatron_ext.doctor.__main__").main([plan, node])
    return worker.main([plan, node], importlib.import_module("megatron_ext.profile").measure if job else None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
