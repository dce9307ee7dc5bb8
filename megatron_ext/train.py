"""The training loop of one rank."""

from __future__ import annotations

import json
import os
from typing import Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.checkpoints import tensors
from megatron_ext.checkpoints.saving import Saver
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.goal import BLEU, SPLIT, names_metric
from megatron_ext.contract.models.model import MODULE, TRANSLATION
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.data.samples import BEGINNING, Samples
from megatron_ext.engine.adaptation import Adaptation
from megatron_ext.engine.evaluation import Evaluator, samples_to_evaluate
from megatron_ext.engine.executor.pace import messages_timeout
from megatron_ext.engine.goal import GoalTracker, Spending
from megatron_ext.engine.log import TrainingLog, Unlogged
from megatron_ext.engine.rehearsal import rehearse
from megatron_ext.engine.streams.streaming import engine_of
from megatron_ext.inference.translations import Translations
from megatron_ext.parallel import clock
from megatron_ext.parallel.comm import Gate, meet, told
from megatron_ext.parallel.groups import Groups, Tied
from megatron_ext.parallel.interruption import SPENT, Interrupted, Interruption
from megatron_ext.parallel.software import same_software
from megatron_ext.tasks.cut import cut, ties
from megatron_ext.tasks.families import task_of
from megatron_ext.tasks.task import Held, Task
from megatron_ext.timeline import traffic
from megatron_ext.timeline.cuda_recorder import CudaRecorder
from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.memory import MemoryReport
from megatron_ext.timeline.recorder import Recorder, begin_events
from megatron_ext.timeline.trace import traced


def train(
    plan: Plan, place: Place, store: Store, buffers: Mapping[int, EventBuffer], unlogged: Optional[Unlogged] = None
) -> None:
    """Joins the other ranks at `store` and trains until the last iteration.

    `buffers` take the events, by rank; a rank without one records none. `unlogged` takes iterations without a line in
    the log.

    Raises:
        Interrupted: all ranks were asked to end, and have saved.
    """
    torch.set_num_threads(1)
    device = device_of(plan, place)
    if len(plan.used) > 1:  # those of one node are forked from one process
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
            last, reached = rehearse(plan, place, groups, recorder), True
            Gate(store, plan.world_size).wait("rehearsed", "waiting for the end of the run to be recorded")
        else:
            last, reached = _train(plan, task, place, groups, recorder, device, store, unlogged)
    except BaseException:
        recorder.abandon()
        raise
    dist.destroy_process_group()
    if last < plan.train.iterations and not reached:
        raise Interrupted(f"saved after iteration {last} of {plan.train.iterations}")


