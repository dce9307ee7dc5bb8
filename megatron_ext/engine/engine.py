"""The engine of one rank: built from a plan, it makes training steps."""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from itertools import count as counting
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.plan import BUCKET_BYTES, Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.check import actions_of
from megatron_ext.contract.schedule.deal import Division
from megatron_ext.contract.schedule.schedules import Action, Kind, schedule
from megatron_ext.data.ahead import helpers_of
from megatron_ext.data.samples import BEGINNING, Position, Samples
from megatron_ext.engine.dealing import Dealing
from megatron_ext.engine.executor.channels import channels, warm_up
from megatron_ext.engine.executor.executor import Executor, Factor
from megatron_ext.engine.executor.executors import Executors
from megatron_ext.engine.executor.first_pass import pass_both, pass_forward
from megatron_ext.engine.feed import Feed
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.gradients import Gradients
from megatron_ext.engine.optimizer.learning_rate import rate_of
from megatron_ext.engine.optimizer.optimizer import DataGroup, Optimizer
from megatron_ext.engine.results import Progress, StepResult, not_finite
from megatron_ext.engine.running import RunningStatistics
from megatron_ext.engine.stopwatch import Stopwatch
from megatron_ext.engine.workers import Worker, Workers, beside
from megatron_ext.parallel.comm import all_reduce
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, threads_for
from megatron_ext.tasks.task import DTYPES, Micro, Task, Tensors
from megatron_ext.timeline.progress import Wait, iterates
from megatron_ext.timeline.recorder import NOTHING, Recorder

FORWARD = (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD)


