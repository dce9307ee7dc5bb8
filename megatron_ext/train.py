"""The training loop of one rank."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from functools import partial
from typing import Callable, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.checkpoints import tensors
from megatron_ext.checkpoints.memory import MemorySaver
from megatron_ext.checkpoints.meta import require_order
from megatron_ext.checkpoints.pace import SavePace
from megatron_ext.checkpoints.saving import Saver
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.goal import BLEU, SPLIT, names_metric
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.rules.engine import MEGATRON_CORE, MEGATRON_LM
from megatron_ext.data.samples import BEGINNING, Position, Samples
from megatron_ext.engine.adaptation import FixedBatch, adaptation_of
from megatron_ext.engine.evaluation import Evaluation, Evaluator, samples_to_evaluate
from megatron_ext.engine.executor.pace import messages_timeout
from megatron_ext.engine.goal import GoalTracker, Spending
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.engine.islands import stages_of_islands
from megatron_ext.engine.log import TrainingLog, Unlogged
from megatron_ext.engine.rehearsal import rehearse
from megatron_ext.engine.streams.streaming import make_engine
from megatron_ext.families.tasks import task_of
from megatron_ext.inference.translations import Translations
from megatron_ext.parallel import meeting
from megatron_ext.parallel.comm import Barrier, annotate_errors, meet
from megatron_ext.parallel.groups import Groups, Tied, of_islands
from megatron_ext.parallel.interruption import ASKED, DISK, MEMORY, SPENT, Interrupted, Interruption
from megatron_ext.parallel.meeting import check_same_software
from megatron_ext.tasks.cut import cut, ties
from megatron_ext.tasks.task import Placement, Task
from megatron_ext.timeline import usage
from megatron_ext.timeline.cuda_recorder import CudaRecorder
from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.recorder import Recorder, begin_events, traced
from megatron_ext.timeline.usage import MemoryReport, SampleWaits


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
        check_same_software(store, place.rank, plan.world_size, device)
    timeout = messages_timeout(device, plan.train.comm_timeout_s)
    task = None if plan.engine == MEGATRON_LM else _task(plan.of_island(place), place, store)
    meet(store, place.rank, plan.world_size, device, timeout)
    recorder = _recorder(plan, place, buffers)
    try:
        if task is None:
            from megatron_ext.core.script import Script

            last, reached = Script(plan, place, recorder, store, unlogged).run(), False
        elif plan.rehearsal is not None:
            last, reached = rehearse(plan, place, _groups(plan, task, timeout), recorder), True
            Barrier(store, plan.world_size).wait("rehearsed", "waiting for the end of the run to be recorded")
        else:
            build = _engine(plan, task, place, recorder, timeout)
            last, reached = Training(plan, task, place, build, recorder, device, store, unlogged).run()
    except BaseException:
        recorder.abandon()
        raise
    if dist.is_initialized():  # Megatron-LM may have ended it
        dist.destroy_process_group()
    if last < plan.train.iterations and not reached:
        raise Interrupted(f"ended after iteration {last} of {plan.train.iterations}")


class Training:
    """The training of one rank. All ranks call its methods together."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        place: Place,
        build: Callable[[Samples, Position], AnyEngine],
        recorder: Recorder,
        device: torch.device,
        store: Store,
        unlogged: Optional[Unlogged],
    ) -> None:
        """Builds the engine by `build`, and loads what the run goes on from."""
        self._plan, self._place, self._recorder = plan, place, recorder
        self._store = store
        self._barrier = barrier = Barrier(store, plan.world_size)
        found = tensors.find(plan, place, store)
        self._start = start = BEGINNING if found is None else found.position
        # The order may follow from how many there are: where that was asked for, it is the same for every global batch.
        wanted = plan.train.samples or start.consumed(plan.train.iterations, plan.global_batch_size)
        samples = _samples(task, place, "train", wanted, barrier)
        held_out = _held_out(plan, task, place, barrier)
        self._engine = engine = build(samples, start)
        barrier.wait("model", "waiting for the models of all ranks")
        engine.pass_once()
        if found is not None:
            require_order(found, samples.order)
            tensors.load(found, plan, engine)
        self._evaluator = None if held_out is None else Evaluator(plan, place, engine, *held_out)
        wants_bleu = plan.model.traits.translates and names_metric(BLEU, plan.train.until, plan.train.best)
        self._translations = Translations(plan, place, engine, barrier) if wants_bleu else None
        # Another run's goal is not this one's.
        own = found.meta if found is not None and found.folder.parent == plan.files.checkpoints else None
        self._goal = GoalTracker(plan, None if own is None else own.evaluation, tensors.find_best(plan, place, store))
        barrier.wait("state", "waiting for the weights of all stages")
        sizes_of_replicas = None if plan.adapt is None else plan.adapt.micro_batch_sizes
        for size in {size for sizes in sizes_of_replicas or () for size in sizes}:
            task.wires_at(size)  # a module that takes none of that size says so now, and not amid the run
        adapted = None if found is None else found.meta.adaptation
        self._adaptation = adaptation_of(plan, place, engine, start.iteration, adapted, own is not None)
        pace, memory_pace = _paces(plan, place, start.iteration, engine.max_iteration_skew)
        self._saver = saver = Saver(plan, place, engine, samples.order, barrier, self._adaptation, pace)
        self._keeper: Optional[MemorySaver] = None
        if plan.train.save_memory is not None:
            kept = None if found is None or found.kept is None else found.kept.at
            self._keeper = MemorySaver(plan, place, engine, saver.meta, saver.parts, barrier, kept, memory_pace)
        meeting.align_clocks(recorder, store, "begin")
        if place.rank == 0 and not self._goal.reached:
            plan.files.goal.unlink(missing_ok=True)  # of an earlier start, which has spent too much
        logs = place.rank == plan.world_size - 1
        spending = Spending(plan) if logs and plan.train.max_cost is not None else None
        self._log: Optional[TrainingLog] = None
        if logs:
            self._log = TrainingLog(plan, plan.files.metrics, start.iteration, spending=spending, unlogged=unlogged)
            if found is not None:
                print(f"going on from {found.described}", flush=True)
        self._end = RunEnd(plan, place, engine, self._goal, self._adaptation, spending, device, pace, memory_pace)
        self._memory = MemoryReport(plan, place)
        self._waits = SampleWaits(plan.files.rank_waits(place.rank), start.iteration)

    def run(self) -> Tuple[int, bool]:
        """Trains. Returns the last iteration, and whether the run ends with it for good: else it was asked to end."""
        self._recorder.traffic.begin()
        iteration = self._start.iteration
        while not self._end.reached(iteration):
            iteration += 1
            self._iterate(iteration)
        self._end.interruption.finish()
        self._barrier.wait(
            "trained", "waiting for the last messages of the others"
        )  # before any ends its communicators
        meeting.align_clocks(self._recorder, self._store, "end")
        self._recorder.close()
        self._report(iteration)
        self._saver.finish()
        return iteration, self._end.record(iteration, self._barrier)

    def _iterate(self, iteration: int) -> None:
        """Trains one iteration, and does what is due after it."""
        plan, engine = self._plan, self._engine
        measures = self._adaptation.measures(iteration)
        with traced(plan, self._place, iteration), self._recorder.iterates():
            result = engine.step(iteration, halves=True) if measures else engine.step(iteration)
        last = iteration == plan.train.iterations or self._adaptation.over(iteration)
        evaluation, best = self._evaluated(iteration, last)
        if self._log is not None:
            self._log.add(iteration, result, engine.progress(iteration), evaluation, last)
        self._adaptation.after(iteration, result)
        self._recorder.flush()
        self._memory.note(iteration)
        self._waits.note(iteration, engine.waited_s)
        if iteration == min(self._start.iteration + plan.train.log_interval, plan.train.iterations):
            self._report(iteration)
        ends = self._end.agreed(iteration)
        metrics = None if evaluation is None else evaluation.metrics
        must = ends and not self._end.asked
        on_disk = self._saver.after(iteration, ends, metrics, best, self._end.saves(iteration, DISK), must)
        if self._keeper is not None:
            self._keeper.after(iteration, on_disk, self._end.saves(iteration, MEMORY))

    def _evaluated(self, iteration: int, last: bool) -> Tuple[Optional[Evaluation], bool]:
        """The evaluation after an iteration, if one is due, and whether it is the best so far."""
        interval = self._plan.train.eval_interval
        if self._evaluator is None or interval is None or (iteration % interval and not last):
            return None, False
        evaluation = self._evaluator.evaluate()
        if self._translations is not None:
            evaluation = self._translations.added(evaluation)
        return evaluation, self._goal.follow(evaluation.metrics)

    def _report(self, iteration: int) -> None:
        """Writes what memory the rank has taken, and what it has sent, up to the end of an iteration."""
        self._memory.report(iteration)
        samples = self._engine.consumed(iteration) - self._start.samples
        usage.report_traffic(self._plan, self._place, self._recorder.traffic, iteration, samples)


