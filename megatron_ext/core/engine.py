"""Megatron-Core as the engine of one rank: its model, schedules and optimizer make the training steps of a plan."""

from __future__ import annotations

import math
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from itertools import count as counting
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.contract.events import ALL_REDUCE
from megatron_ext.contract.models.counts import experts_of
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.core import library
from megatron_ext.core.families import OwnTokens, family_of
from megatron_ext.core.optimizer import CoreOptimizer
from megatron_ext.core.parameters import parameters
from megatron_ext.core.settings import forward_options, make_groups, model_config, refusing, replicas_config
from megatron_ext.core.timeline import Timers, Turns, communicator, sums_of
from megatron_ext.data.ahead import helpers_of
from megatron_ext.data.samples import BEGINNING, Position, Samples
from megatron_ext.engine.batches import BatchAssignment, BatchLoader
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.engine.results import StepResult, not_finite
from megatron_ext.parallel.comm import all_reduce
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import block_of, cut
from megatron_ext.tasks.stage import evaluation_mode
from megatron_ext.tasks.task import Micro, Task, Tensors
from megatron_ext.timeline.progress import Wait, iterates
from megatron_ext.timeline.recorder import Recorder

Take = Callable[[Tensors, Micro], None]


class CoreEngine(AnyEngine):
    """One rank's chunks and optimizer. What it is asked for is what `megatron_ext.engine.engine.Engine` is."""

    state: Sequence[Tuple[str, str, Tensor]] = ()

    def __init__(
        self,
        plan: Plan,
        task: Task,
        place: Place,
        timeout: timedelta,
        recorder: Recorder,
        samples: Samples,
        start: Position = BEGINNING,
    ) -> None:
        """The iterations after `start` go on with its samples. Raises EngineError: megatron.core is not here, or cannot
        have this model."""
        found = library.load(plan)
        if place.rank == 0:
            print(*found.remarks, sep="\n", flush=True)
        make_groups(plan, timeout)
        from megatron.core import parallel_state

        self._plan, self._place, self._samples, self._recorder = plan, place, samples, recorder
        self.task = task
        self.device = torch.device(plan.device)
        self._own = OwnTokens(plan, place, self.device)
        self.assignment = BatchAssignment(plan, place, start)
        self._data = parallel_state.get_data_parallel_group(with_context_parallel=True) if plan.data > 1 else None
        tensor_group = parallel_state.get_tensor_model_parallel_group() if plan.tensor > 1 else None
        self.tensor = TensorGroup(plan.tensor, place.tp, tensor_group, plan.sequence_parallel, recorder)
        self._virtual_stages = [chunk * plan.pipeline + place.stage for chunk in range(plan.chunks)]
        self._timers = Timers(recorder, sums_of(plan, place))
        self._build_model(found)
        self._initialise()
        self._schedule()

    def _build_model(self, found: library.Library) -> None:
        """Makes this rank's chunks and their replicas' sums, and the optimizer."""
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.transformer.module import Float16Module

        plan = self._plan
        self._config = config = model_config(plan, found)
        self._family = family_of(plan)
        with refusing(plan.engine_options or {}):
            self._models = [self._family.make(config, found, virtual) for virtual in self._virtual_stages]
        experts = experts_of(plan.model) or 0
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts // (plan.expert or 1)
        self._parameters = parameters(plan, self.task, self._models, self._virtual_stages, first_expert)
        half = config.fp16 or config.bf16
        formatted = [Float16Module(config, model) if half else model for model in self._models]
        self._replicas: List[Any] = [
            DistributedDataParallel(config, replicas_config(plan), model, disable_bucketing=number > 0)
            for number, model in enumerate(formatted)
        ]
        self._options = forward_options(config)
        self.optimizer = CoreOptimizer(plan, self._replicas, self._parameters)
        self.flat = self.optimizer.flat

    def _initialise(self) -> None:
        """Gives the model the weights with which tdpp's own begins, whatever the layout."""
        plan, task = self._plan, self.task
        parts = cut(task, plan.partition)
        held = [parts[virtual] for virtual in self._virtual_stages]
        self.blocks = [block.name for part in held for block in part.blocks]
        self.places = {name: _place(task, name) for name in self.flat.names}
        initial = torch.zeros(self.flat.numel)
        for name in self._parameters:
            task.initialise(name, self.flat.view(name, initial), self.tensor)
        self.optimizer.load({WEIGHTS: initial}, 0)
        self._loader = BatchLoader(task, held, self.device, helpers_of(plan, self._place))

    def _schedule(self) -> None:
        """Has megatron.core's schedules do what this plan wants."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        plan, config = self._plan, self._config
        self._passes = get_forward_backward_func()
        config.timers = self._timers
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.inner.scale_loss
        if plan.data > 1:  # gradients are summed while the last micro-batch's backward pass goes on
            no_sync = [one.no_sync for one in self._replicas]
            config.no_sync_func = no_sync if plan.chunks > 1 else no_sync[0]
        self._messages: Dict[str, Any] = {}
        if plan.pipeline > 1:
            self._messages = communicator(self._recorder, self._timers, config)

    def pass_once(self) -> None:
        """megatron.core compiles and connects in its first iteration."""

    def step(self, iteration: int, halves: bool = False) -> StepResult:
        """Trains as `AnyEngine` says. No plan of this engine asks for the `halves`."""
        self._recorder.iteration = iteration
        iterates(iteration)
        scale = self.optimizer.scaler.scale
        for replica in self._replicas:
            replica.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        micros = {key: None if one is None else self._own.of(one) for key, one in self._batch(iteration).items()}
        share = self._share(list(micros.values()))
        self._draw(iteration)
        losses: List[Tensor] = []
        self._timers.turns = Turns(self._plan, self._place, list(micros))
        try:
            self._run(micros, lambda left, micro: self._loss(left, micro, share, losses))
            with Wait("reading the loss"):
                own = torch.stack(losses).mean() if losses else None
                if own is not None and not math.isfinite(own.item()):
                    raise not_finite(iteration, "loss", own.item())
            self._count_sums()
            with self._recorder.span("optimizer"):
                norm = self.optimizer.step(self._learning_rate(self.consumed(iteration - 1)))
        except RuntimeError as error:
            self._timers.failed(error)
            raise
        finally:
            self._timers.turns = None
        if norm is not None and not math.isfinite(norm):
            raise not_finite(iteration, "gradient's norm", norm)
        mean = math.nan
        if own is not None:
            all_reduce(own, self._data, "all-reduce of the loss")
            mean = own.item() / self._plan.taking
        return StepResult(mean, math.inf if norm is None else norm, scale, skipped=norm is None)

    def forward(self, samples: Samples, first: int, size: int, count: int, take: Take) -> None:
        """Forward passes of `count` micro-batches of `size` samples from number `first` on.

        `count` is at most `max_forward`. All ranks call it, within `evaluating`; on the last stage `take` is given what
        leaves it.
        """
        own = self.assignment.taken[self.assignment.taken < count]
        # How many micro-batches a replica passes, if `own` of these are its own: ranks that share experts out pass as
        # many as the others, and interleaved stages take them in groups of as many as there are stages.
        plan = self._plan
        least = -(-count // plan.taking) if plan.expert is not None else len(own)
        group = plan.pipeline if plan.chunks > 1 else 1
        passes = -(-least // group) * group
        if not passes:
            return
        numbers = first + (own if len(own) else np.zeros(1, np.int64))[:, None] * size + np.arange(size)
        coming = chain.from_iterable(numbers + after * count * size for after in counting(1))
        micros = self._loader.micros(samples, numbers, range(len(numbers)), coming)
        known = [None if (one := micros[number]) is None else self._own.of(one) for number in range(len(numbers))]
        repeated = {number: known[min(number, len(known) - 1)] for number in range(passes)}
        passed = counting()

        def of_own(left: Tensors, micro: Micro) -> Tensor:
            if next(passed) < len(own):
                take(left, micro)  # of ranks that share sequences, each its own tokens
            return torch.zeros((), device=self.device)

        self._run(repeated, of_own, forward_only=True, size=size)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, dropout, events or traffic."""
        iteration, self._recorder.iteration = self._recorder.iteration, 0
        try:
            with evaluation_mode(self._models), self._recorder.traffic.paused(), torch.no_grad():
                yield
        finally:
            self._recorder.iteration = iteration

    def _run(
        self,
        micros: Mapping[int, Optional[Micro]],
        of_last: Callable[[Tensors, Micro], Tensor],
        forward_only: bool = False,
        size: Optional[int] = None,
    ) -> None:
        """All passes of these micro-batches; on the last stage `of_last` makes of what leaves it what is learned."""

        def forward(turns: Iterator[int], chunk: nn.Module) -> Tuple[Any, Callable[[Any], Any]]:
            micro = micros[next(turns)]
            inputs = {} if micro is None else micro.inputs
            left = self._family.forward(chunk, inputs, self._own.positions.unsqueeze(0), **self._options)

            def loss(left: Any) -> Tuple[Tensor, Dict[str, Tensor]]:
                assert micro is not None
                return of_last(self._family.named(left), micro), {}

            return left, loss

        plan = self._plan
        iterators = [iter(list(micros)) for _ in self._replicas]
        self._passes(
            forward_step_func=forward,
            data_iterator=iterators if plan.chunks > 1 else iterators[0],
            model=self._replicas if plan.chunks > 1 else self._replicas[0],
            num_microbatches=len(micros),
            seq_length=plan.model.sequence_length,
            micro_batch_size=size or plan.micro_batch_size,
            forward_only=forward_only,
            **self._messages,
        )
        self._timers.finish()

    def _share(self, micros: Sequence[Optional[Micro]]) -> Union[float, Tensor]:
        """What each micro-batch's loss is multiplied by, so that the mean over micro-batches and replicas, of sums over
        ranks that share sequences, is that of the global batch."""
        plan = self._plan
        weights = [one.weight for one in micros if one is not None and one.weight is not None]
        if not weights or self._virtual_stages[-1] < len(plan.partition) - 1:
            return 1 / (plan.context or 1)
        whole = torch.stack(weights).sum().float()
        all_reduce(whole, self._data, "all-reduce of the batch's weight")
        return len(micros) * plan.taking / whole

    def _loss(self, left: Tensors, micro: Micro, share: Union[float, Tensor], losses: List[Tensor]) -> Tensor:
        with self._timers.loss():
            loss = self.task.loss(left, micro, self.tensor) * share
        losses.append(loss.detach().clone())  # megatron.core divides it in its place
        return loss

    def _count_sums(self) -> None:
        """Counts the bytes of gradients, and of weights, that replicas send each other."""
        traffic = self._recorder.traffic
        for buffer in (one for replica in self._replicas for one in replica.buffers):
            if self._plan.sharded_optimizer:
                traffic.reduce_scattered(buffer.grad_data, self._data, ALL_REDUCE)
                traffic.all_gathered(buffer.param_data[: buffer.param_data.numel() // self._plan.data], self._data)
            else:
                traffic.all_reduced(buffer.grad_data, self._data)

    def _draw(self, iteration: int) -> None:
        """Has dropout draw numbers that follow from the iteration, so that a run that goes on draws the same."""
        plan = self._plan
        if not (plan.model.hidden_dropout or plan.model.attention_dropout):
            return
        seed = plan.train.seed + 1_000_003 * iteration + 100 * self._place.stage + 10_007 * self._place.dp
        torch.manual_seed(seed)
        if self.device.type == "cuda":
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(seed % 2**31)


def _place(task: Task, name: str) -> Tuple[str, str]:
    """The block of a parameter, and its name there; of a copy of a tied one, the owner's."""
    owner = task.tied.get(name, name)
    block = block_of(task.blocks, owner).name
    return block, owner[len(block) + 1 :]
