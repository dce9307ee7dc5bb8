"""Runs of the engine with real processes, started as the node agent starts them but without a new Python."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch.optim needs it: once here, not in every process that is forked

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.launching.preflight import with_length
from launch.control.planning.plan import make_plan
from megatron_ext import worker
from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.rules.engine import MEGATRON_CORE
from megatron_ext.core import library
from megatron_ext.data.indexed_dataset import write_indexed

NOTHING = nullcontext()
VOCAB = 61
TINY = (
    "model.layers=3 model.hidden=32 model.heads=4 model.sequence_length=24 "
    f"model.vocab_size={VOCAB} model.vocab_multiple=1 train.iterations=4 train.log_interval=1 train.lr=1e-3 "
    "train.min_lr=1e-5 train.lr_warmup_iterations=1 train.comm_timeout_s=120 train.clip_grad=0.5 "
    "parallel.global_batch_size=8 parallel.partition=null"
).split()


@dataclass(frozen=True)
class EngineRun:
    """A run folder that holds only what the engine itself reads and writes."""

    run: RunDir
    plan: Plan

    def start(self, within: AbstractContextManager[object] = NOTHING, node: int = 0) -> int:
        """Forks the worker of a node, with its output in nodes/; returns its pid. It runs in the block `within`."""
        sys.stdout.flush()
        if self.plan.engine == MEGATRON_CORE:
            library.preload()
        elif self.plan.model.config is not None:
            import_module("transformers.modeling_utils")  # as torch._dynamo above: four CPU seconds a rank
        pid = os.fork()
        if pid == 0:
            for stream, path in ((1, self.run.node_out("local-0")), (2, self.run.node_err("local-0"))):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
            code = 1
            try:
                if self.plan.rehearsal is None:  # whose ranks sleep, and are to wake on time
                    on_one_core()
                with within:
                    code = worker.main([str(self.run.plan), str(node)])
            finally:
                os._exit(code)
        return pid

    def go(self, within: AbstractContextManager[object] = NOTHING) -> int:
        """Runs all nodes to the end; the first worker's exit code that is not 0, or 0."""
        pids = [self.start(within, node) for node in range(len(self.plan.nodes))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        return next(filter(None, codes), 0)

    def stderr(self) -> str:
        return self.run.node_err("local-0").read_text()

    def errors(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.run.errors.glob("*.json"))]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.metrics.read_text().splitlines()]

    def losses(self) -> np.ndarray:
        return np.array([line["loss"] for line in self.metrics()], dtype=float)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight of the newest checkpoint, by its file and name."""
        return {name[len("weights/") :]: t for name, t in self.state().items() if name.startswith("weights/")}

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the newest checkpoint, as `<kind>/<file>.<parameter>`."""
        folder = Checkpoint.at(self.run.path).folder
        return {
            name.replace("/", f"/{path.stem}."): tensor
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in safetensors.read(path).items()
        }

    def replan(self, *overrides: str, base: Sequence[str] = TINY) -> EngineRun:
        """The same run folder with another plan, as if a requeued run were given other nodes."""
        prefix = self.plan.data_prefix
        plan = make_plan(with_length(compose([*base, f"data.prefix={prefix}", *overrides])), self.plan.run)
        self.run.write_json(self.run.plan, plan.as_json())
        return EngineRun(self.run, Plan.read(self.run.plan))

    def on_nodes(self, nodes: Sequence[int], hierarchical_stages: Sequence[int]) -> EngineRun:
        """The same run on several nodes, by rank the node it lies on, and the stages that sum by node."""
        content = self.plan.as_json()
        held = [[rank for rank, node in enumerate(nodes) if node == number] for number in range(max(nodes) + 1)]
        content["nodes"] = [
            {**content["nodes"][0], "name": f"local-{number}", "ranks": ranks} for number, ranks in enumerate(held)
        ]
        for rank, node in zip(content["ranks"], nodes, strict=True):
            rank.update(node=node, local_rank=held[node].index(rank["rank"]))
        self.run.write_json(self.run.plan, {**content, "hierarchical_stages": [*hierarchical_stages]})
        return EngineRun(self.run, Plan.read(self.run.plan))


def on_one_core() -> None:
    """Keeps this process and those it forks on one core, where none interrupts another: half the CPU time.

    A thread of gloo asks again and again for what another one holds; where that one is not running, for its whole turn.
    """
    os.sched_setaffinity(0, [random.choice([*os.sched_getaffinity(0)])])
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def make_corpus(folder: Path) -> Path:
    """Indexed data of random walks, which a model can learn; some are shorter and some longer than a sequence."""
    prefix = folder / "text_document"
    numbers = np.random.default_rng(0)
    walks = (numbers.integers(1, 4, size=n).cumsum() % VOCAB for n in numbers.integers(3, 90, size=60))
    write_indexed(prefix, (walk.astype(np.uint16) for walk in walks), np.dtype(np.uint16))
    return prefix


def make_run(folder: Path, prefix: Path, *overrides: str, base: Sequence[str] = TINY) -> EngineRun:
    """A run folder for the tiny model, or for `base`, with some overrides."""
    run = RunDir(folder)
    for part in (run.nodes, run.events, run.errors, run.checkpoints):
        part.mkdir(parents=True)
    run.keep_secret()
    experiment = with_length(compose([*base, f"data.prefix={prefix}", *overrides]))
    run.write_json(run.plan, make_plan(experiment, f"test/{folder.name}").as_json())
    return EngineRun(run, Plan.read(run.plan))
