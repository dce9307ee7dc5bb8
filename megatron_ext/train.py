"""The training loop of one rank."""

from __future__ import annotations

import json
import os
from typing import Mapping

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.checkpoints import tensors
from megatron_ext.checkpoints.saving import Saver
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.model import MODULE
from megatron_ext.contract.plan import Place, Plan
from megatron_ext.data.samples import BEGINNING, Position, Samples
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.log import TrainingLog
from megatron_ext.engine.pace import messages_timeout
from megatron_ext.engine.rehearsal import rehearse
from megatron_ext.parallel import clock
from megatron_ext.parallel.comm import Gate, meet, told
from megatron_ext.parallel.groups import Groups, Tied
from megatron_ext.parallel.interruption import Interrupted, Interruption
from megatron_ext.parallel.software import same_software
from megatron_ext.tasks.cut import cut, ties
from megatron_ext.tasks.families import task_of
from megatron_ext.tasks.task import Held, Task
from megatron_ext.timeline import memory
from megatron_ext.timeline.cuda_recorder import CudaRecorder
from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.recorder import Recorder, begin_events


def train(plan: Plan, place: Place, store: Store, buffers: Mapping[int, EventBuffer]) -> None:
    """Joins the other ranks at `store` and trains until the last iteration.

    `buffers` take the events, by rank; a rank without one records none.

    Raises:
        Interrupted: all ranks were asked to end, and have saved.
    """
    torch.set_num_threads(1)
    device = device_of(plan, place)
    if len(plan.nodes) > 1:  # those of one node are forked from one process
        same_software(store, place.rank, plan.world_size, device)
    timeout = messages_timeout(device, plan.train.comm_timeout_s)
    task = _task(plan, place, store)
    meet(store, place.rank, plan.world_size, device, timeout)
    with told("making the groups of ranks"):
        tied = [
            Tied(stages, task.shard(owner) is not None) for owner, stages in ties(task, plan.partition, plan.pipeline)
        ]
        groups = Groups.make(plan.layout, plan.chunks, tied, timeout)
    recorder = _recorder(plan, place, buffers)
    try:
        if plan.rehearsal is not None:
            rehearse(plan, place, groups, recorder)
            last = plan.train.iterations
        else:
            last = _train(plan, task, place, groups, recorder, device, store)
    except BaseException:
        recorder.abandon()
        raise
    dist.destroy_process_group()
    if last < plan.train.iterations:
        raise Interrupted(f"saved after iteration {last} of {plan.train.iterations}")


def _train(
    plan: Plan, task: Task, place: Place, groups: Groups, recorder: Recorder, device: torch.device, store: Store
) -> int:
    """Returns the last iteration that was trained: of all, or after which all ranks were asked to end."""
    gate = Gate(store, plan.world_size)
    found = tensors.find(plan, place, store)
    start = BEGINNING if found is None else found.position
    samples = _samples(plan, task, place, start, gate)
    engine = Engine(plan, task, place, groups, samples, recorder, start)
    gate.wait("model", "waiting for the models of all ranks")
    engine.pass_once()
    if found is not None:
        tensors.check_order(found, samples.order)
        tensors.load(found, plan, engine)
    gate.wait("state", "waiting for the weights of all stages")
    saver = Saver(plan, place, engine, start, samples.order, gate)
    clock.align(recorder, store, "begin")
    is_last = place.rank == plan.world_size - 1
    log = TrainingLog(plan, plan.files.metrics, start) if is_last else None
    if found is not None and is_last:
        print(f"going on from {found.folder}", flush=True)
    interruption = Interruption(device)
    iteration = start.iteration
    ending = False
    while iteration < plan.train.iterations and not ending:
        iteration += 1
        result = engine.step(iteration)
        if log is not None:
            log.add(iteration, result, engine.optimizer.updates)
        recorder.flush()
        if iteration == min(start.iteration + plan.train.log_interval, plan.train.iterations):
            memory.report(plan, place, iteration)
        ending = interruption.agreed()
        saver.after(iteration, ending)
    interruption.finish()
    gate.wait("trained", "waiting for the last messages of the others")  # before any rank ends its communicators
    clock.align(recorder, store, "end")
    recorder.close()
    memory.report(plan, place, iteration)
    saver.finish()
    return iteration


def _task(plan: Plan, place: Place, store: Store) -> Task:
    """What is wrong with a user's module is for rank 0 to say, before the ranks form groups.

    It also notes the blocks' names, where the launch could not look at the module: a container may have what it needs.
    """
    if plan.model.family != MODULE:
        return task_of(plan)
    if place.rank == 0:
        task = task_of(plan)
        cut(task, plan.partition)
        if plan.blocks is None:
            names = [block.name for block in task.blocks if block.held is Held.COUNTED]
            write_atomic(plan.files.blocks, json.dumps({"blocks": names}), durable=False)
        store.set("module", "sound")
        return task
    with told("waiting for rank 0 to look at the model"):
        store.wait(["module"])
    return task_of(plan)


def device_of(plan: Plan, place: Place) -> torch.device:
    """The device of a rank, made the current one."""
    if plan.device == "cpu":
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if place.local_rank >= seen:
        node = plan.nodes[place.node]
        raise EngineError(
            f"node {node.name} ({node.gpu}): {len(node.ranks)} ranks want a GPU each, but torch {torch.__version__} "
            f"sees {seen} there (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    if plan.pipeline > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise EngineError(
            f"CUDA_LAUNCH_BLOCKING={os.environ['CUDA_LAUNCH_BLOCKING']} with parallel.pipeline={plan.pipeline}: every "
            "send makes the host wait until it is received, and stages would wait for each other for ever; unset it"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _recorder(plan: Plan, place: Place, buffers: Mapping[int, EventBuffer]) -> Recorder:
    buffer = buffers.get(place.rank)
    if buffer is None:
        return Recorder(None)
    begin_events(plan.files.rank_events(place.rank), plan, place)
    return CudaRecorder(buffer, plan.nsys) if plan.device == "cuda" else Recorder(buffer)


def _samples(plan: Plan, task: Task, place: Place, start: Position, gate: Gate) -> Samples:
    """Rank 0 builds the maps of samples if they are not there; the others read them afterwards."""
    count = start.consumed(plan.train.iterations, plan.global_batch_size)
    own = task.samples("train", count) if place.rank == 0 else None
    gate.wait("index maps", "waiting for the index maps")
    return own if own is not None else task.samples("train", count)
