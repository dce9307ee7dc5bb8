"""A trace of one iteration (profile.trace_iteration): torch's own, or what Nsight Systems captures of it.

torch's has operators and kernels, for Perfetto or chrome://tracing.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import ContextManager, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place


def traced(plan: Plan, place: Place, iteration: int) -> ContextManager[None]:
    """Around an iteration: traces the one that the plan names, on the first rank of each stage.

    Under Nsight Systems, which a GPU can report to while torch does not, the first rank of each node marks it instead:
    the profiler captures all ranks of the node from its first mark to the next.
    """
    if iteration != plan.trace_iteration:
        return nullcontext()
    if plan.nsys and plan.device == "cuda":
        return _captured() if place.local_rank == 0 else nullcontext()
    return nullcontext() if place.dp or place.tp else _traced(plan, place, iteration)


@contextmanager
def _captured() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextmanager
def _traced(plan: Plan, place: Place, iteration: int) -> Iterator[None]:
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (plan.device == "cuda")
    with profile(activities=kinds) as found:
        yield
        if plan.device == "cuda":
            torch.cuda.synchronize()  # what the host has begun belongs to the iteration
    path = plan.files.rank_trace(place.rank, iteration)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")  # the ending says that it is compressed
    found.export_chrome_trace(str(partial))
    partial.replace(path)