class RunEnd:
    """Decides when a run ends: after its last iteration, at its goal, without samples or money, or when asked to.

    All ranks decide the same.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        engine: AnyEngine,
        goal: GoalTracker,
        adaptation: FixedBatch,
        spending: Optional[Spending],
        device: torch.device,
        pace: Optional[SavePace] = None,
        memory_pace: Optional[SavePace] = None,
    ) -> None:
        """`spending` is on the rank that logs, of a run with a limit; `pace` and `memory_pace` on rank 0, of a run that
        saves by itself, on disk and in memory."""
        self._paces = {DISK: pace, MEMORY: memory_pace}
        self._save_after = {DISK: 0, MEMORY: 0}
        self._place, self._engine, self._goal, self._adaptation = place, engine, goal, adaptation
        self._spending = spending
        self.interruption = Interruption(device, engine.max_iteration_skew)
        self._iterations = self._until = plan.train.iterations
        self._asked = 0

    def reached(self, iteration: int) -> bool:
        """Whether this iteration is the last one."""
        return iteration >= self._until or self._goal.reached or self._adaptation.over(iteration)

    def agreed(self, iteration: int) -> bool:
        """Agrees after an iteration on whether it is the last one."""
        spent = False
        if self._spending is not None:
            self._spending.iterated()
            spent = self._spending.over
        save = sum(kind for kind, pace in self._paces.items() if pace is not None and pace.wants(iteration))
        asked = self.interruption.agreed(SPENT if spent else 0, save)
        if asked and not self._asked:
            self._asked, self._until = asked, self._engine.soonest_end(iteration)
        for kind in self._save_after:
            if self.interruption.wanted & kind:
                self._save_after[kind] = self._engine.soonest_end(iteration)
        return self.reached(iteration)

    def saves(self, iteration: int, kind: int) -> bool:
        """Whether all ranks agreed to save on `DISK` or in `MEMORY` after this iteration."""
        return iteration == self._save_after[kind]

    @property
    def asked(self) -> bool:
        """Whether somebody wants the run to end, which may go on later."""
        return self._asked == ASKED

    def record(self, iteration: int, barrier: Barrier) -> bool:
        """Writes down why the run ended for good, if it did before its last iteration. Returns whether it did."""
        over = self._adaptation.over(iteration)
        done = self._goal.reached or over or iteration == self._iterations
        if self._goal.reached and self._place.rank == 0:
            self._goal.record(iteration)
        elif over and self._place.rank == 0:
            self._adaptation.record(iteration)
        if self._asked == SPENT and not done and self._spending is not None:
            self._spending.record(iteration)
        if self._goal.reached or over or self._asked == SPENT:
            barrier.wait("recorded", "waiting for the end of the run to be recorded")
        return done or self._asked == SPENT


def _paces(plan: Plan, place: Place, iteration: int, later: int) -> Tuple[Optional[SavePace], Optional[SavePace]]:
    """What says on rank 0 when to save on disk, and when in memory, where the run decides that."""
    train, mtbf_s = plan.train, plan.train.mtbf_s
    if place.rank != 0 or mtbf_s is None:
        return None, None
    disk = SavePace(mtbf_s, iteration, later) if train.saves_by_itself else None
    return disk, SavePace(mtbf_s, iteration, later, key="save_memory") if train.keeps_by_itself else None


def _engine(
    plan: Plan, task: Task, place: Place, recorder: Recorder, timeout: timedelta
) -> Callable[[Samples, Position], AnyEngine]:
    """What makes the plan's engine, which goes on with the samples after a position. All ranks call it."""
    if plan.engine == MEGATRON_CORE:
        from megatron_ext.core.engine import CoreEngine  # megatron.core is not everywhere

        return partial(CoreEngine, plan, task, place, timeout, recorder)
    groups = _groups(plan, task, timeout)
    own = plan.of_island(place)
    return lambda samples, start: make_engine(own, task, place, groups, samples, recorder, start)