def _train(
    plan: Plan,
    task: Task,
    place: Place,
    groups: Groups,
    recorder: Recorder,
    device: torch.device,
    store: Store,
    unlogged: Optional[Unlogged],
) -> Tuple[int, bool]:
    """Returns the last iteration that was trained: of all, or after which all ranks were asked to end; and whether the
    run is to go no further."""
    gate = Gate(store, plan.world_size)
    found = tensors.find(plan, place, store)
    start = BEGINNING if found is None else found.position
    # The order may follow from how many there are: where that was asked for, it is the same for every global batch.
    wanted = plan.train.samples or start.consumed(plan.train.iterations, plan.global_batch_size)
    samples = _samples(task, place, "train", wanted, gate)
    held_out = _held_out(plan, task, place, gate)
    engine = engine_of(plan, task, place, groups, samples, recorder, start)
    gate.wait("model", "waiting for the models of all ranks")
    engine.pass_once()
    if found is not None:
        tensors.check_order(found, samples.order)
        tensors.load(found, plan, engine)
    evaluator = None if held_out is None else Evaluator(plan, place, engine, *held_out)
    translations = Translations(plan, place, engine, gate) if _wants_bleu(plan) else None
    own = found is not None and found.folder.parent == plan.files.checkpoints  # another run's goal is not this one's
    course = GoalTracker(plan, found.meta.evaluation if found and own else None, tensors.find_best(plan, place, store))
    gate.wait("state", "waiting for the weights of all stages")
    adaptation = None
    if plan.adapt is not None:
        for size in {size for sizes in plan.adapt.micro_batch_sizes or () for size in sizes}:
            task.wires_at(size)  # a module that takes none of that size says so now, and not amid the run
        adaptation = Adaptation(plan, place, engine, start.iteration, found.meta.adaptation if found and own else None)
    saver = Saver(plan, place, engine, samples.order, gate, adaptation)
    clock.align(recorder, store, "begin")
    is_last = place.rank == plan.world_size - 1
    if place.rank == 0 and not course.reached:
        plan.files.goal.unlink(missing_ok=True)  # of an earlier start, which has spent too much
    spending = Spending(plan) if is_last and plan.train.max_cost is not None else None
    log = None
    if is_last:
        log = TrainingLog(plan, plan.files.metrics, start.iteration, spending=spending, unlogged=unlogged)
    if found is not None and is_last:
        print(f"going on from {found.folder}", flush=True)
    interruption = Interruption(device, engine.max_iteration_skew)
    recorder.traffic.begin()
    used = MemoryReport(plan, place)
    iteration, until = start.iteration, plan.train.iterations
    ending, why = course.reached or (adaptation is not None and adaptation.over(iteration)), 0
    while iteration < until and not ending:
        iteration += 1
        measures = adaptation is not None and adaptation.measures(iteration)
        with traced(plan, place, iteration), recorder.iterates():
            result = engine.step(iteration, halves=True) if measures else engine.step(iteration)
        over = adaptation is not None and adaptation.over(iteration)
        last = over or iteration == plan.train.iterations
        evaluation, best = None, False
        if evaluator is not None and _at(iteration, plan.train.eval_interval, last):
            evaluation = evaluator.evaluate()
            if translations is not None:
                evaluation = translations.added(evaluation)
            best = course.follow(evaluation.metrics)
        if log is not None:
            log.add(iteration, result, engine.progress(iteration), evaluation, last)
        if adaptation is not None:
            adaptation.after(iteration, result)
        recorder.flush()
        used.note(iteration)
        if iteration == min(start.iteration + plan.train.log_interval, plan.train.iterations):
            _report(plan, place, recorder, used, iteration, engine.consumed(iteration) - start.samples)
        if spending is not None:
            spending.note()
        asked = interruption.agreed(SPENT if spending is not None and spending.over else 0)
        if asked and not why:
            why, until = asked, engine.soonest_end(iteration)
        ending = (bool(why) and iteration == until) or course.reached or over
        saver.after(iteration, ending, None if evaluation is None else evaluation.metrics, best)
    interruption.finish()
    gate.wait("trained", "waiting for the last messages of the others")  # before any rank ends its communicators
    clock.align(recorder, store, "end")
    recorder.close()
    _report(plan, place, recorder, used, iteration, engine.consumed(iteration) - start.samples)
    saver.finish()
    over = adaptation is not None and adaptation.over(iteration)
    done = course.reached or over or iteration == plan.train.iterations
    if course.reached and place.rank == 0:
        course.record(iteration)
    elif over and adaptation is not None and place.rank == 0:
        adaptation.record(iteration)
    if why == SPENT and not done and spending is not None:
        spending.record(iteration)
    if course.reached or over or why == SPENT:
        gate.wait("recorded", "waiting for the end of the run to be recorded")
    return iteration, done or why == SPENT


def _report(plan: Plan, place: Place, recorder: Recorder, used: MemoryReport, iteration: int, samples: int) -> None:
    """Writes down what the rank has taken, and sent for so many samples, up to the end of an iteration."""
    used.report(iteration)
    traffic.report(plan, place, recorder.traffic, iteration, samples)


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
            f"node {node.name} ({node.gpu}): the plan needs {len(node.ranks)} GPU{'s' * (len(node.ranks) != 1)}, but "
            f"torch {torch.__version__} sees {seen} there "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
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


def _at(iteration: int, interval: Optional[int], last: bool) -> bool:
    return interval is not None and (iteration % interval == 0 or last)


def _wants_bleu(plan: Plan) -> bool:
    return plan.model.family in TRANSLATION and names_metric(BLEU, plan.train.until, plan.train.best)


def _held_out(plan: Plan, task: Task, place: Place, gate: Gate) -> Optional[Tuple[Samples, int]]:
    """The samples to evaluate on, and how many; None where nothing is to be evaluated."""
    if plan.train.eval_interval is None:
        return None
    count = samples_to_evaluate(plan, task)
    return _samples(task, place, SPLIT, count, gate), count


def _samples(task: Task, place: Place, split: str, count: int, gate: Gate) -> Samples:
    """Rank 0 builds the maps of samples if they are not there; the others read them afterwards."""
    own = task.samples(split, count) if place.rank == 0 else None
    gate.wait(f"index maps of {split}", "waiting for the index maps")
    return own if own is not None else task.samples(split, count)