class Engine:
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
        self._device = torch.device(plan.device)
        layout = plan.layout
        tensor_size, replicas = layout.tensors[place.stage], layout.replicas[place.stage]
        self.dealing = Dealing(plan, place, start)
        peers = channels(layout, place, plan.chunks, groups)
        # Before anything takes its time: ranks wait here for each other, and no longer than for any message.
        warm_up(groups, peers, place, plan.pipeline, self._device)
        self.tensor = TensorGroup(tensor_size, place.tp, groups.tensor, plan.sequence_parallel, recorder)
        self.task = task
        virtual_stages = [chunk * plan.pipeline + place.stage for chunk in range(plan.chunks)]
        parts = cut(task, plan.partition)
        owned: Dict[str, nn.Parameter] = {}
        self._stages = [Stage(task, parts[virtual], self.tensor, owned) for virtual in virtual_stages]
        for stage in self._stages:
            stage.initialise(threads_for(plan))
            if plan.train.compile:
                stage.compile_blocks()
        named = [pair for stage in self._stages for pair in stage.parameters_by_name()]
        self.places = {name: at for stage in self._stages for name, at in stage.places.items()}
        """By a parameter's name: its block, and its name there. Of a copy of a tied one, the owner's."""
        self.blocks = [block.name for virtual in virtual_stages for block in parts[virtual].blocks]
        dtype = DTYPES[plan.train.precision]
        self.state = [one for stage in self._stages for one in stage.state]
        """What is not trained, but part of a checkpoint: by block and name there."""
        self._feed = Feed(task, self._stages, self._device, helpers_of(plan, place))
        for stage in self._stages:
            stage.place(self._device, dtype)
        self.flat = FlatWeights(named, dtype, self._device, replicas if plan.sharded_optimizer else 1)
        streams = plan.stream is not None  # and stages update by themselves
        self._gradients = Gradients(plan, task, place, groups, self._stages, owned, self.flat, recorder, BUCKET_BYTES)
        self.optimizer = Optimizer(
            self.flat,
            plan.train,
            groups.tensor if streams else groups.model,
            DataGroup(replicas, place.dp, groups.data),
            plan.sharded_optimizer,
            self._gradients.elsewhere,
            groups.tensor,
            {name for name, _ in named if task.shard(name) is not None},
            copies=1 if layout.even or streams else replicas,
            cuts=self._gradients.ends if plan.train.overlap_optimizer else (),
        )
        self._actions: Sequence[Action] = [] if streams else actions_of(plan, place.stage, place.dp)
        later = WeightGradients(self.flat.add, self.flat.add_rows)
        splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in self._actions)
        if splits or not plan.train.compile:
            shared = [parameter for stage in self._stages for parameter in stage.shared]
            for stage in self._stages:
                stage.put_off(later, shared, lambda parameter: splits or self.flat.adds(parameter))

        self._executors = executors = Executors(
            plan, task, parts, virtual_stages, self.tensor, peers, self._loss, self._executes
        )

        def another() -> Worker:
            """A copy of the one stage that a plan with streams has; events are those of the first copy alone."""
            with beside(self._device) as stream:
                stage = Stage(task, parts[0], TensorGroup(1, 0, None, False))
                stage.place(self._device, dtype)
                flat = FlatWeights(stage.parameters_by_name(), dtype, self._device, of=self.flat)
                later = WeightGradients(flat.add, flat.add_rows)
                stage.put_off(later, stage.shared, flat.adds)
            return Worker(executors.of([stage], self.dealing.size, Recorder(None), later), flat, stage, stream)

        self._running = RunningStatistics(self._stages, groups.data)
        self.stopwatch = None if plan.adapt is None else Stopwatch(self._device)
        self._has_metrics = getattr(task.metrics, "__func__", None) is not Task.metrics
        self._metrics: List[Tuple[int, Tensors]] = []
        """Of the iteration's micro-batches, each with the number of its first sample."""
        self._executor = executors.of(self._stages, plan.micro_batch_size, recorder, later)
        self._executor.watch = self.stopwatch
        self._another = another
        self._others: List[Worker] = []
        self._workers: Optional[Workers] = None
        """Where this replica has several."""
        self._fit_workers()
        self._executor_of = lru_cache(maxsize=2)(lambda size: executors.of(self._stages, size, Recorder(None), later))
        """For evaluations, by the size of their micro-batches."""

    @property
    def updates(self) -> int:
        """How far the learning rate's policy has come."""
        return self.optimizer.updates

    @property
    def division(self) -> Division:
        """How replicas share the samples of the iterations to come."""
        return self.dealing.division

    @property
    def global_batch_size(self) -> int:
        """Samples of each of these."""
        return self.division.samples

    def consumed(self, iteration: int) -> int:
        """Samples that were taken up to the end of an iteration, the last one or one with this division."""
        return self.dealing.consumed(iteration)

    def progress(self, iteration: int) -> Progress:
        """After the last iteration, with the shares that it had."""
        consumed, size = self.consumed(iteration), self.global_batch_size
        return Progress(consumed, size, self._learning_rate(consumed))

    def divide(self, iteration: int, division: Division) -> None:
        """Has the iterations after this one, the last one so far, be divided like this."""
        self.dealing.divide(iteration, division)
        self._actions = self._scheduled(len(self.dealing.taken))
        for executor, stages in [
            (self._executor, self._stages),
            *((one.executor, [one.stage]) for one in self._others),
        ]:
            executor.resize(self._executors.chunks_of(stages, self.dealing.size))
        self._fit_workers()

    def _fit_workers(self) -> None:
        """As many copies of the model beside the first one as the division says."""
        copies = self.division.streams
        count = copies[self._place.dp] - 1 if copies else 0
        if count == len(self._others):
            return
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if count < len(self._others):
            del self._others[count:]
            gc.collect()  # their hooks refer to them; larger micro-batches may need the memory
        self._others += [self._another() for _ in range(count - len(self._others))]
        if self._others:
            first = Worker(self._executor, self.flat, self._stages[0])
            self._workers = Workers([first, *self._others], self._scheduled, self._device)

    def _scheduled(self, micro_batches: int) -> Sequence[Action]:
        """What this rank does with so many, by the plan's schedule."""
        plan = self._plan
        return schedule(plan.schedule, plan.pipeline, plan.chunks, micro_batches)[self._place.stage]

    def _learning_rate(self, consumed: int) -> float:
        """Of the update after so many samples."""
        return rate_of(self._plan, self.updates, consumed, self.global_batch_size)

    @property
    def stage_updates(self) -> Optional[int]:
        """Updates of this stage's weights, where stages count their own."""
        return None

    @property
    def at_once(self) -> int:
        """Micro-batches that `forward` takes at most."""
        return self.dealing.count

    @property
    def apart(self) -> int:
        """By how many iterations ranks may be apart, at least 1."""
        return 1

    def soonest_end(self, iteration: int) -> int:
        """After which iteration the run can end, when it is asked to after this one; it then is to end there."""
        return iteration

    def step(self, iteration: int, halves: bool = False) -> StepResult:
        """Trains on the global batch of `iteration` (from 1), and looks at the gradients of its `halves` if asked to.

        Raises:
            NotFinite: the loss or the gradient is not finite, and not because of fp16's loss scale.
            PeerLost: another rank is gone.
        """
        self._recorder.iteration = iteration
        iterates(iteration)
        watch = self.stopwatch
        if watch is not None:
            watch.begin()
        scale = self.optimizer.scaler.scale
        self._gradients.begin(len(self.dealing.taken), at_once=halves or bool(self.division.streams))
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
        mean, metrics = math.nan, {}
        if loss is not None:
            found = [metrics for _, metrics in sorted(self._metrics, key=lambda one: one[0])]
            names = list(found[0]) if found else []
            sums = [torch.stack([one[name].float() for one in found]).sum() * factor for name in names]
            logged = torch.stack([loss, *sums])
            all_reduce(logged, self._groups.data, "all-reduce of the loss")
            with Wait("reading the mean loss"):  # not after the optimizer: a GPU updates weights while the host goes on
                mean, *others = [value / scale for value in logged.tolist()]
            metrics = dict(zip(names, others))
        compared = self._compared(list(micros.values()), scale) if halves else None
        norm = self.optimizer.step(self._recorder, lr)
        skipped = not math.isfinite(norm)
        if skipped and not self.optimizer.scaler.dynamic:
            raise not_finite(iteration, "gradient's norm", norm)
        self._running.finish(self.dealing.count, skipped)
        if watch is not None:
            watch.end()
        sizes = self.dealing.sizes(self._samples, iteration) if loss is not None else ()
        return StepResult(mean, norm, scale, skipped, metrics, sizes, compared)

    def _pass(
        self, actions: Sequence[Action], micros: Mapping[int, Optional[Micro]], factor: Factor
    ) -> Optional[Tensor]:
        """What the executor does with these micro-batches, or several of them beside each other."""
        if self._workers is None:
            return self._executor.run(actions, micros, factor)
        return self._workers.run(micros, factor)

    def _in_halves(self, micros: Mapping[int, Optional[Micro]], factor: Factor) -> Optional[Tensor]:
        """The same with all micro-batches, but the even ones of the iteration first."""
        losses = []
        for half, held in enumerate(self.dealing.halves(list(micros.values()))):
            if held:
                losses.append(self._pass(self._scheduled(len(held)), dict(enumerate(held)), factor))
            if half == 0:
                self._gradients.keep_even()
        known = [loss for loss in losses if loss is not None]
        return torch.stack(known).sum() if known else None

    def _compared(self, micros: Sequence[Optional[Micro]], scale: float) -> Halves:
        """The gradients of both halves, without the loss scale; all ranks call it when the whole one is reduced."""
        even, whole, product = self._gradients.compared(scale)
        samples = self.dealing.samples_of_halves()
        part = samples[0] / sum(samples)
        weights = [[micro.weight for micro in half if micro is not None] for half in self.dealing.halves(micros)]
        known = [[weight.reshape(()).double() for weight in half if weight is not None] for half in weights]
        if any(known) and any(stage.last for stage in self._stages):
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            sums = torch.stack([sum(half, zero) for half in known])
            all_reduce(sums, self._groups.data, "all-reduce of the weights of micro-batches")
            part = float(sums[0] / sums.sum())
        return Halves(even, whole, product, part, *samples)

    def pass_once(self) -> None:
        """Where the first pass takes long, runs each chunk once with gradients that are zero.

        Stages exchange nothing, but the ranks of a tensor group do: all call it when all have their weights.

        torch.compile works at the first call, for minutes: in the first iteration one stage after another would, while
        the others wait for its message. CUDA loads kernels at their first call, and waits there for all that the GPU
        has begun, a receive among it.
        """
        plan = self._plan
        if not (plan.train.compile or (self._device.type == "cuda" and plan.pipeline > 1)):
            return
        self._gradients.begin(1 << 30)  # more than come: nothing is summed
        of_replicas = None if plan.adapt is None else plan.adapt.micro_batch_sizes
        for size in [plan.micro_batch_size] if of_replicas is None else of_replicas[self._place.dp]:
            micro = self.task.example(size, torch.Generator()).to(self._device)
            pass_both(self._executors.chunks_of(self._stages, size)(), micro, self._loss)
        if plan.train.eval_interval is not None:
            micro = self.task.example(plan.micro_batch_size, torch.Generator()).to(self._device)
            with self.evaluating():
                pass_forward(self._executors.chunks_of(self._stages, plan.micro_batch_size)(), micro)

    def forward(
        self, samples: Samples, first: int, size: int, count: int, take: Callable[[Tensors, Micro], None]
    ) -> None:
        """Forward passes of `count` micro-batches of `size` samples from number `first` on, by the plan's schedule.

        `count` is at most `at_once`, those of an iteration: its last micro-batches are left out. A replica takes those
        that it takes in training, so that a schedule that runs to its end still does: whatever a forward action waits
        for is one, too. All ranks call it, within `evaluating`; on the last stage `take` is given what leaves it.
        """
        own = self.dealing.taken[self.dealing.taken < count]
        if not len(own):
            return
        numbers = first + own[:, None] * size + np.arange(size)
        coming = chain.from_iterable(numbers + after * count * size for after in counting(1))
        micros = self._feed.micros(samples, numbers, self.dealing.keys(len(own)), coming)
        actions = [action for action in self._actions if action.kind in FORWARD and action.micro_batch in micros]
        self._executor_of(size).run_forward(actions, micros, take)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, dropout, events or traffic, with the average of the weights where there is one; then
        training goes on as if nothing had been in between."""
        modes = [(module, module.training) for stage in self._stages for module in stage.modules()]
        iteration, self._recorder.iteration = self._recorder.iteration, 0
        devices = [self._place.local_rank] if self._device.type == "cuda" else []
        try:
            for stage in self._stages:
                stage.eval()
            uncounted = self._recorder.traffic.paused()
            with uncounted, torch.random.fork_rng(devices), torch.no_grad(), self.optimizer.averaged():
                yield
        finally:
            self._recorder.iteration = iteration
            for module, mode in modes:
                module.training = mode

    def _loss(self, left: Tensors, micro: Micro) -> Tensor:
        if self._has_metrics:
            with torch.no_grad():
                self._metrics.append((micro.first, self.task.metrics(left, micro, self.tensor)))
        return self.task.loss(left, micro, self.tensor)

    def _factor(self, micros: Sequence[Optional[Micro]], scale: float) -> Factor:
        """Of the losses: `scale`, divided by the weight of the global batch, of which other replicas have a part."""
        weights = [micro.weight for micro in micros if micro is not None and micro.weight is not None]
        if not weights or not any(stage.last for stage in self._stages):
            return scale * self.dealing.size / self.dealing.division.samples
        total = torch.stack([weight.reshape(()).double() for weight in weights]).sum()
        all_reduce(total, self._groups.data, "all-reduce of the weights of micro-batches")
        return torch.where(total > 0, scale / total, 0.0).float()

    def _batch(self, iteration: int) -> Dict[int, Optional[Micro]]:
        """This replica's micro-batches, by number; what they hold, where the rank has a use for it."""
        own = self.dealing.own(iteration)
        with self._recorder.span("batch-generator") if self._feed.looks_at_samples else NOTHING:
            coming = chain.from_iterable(map(self.dealing.own, counting(iteration + 1)))
            return self._feed.micros(self._samples, own, self.dealing.keys(len(own)), coming)