def _groups(plan: Plan, task: Task, timeout: timedelta) -> Groups:
    """Makes all groups of ranks."""

    def tied_in(partition: Sequence[int], pipeline: int) -> List[Tied]:
        return [Tied(stages, task.shard(owner) is not None) for owner, stages in ties(task, partition, pipeline)]

    with annotate_errors("making the groups of ranks"):
        if plan.island_plans is not None:
            tied_by_island = [tied_in(one.partition, one.pipeline) for one in plan.island_plans]
            return of_islands(plan.layout, tied_by_island, stages_of_islands(plan, task).values(), timeout)
        tied = tied_in(plan.partition, plan.pipeline)
        return Groups.make(plan.layout, plan.chunks, tied, timeout, plan.sharded_optimizer, plan.by_node)


def _task(plan: Plan, place: Place, store: Store) -> Task:
    """What is wrong with a user's module is for rank 0 to say, before the ranks form groups.

    It also notes the blocks' names, where the launch could not look at the module: a container may have what it needs.
    """
    if not plan.model.traits.user_code:
        return task_of(plan)
    if place.rank == 0:
        task = task_of(plan)
        cut(task, plan.partition)
        if plan.blocks is None:
            names = [block.name for block in task.blocks if block.placement is Placement.COUNTED]
            write_atomic(plan.files.blocks, json.dumps({"blocks": names}), durable=False)
        store.set("module", "sound")
        return task
    with annotate_errors("waiting for rank 0 to look at the model"):
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


def _held_out(plan: Plan, task: Task, place: Place, barrier: Barrier) -> Optional[Tuple[Samples, int]]:
    """The samples to evaluate on, and how many; None where nothing is to be evaluated."""
    if plan.train.eval_interval is None:
        return None
    count = samples_to_evaluate(plan, task)
    return _samples(task, place, SPLIT, count, barrier), count


def _samples(task: Task, place: Place, split: str, count: int, barrier: Barrier) -> Samples:
    """Rank 0 builds the maps of samples if they are not there; the others read them afterwards."""
    own = task.samples(split, count) if place.rank == 0 else None
    barrier.wait(f"index maps of {split}", "waiting for the index maps")
    return own if own is not None else task.samples(split, count)
