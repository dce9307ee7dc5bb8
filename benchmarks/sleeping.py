"""The engine with layers that sleep: ranks, schedule, messages, all-reduces and optimizer are real, time is given.

So a machine with few cores runs pipelines of many stages at the pace of GPUs that it does not have. The layers' weights
are there, but get no gradient.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from launch.control.planning.plan import make_plan
from megatron_ext import worker
from megatron_ext.contract.plan import Plan
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.engine import engine
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import Part
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Task, Tensors
from megatron_ext.timeline import progress
from megatron_ext.timeline.recorder import Recorder

PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Pass:
    """Seconds of a micro-batch in a virtual stage."""

    forward: float
    backward: float


class SleptGradients(WeightGradients):
    """Where a schedule splits the backward pass, half of a layer's sleep is put off, as its weight gradients are."""

    def __init__(self, *adds: Callable[[nn.Parameter, Tensor, Tensor], None]) -> None:
        super().__init__(*adds)
        self._owed: dict[Hashable, float] = {}

    def sleep(self, seconds: float) -> None:
        """A backward pass; in a block of `defer` its first half."""
        if self._key is None:
            time.sleep(seconds)
        else:
            self._owed[self._key] = seconds / 2
            time.sleep(seconds / 2)

    def run(self, key: Hashable) -> None:
        time.sleep(self._owed.pop(key))
        super().run(key)


class Sleep(torch.autograd.Function):
    """Passes on what it gets, later; `backward` sleeps through the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward: Callable[[], None]) -> Tensor:
        ctx.sleep = backward
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep()
        return gradients[0], None, None


Slowness = Callable[[int, int], float]
"""How many times as long a rank's passes take in an iteration."""
_iteration = 0
"""This rank's iteration, while `_child` notes it."""


Late = Callable[[str, int], float]
"""Seconds that an event of this name takes a rank longer."""


def in_time(_name: str, _rank: int) -> float:
    return 0.0


def as_given(_rank: int, _iteration: int) -> float:
    return 1.0


def sleeping_stage(times: Sequence[Pass], slowness: Slowness = as_given) -> type[Stage]:
    """A class of stages whose layers take these times; by virtual stage."""

    class SleepingStage(Stage):
        def __init__(
            self, task: Task, part: Part, tensor: TensorGroup, owned: dict[str, nn.Parameter] | None = None
        ) -> None:
            super().__init__(task, part, tensor, owned)
            self._times = times[part.number]
            self._later: SleptGradients | None = None

        def defer_weight_grads(
            self,
            later: WeightGradients,
            shared: Sequence[nn.Parameter] = (),
            where: Callable[[nn.Parameter], bool] = lambda _: True,
        ) -> None:
            assert isinstance(later, SleptGradients)
            super().defer_weight_grads(later, shared, where)
            self._later = later

        def forward(self, entered: Tensors) -> Tensors:
            (x,) = entered.values()
            awake = {block.name: module for block, module in zip(self.part.blocks, self.blocks, strict=True)}
            x = awake["embedding"](x) if "embedding" in awake else x
            sleep = time.sleep if self._later is None else self._later.sleep
            factor = slowness(dist.get_rank(), _iteration)
            backward = partial(sleep, factor * self._times.backward)
            x = Sleep.apply(x, factor * self._times.forward, backward)  # type: ignore[no-untyped-call]
            (left,) = self.part.leaves
            return {left: awake["head"](x) if "head" in awake else x}

    return SleepingStage


def run(
    folder: Path,
    experiment: Experiment,
    times: Sequence[Pass] | None,
    slowness: Slowness = as_given,
    late: Late = in_time,
) -> RunDir:
    """Trains on random tokens, on this machine; with `times` layers sleep instead of computing.

    Raises:
        SystemExit: it failed.
    """
    found = RunDir(folder / "run")
    for part in (found.nodes, found.events, found.errors, found.checkpoints):
        part.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, experiment.model.vocab_size, (64, 2048)).astype(np.uint16)
    write_indexed(folder / "data", tokens, np.dtype(np.uint16))
    plan = _on_one_node(make_plan(experiment, "benchmark/accuracy")).as_json()
    found.write_json(found.plan, plan | {"data_prefix": str(folder / "data")})
    pid = os.fork()
    if pid == 0:
        _child(found, times, slowness, late)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise SystemExit(f"{folder}: the run failed:\n{found.node_err('local-0').read_text()[-2000:]}")
    return found


def _on_one_node(plan: Plan) -> Plan:
    """All ranks on this machine, whatever nodes they stand for."""
    here = replace(plan.nodes[0], ranks=[place.rank for place in plan.ranks])
    ranks = [replace(place, node=0, local_rank=place.rank) for place in plan.ranks]
    return replace(plan, nodes=[here], ranks=ranks)


def _child(found: RunDir, times: Sequence[Pass] | None, slowness: Slowness, late: Late) -> None:
    """The worker of the only node, in the process that was forked for it; does not return."""
    for stream, path in ((1, found.node_out("local-0")), (2, found.node_err("local-0"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # sleeps end when they should, and not 50 us later
    if times is not None:
        engine.Stage = sleeping_stage(times, slowness)  # type: ignore[attr-defined]
        engine.iterates = _note  # type: ignore[attr-defined]
        engine.WeightGradients = SleptGradients  # type: ignore[attr-defined, assignment]
    if late is not in_time:
        Recorder.span = _late_span(late)  # type: ignore[method-assign]
    code = 1
    try:
        code = worker.main([str(found.plan), "0"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _late_span(late: Late) -> Callable[..., AbstractContextManager[None]]:
    span = Recorder.span

    @contextmanager
    def later(self: Recorder, name: str, *place: int, **more: int) -> Iterator[None]:
        with span(self, name, *place, **more):
            yield
            time.sleep(late(name, dist.get_rank()))

    return later


def _note(iteration: int) -> None:
    global _iteration
    _iteration = iteration
    progress.iterates(iteration)
