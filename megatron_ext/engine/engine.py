"""The engine of one rank: built from a plan, it makes training steps."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from itertools import count as counting
from typing import Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.parallel_config import BUCKET_BYTES, GATHERED, SCATTERED
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.check import actions_of
from megatron_ext.contract.schedule.iteration import SampleDivision
from megatron_ext.contract.schedule.schedules import Action, Kind
from megatron_ext.data.ahead import helpers_of
from megatron_ext.data.samples import BEGINNING, Position, Samples
from megatron_ext.engine.batches import BatchAssignment, BatchLoader
from megatron_ext.engine.executor.executor import Executor, Factor
from megatron_ext.engine.executor.factory import ExecutorFactory
from megatron_ext.engine.executor.gathering import BlockWeights
from megatron_ext.engine.executor.host_activations import HostActivations
from megatron_ext.engine.executor.messages import Channels, channels, warm_up
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.gradients import Gradients, RunningStatistics, late_names
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.engine.islands import Islands, Parts
from megatron_ext.engine.optimizer.optimizer import DataGroup, Optimizer
from megatron_ext.engine.results import EXPERT_LOADS, StepResult, Stopwatch, as_numbers, from_numbers, not_finite
from megatron_ext.engine.workers import Worker, Workers, copy_stream
from megatron_ext.parallel.comm import all_reduce
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, evaluation_mode, threads_for
from megatron_ext.tasks.task import DTYPES, Micro, Task, Tensors
from megatron_ext.timeline.progress import Wait, iterates
from megatron_ext.timeline.recorder import NOTHING, Recorder

FORWARD = (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD)


class Engine(AnyEngine):
    """One rank's stage, optimizer and place in the pipeline."""

    _executes = Executor

    def __init__(
        self,
        plan: Plan,
        task: Task,
        place: Place,
        groups: Groups,
        samples: Samples,
        recorder: Recorder,
        start: Position = BEGINNING,
    ) -> None:
        """The iterations after `start` go on with its samples."""
        self._plan = plan
        self._place = place
        self._groups = groups
        self._samples = samples
        self._recorder = recorder
        self.device = torch.device(plan.device)
        self.task = task
        self.assignment = BatchAssignment(plan, place, start)
        self._islands = Islands(plan, place, groups, recorder) if plan.train.sync_every is not None else None
        peers = channels(plan.layout, place, plan.chunks, groups)
        # Before anything takes its time: ranks wait here for each other, and no longer than for any message.
        warm_up(groups, peers, place, plan.pipeline, self.device)
        tensor_size = plan.layout.tensors[place.stage]
        self.tensor = TensorGroup(tensor_size, place.tp, groups.tensor, plan.sequence_parallel, recorder)
        self._build_stages()
        self._build_optimizer()
        whole = plan.whole
        self._shared_parts = None if whole is None else Parts(whole, place, task, self.flat, self.places)
        self._defer_weight_grads()
        self._build_executor(peers)
        self._running = RunningStatistics(self._stages, groups.replicas if whole is None else None)
        if whole is not None and self._running.gathered() is not None:
            raise EngineError(
                "parallel.partition or parallel.tensor by island cannot be combined with a model that has running "
                "statistics; use the same of them for all islands"
            )
        self._has_metrics = any(
            getattr(getattr(task, name), "__func__", None) is not getattr(Task, name)
            for name in ("metrics", "expert_loads")
        )
        self._metrics: List[Tuple[int, Tensors]] = []
        """The metrics of the iteration's micro-batches, each with the number of its first sample."""

    def _build_stages(self) -> None:
        """Builds this rank's virtual stages with their first weights, on its device."""
        plan, task = self._plan, self.task
        self._virtual_stages = [chunk * plan.pipeline + self._place.stage for chunk in range(plan.chunks)]
        self._parts = cut(task, plan.partition)
        self._owned: Dict[str, nn.Parameter] = {}
        self._stages = [Stage(task, self._parts[v], self.tensor, self._owned) for v in self._virtual_stages]
        for stage in self._stages:
            stage.initialise(threads_for(plan))
            if plan.train.compile:
                stage.compile_blocks()
        self._named = [pair for stage in self._stages for pair in stage.parameters_by_name()]
        self.places = {name: at for stage in self._stages for name, at in stage.places.items()}
        """For each parameter's name: its block, and its name there. A copy of a tied one has the owner's."""
        self.blocks = [block.name for v in self._virtual_stages for block in self._parts[v].blocks]
        self.state = [one for stage in self._stages for one in stage.state]
        """What is not trained, but part of a checkpoint: by block and name there."""
        self._loader = BatchLoader(task, self._stages, self.device, helpers_of(plan, self._place))
        for stage in self._stages:
            stage.place(self.device, DTYPES[plan.train.precision])

    def _build_optimizer(self) -> None:
        """Lays weights and gradients out in flat memory, for the optimizer and the sums over replicas."""
        plan, place, groups = self._plan, self._place, self._groups
        replicas = plan.layout.replicas[place.stage]
        zero, offload = plan.zero_of(place.stage), plan.offload_of(place.stage)
        shares = plan.proportions(place.stage) if zero else [1]
        gathers = len(shares) > 1 and zero == GATHERED
        self.flat = FlatWeights(
            self._named,
            DTYPES[plan.train.precision],
            self.device,
            shares,
            rank=0 if len(shares) == 1 else place.dp if groups.by_node is None else groups.by_node.number,
            bucket_bytes=BUCKET_BYTES,
            late=late_names(plan, self.task, place, self._named, self._owned),
            parts=1 if groups.by_node is None else dist.get_world_size(groups.by_node.within),
            scatters=len(shares) > 1 and zero >= SCATTERED,
            blocks={name: block for name, (block, _) in self.places.items()} if gathers else None,
        )
        self._gradients = Gradients(
            plan, self.task, place, groups, self._stages, self._owned, self.flat, self._recorder
        )
        streams = plan.stream is not None  # and stages update by themselves
        self.optimizer = Optimizer(
            self.flat,
            plan.train,
            groups.tensor if streams else groups.model,
            DataGroup(replicas, place.dp, groups.data, groups.by_node),
            zero > 0,
            self._gradients.elsewhere,
            groups.tensor,
            {name for name, _ in self._named if self.task.shard(name) is not None},
            copies=1 if streams else plan.copies_in_model_group(place.stage),
            cuts=self._gradients.ends if plan.train.overlap_optimizer else (),
            offloads=offload.takes_optimizer,
        )

    def _defer_weight_grads(self) -> None:
        """Has weight gradients computed apart from those of inputs: all of them where the schedule splits backward
        passes, else those that are then added to flat memory without a copy."""
        plan = self._plan
        self._actions = [] if plan.stream is not None else actions_of(plan, self._place.stage, self._place.dp)
        self._later = WeightGradients(self.flat.add, self.flat.add_rows)
        splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in self._actions)
        if splits or not plan.train.compile:
            shared = [parameter for stage in self._stages for parameter in stage.shared]
            for stage in self._stages:
                stage.defer_weight_grads(self._later, shared, lambda parameter: splits or self.flat.adds(parameter))

    def _build_executor(self, peers: Channels) -> None:
        """Makes what runs this rank's passes, beside each other where the plan has streams."""
        plan = self._plan
        self._factory = factory = ExecutorFactory(
            plan, self.task, self._parts, self._virtual_stages, self.tensor, peers, self._loss, self._executes
        )
        self.stopwatch = None if plan.adapt is None else Stopwatch(self.device)
        self._executor = factory.executor(self._stages, plan.micro_batch_size, self._recorder, self._later)
        self._executor.stopwatch = self.stopwatch
        if plan.offload_of(self._place.stage).takes_activations:
            self._executor.host = HostActivations(self.device)
            for stage in self._stages:
                self._executor.host.keep(stage.counted)
        if self.flat.whole is not None:
            factory.weights = BlockWeights(self.flat, self._stages, self._groups.data, self._recorder)
            self._executor.weights = factory.weights
        first = Worker(self._executor, self.flat, self._stages[0])
        self._workers = Workers(first, self._scheduled, self.device)
        self._workers.resize(self.assignment.streams, self._make_replica_copy)
        self._executor_of = lru_cache(maxsize=2)(
            lambda size: factory.executor(self._stages, size, Recorder(None), self._later)
        )
        """For evaluations, by the size of their micro-batches."""

    def _make_replica_copy(self) -> Worker:
        """Makes a copy of the one stage that a plan with streams has; events are those of the first copy alone."""
        with copy_stream(self.device) as stream:
            dtype = DTYPES[self._plan.train.precision]
            stage = Stage(self.task, self._parts[0], TensorGroup(1, 0, None, False))
            stage.place(self.device, dtype)
            flat = FlatWeights(stage.parameters_by_name(), dtype, self.device, of=self.flat)
            later = WeightGradients(flat.add, flat.add_rows)
            stage.defer_weight_grads(later, stage.shared, flat.adds)
        executor = self._factory.executor([stage], self.assignment.size, Recorder(None), later)
        return Worker(executor, flat, stage, stream)

    @property
    def island(self) -> Tuple[int, int]:
        return super().island if self._islands is None else (self._islands.number, self._islands.count)

    @property
    def saves(self) -> bool:
        return super().saves if self._islands is None else self._islands.leads

    def divide(self, iteration: int, division: SampleDivision) -> None:
        super().divide(iteration, division)
        for worker, stages in [
            (self._workers.first, self._stages),
            *((one, [one.stage]) for one in self._workers.copies),
        ]:
            worker.executor.resize(self._factory.chunks_of(stages, self.assignment.size))
        self._workers.resize(self.assignment.streams, self._make_replica_copy)

    def step(self, iteration: int, halves: bool = False) -> StepResult:
        self._recorder.iteration = iteration
        iterates(iteration)
        watch = self.stopwatch
        if watch is not None:
            watch.begin()
        scale = self.optimizer.scaler.scale
        self._gradients.begin(len(self.assignment.taken), at_once=halves or bool(self.division.streams))
        with NOTHING if watch is None else watch.working():
            micros = self._batch(iteration)
        factor = self._factor(list(micros.values()), scale)
        self._metrics = []
        self._running.begin()
        with NOTHING if watch is None else watch.working():
            loss = self._in_halves(micros, factor) if halves else self._pass(self._actions, micros, factor)
        with Wait("reading the loss"):
            own = 0.0 if loss is None else loss.item()
        if not math.isfinite(own):
            raise not_finite(iteration, "loss", own / scale)
        lr = self._learning_rate(self.consumed(iteration - 1))
        early = self._plan.train.overlap_optimizer and not halves  # which are compared before the update
        self._gradients.reduce(partial(self.optimizer.step_early, self._recorder, lr=lr) if early else None)
        mean = math.nan
        metrics: Dict[str, float] = {}
        loads: List[List[float]] = []
        if loss is not None:
            found = [metrics for _, metrics in sorted(self._metrics, key=lambda one: one[0])]
            logged = loss.reshape(1)
            if found and found[0]:
                logged = torch.cat([logged, torch.stack(list(map(as_numbers, found))).sum(0) * factor])
            span: ContextManager[None] = NOTHING
            if self._islands is not None:
                logged, span = logged * self._islands.weight, self._recorder.span("islands-all-reduce")
            with span:
                all_reduce(logged, self._groups.replicas, "all-reduce of the loss")
                # Not after the optimizer: a GPU updates weights while the host goes on.
                with Wait("reading the mean loss"):
                    mean, *others = [value / scale for value in logged.tolist()]
            metrics, loads = from_numbers(others, found[0]) if found else ({}, [])
        compared = self._compared(list(micros.values()), scale) if halves else None
        norm = self.optimizer.step(self._recorder, lr)
        skipped = not math.isfinite(norm)
        if skipped and not self.optimizer.scaler.dynamic:
            raise not_finite(iteration, "gradient's norm", norm)
        self._running.finish(self.assignment.count, skipped)
        if self._islands is not None and self._islands.meet_after(iteration):
            self.optimizer.step_outer(self._recorder, self._islands.part, self._average)
        if watch is not None:
            watch.end()
        sizes = self.assignment.sizes(self._samples, iteration) if loss is not None else ()
        return StepResult(mean, norm, scale, skipped, metrics, sizes, loads, compared)

    def _average(self, flat: Tensor) -> None:
        """Sums a tensor that is laid out like the flat weights over the islands."""
        assert self._islands is not None
        if self._shared_parts is None:
            self._islands.sum(flat)
        else:
            self._islands.sum_parts(flat, self._shared_parts)
        self._gradients.copy_tied(flat)  # sums of unlike places need not be equal to the last bit

    def _pass(
        self, actions: Sequence[Action], micros: Mapping[int, Optional[Micro]], factor: Factor
    ) -> Optional[Tensor]:
        """Passes these micro-batches, several beside each other where this replica has copies."""
        if self._workers.copies:
            return self._workers.run(micros, factor)
        return self._executor.run(actions, micros, factor)

    def _in_halves(self, micros: Mapping[int, Optional[Micro]], factor: Factor) -> Optional[Tensor]:
        """The same with all micro-batches, but the even ones of the iteration first."""
        losses = []
        for half, held in enumerate(self.assignment.halves(list(micros.values()))):
            if held:
                losses.append(self._pass(self._scheduled(len(held)), dict(enumerate(held)), factor))
            if half == 0:
                self._gradients.keep_even()
        known = [loss for loss in losses if loss is not None]
        return torch.stack(known).sum() if known else None

    def _compared(self, micros: Sequence[Optional[Micro]], scale: float) -> Halves:
        """The gradients of both halves, without the loss scale; all ranks call it when the whole one is reduced."""
        even, whole, product = self._gradients.compared(scale)
        samples = self.assignment.samples_of_halves()
        part = samples[0] / sum(samples)
        weights = [[micro.weight for micro in half if micro is not None] for half in self.assignment.halves(micros)]
        known = [[weight.reshape(()).double() for weight in half if weight is not None] for half in weights]
        if any(known) and any(stage.last for stage in self._stages):
            zero = torch.zeros((), dtype=torch.float64, device=self.device)
            sums = torch.stack([sum(half, zero) for half in known])
            all_reduce(sums, self._groups.data, "all-reduce of the weights of micro-batches")
            part = float(sums[0] / sums.sum())
        return Halves(even, whole, product, part, *samples)

    def pass_once(self) -> None:
        """Runs each chunk once with gradients that are zero, where the first pass takes longer or more memory.

        Stages exchange nothing, but the ranks of a tensor group do: all call it when all have their weights.

        torch.compile works at the first call, for minutes: in the first iteration one stage after another would, while
        the others wait for its message. CUDA loads kernels at their first call, and waits there for all that the GPU
        has begun, a receive among it; and torch tunes those that it makes in memory of their own.
        """
        plan = self._plan
        if not (plan.train.compile or self.device.type == "cuda"):
            return
        self._gradients.begin_aside()
        of_replicas = None if plan.adapt is None else plan.adapt.micro_batch_sizes
        for size in [plan.micro_batch_size] if of_replicas is None else of_replicas[self._place.dp]:
            self._factory.pass_once(self._stages, size, with_gradients=True)
        if plan.train.eval_interval is not None:
            with self.evaluating():
                self._factory.pass_once(self._stages, plan.micro_batch_size, with_gradients=False)

    def forward(
        self, samples: Samples, first: int, size: int, count: int, take: Callable[[Tensors, Micro], None]
    ) -> None:
        """Forward passes of `count` micro-batches of `size` samples from number `first` on, by the plan's schedule.

        `count` is at most `max_forward`, those of an iteration: its last micro-batches are left out. A replica takes
        those that it takes in training, so that a schedule that runs to its end still does: whatever a forward action
        waits for is one, too. All ranks call it, within `evaluating`; on the last stage `take` is given what leaves it.
        """
        own = self.assignment.taken[self.assignment.taken < count]
        most = 0
        if self._executor.weights is not None:  # which all replicas gather for a pass of any of them
            place, data = self._place, self._groups.data
            of_each = [self._plan.taken_by(place.stage, dp) for dp in range(dist.get_world_size(data))]
            most = max(sum(m < count for m in taken) for taken in of_each)
        if not len(own) and not most:
            return
        micros: Dict[int, Optional[Micro]] = {}
        if len(own):
            numbers = first + own[:, None] * size + np.arange(size)
            coming = chain.from_iterable(numbers + after * count * size for after in counting(1))
            micros = self._loader.micros(samples, numbers, self.assignment.keys(len(own)), coming)
        actions = [
            action
            for action in self._actions
            if (action.kind in FORWARD and action.micro_batch in micros)
            or (action.kind is Kind.FORWARD and action.micro_batch < most)
        ]
        self._executor_of(size).run_forward(actions, micros, take)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, dropout, events or traffic, with the average of the weights where there is one; then
        training goes on as if nothing had been in between."""
        iteration, self._recorder.iteration = self._recorder.iteration, 0
        devices = [self._place.local_rank] if self.device.type == "cuda" else []
        try:
            uncounted, modes = self._recorder.traffic.paused(), evaluation_mode(self._stages)
            with modes, uncounted, torch.random.fork_rng(devices), torch.no_grad(), self.optimizer.averaged():
                yield
        finally:
            self._recorder.iteration = iteration

    def _loss(self, left: Tensors, micro: Micro) -> Tensor:
        if self._has_metrics:
            with torch.no_grad():
                found, loads = self.task.metrics(left, micro, self.tensor), self.task.expert_loads(left, micro)
                self._metrics.append((micro.first, found if loads is None else {**found, EXPERT_LOADS: loads}))
        return self.task.loss(left, micro, self.tensor)

    def _factor(self, micros: Sequence[Optional[Micro]], scale: float) -> Factor:
        """Returns the factor of the losses: `scale`, divided by the weight of the global batch, of which other replicas
        have a part, or of the island's part of it."""
        weights = [micro.weight for micro in micros if micro is not None and micro.weight is not None]
        if not weights or not any(stage.last for stage in self._stages):
            part = 1.0 if self._islands is None else self._islands.part
            return scale * self.assignment.size / (self.assignment.division.samples * part)
        total = torch.stack([weight.reshape(()).double() for weight in weights]).sum()
        all_reduce(total, self._groups.data, "all-reduce of the weights of micro-batches")
        return torch.where(total > 0, scale / total, 0.0).float()
