"""The training loop of one rank."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext import checkpoint, clock
from megatron_ext.comm import told
from megatron_ext.engine import Engine
from megatron_ext.gpt_data import GptSamples
from megatron_ext.grid import Grid, Groups
from megatron_ext.log import TrainingLog
from megatron_ext.plan import Place, Plan
from megatron_ext.timeline import Recorder


def train(plan: Plan, place: Place, store: Store) -> None:
    """Joins the other ranks at `store` and trains until the last iteration."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=plan.train.comm_timeout_s)
    with told("meeting the other ranks"):
        dist.init_process_group(
            "nccl" if plan.device == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=plan.world_size,
            timeout=timeout,
        )
        groups = Groups.make(Grid(plan.tensor, plan.data, plan.pipeline), plan.chunks, timeout)
    path = plan.folder / "events" / f"rank-{place.rank:05d}.bin"
    recorder = Recorder.open(path, plan, place) if plan.timeline else Recorder(None)
    samples = _samples(plan, place)
    engine = Engine(plan, place, groups, samples, recorder)
    clock.align(recorder, torch.device(plan.device))
    is_last = place.rank == plan.world_size - 1
    log = TrainingLog(plan, plan.folder / "metrics.jsonl") if is_last else None
    for iteration in range(1, plan.train.iterations + 1):
        result = engine.step(iteration)
        if log is not None:
            log.add(iteration, result, engine.optimizer.updates)
        if iteration % plan.train.log_interval == 0:
            recorder.flush()
    clock.align(recorder, torch.device(plan.device))
    recorder.close()
    if plan.train.checkpoint:
        final = checkpoint.save(plan.folder / "checkpoints", plan.train.iterations, plan, place, engine)
        if is_last:
            print(f"checkpoint saved: {final}", flush=True)
    dist.destroy_process_group()


def _samples(plan: Plan, place: Place) -> GptSamples:
    """Rank 0 builds the index maps if they are not there; the others read them afterwards."""

    def load() -> GptSamples:
        return GptSamples(
            plan.data_prefix,
            plan.data_split,
            "train",
            plan.train.iterations * plan.global_batch_size,
            plan.model.sequence_length,
            plan.train.seed,
            plan.model.vocab_size,
        )

    own = load() if place.rank == 0 else None
    with told("waiting for the index maps"):
        dist.barrier()
    return own if own is not None else load()
