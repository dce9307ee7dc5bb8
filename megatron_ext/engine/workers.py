"""Virtual stream workers (IIDP): copies of a model on one GPU that run micro-batches beside each other.

All copies have the same weights in memory; each sums gradients in a buffer of its own, for two backward passes that add
to one at a time would lose some. A thread runs each copy, on a GPU on a CUDA stream of its own. A copy is also made on
its stream (`copy_stream`): autograd adds a gradient on the stream that was current when it made the node that adds. On
another stream, that one would wait for each gradient of the copy.

So do running statistics: each copy gathers its own, and the first one gets those of all. Other buffers, which a user's
module may change in a pass, are the first copy's when an iteration begins, as replicas have those of the first one.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.schedule.schedules import Action
from megatron_ext.engine.executor.executor import Executor, Factor
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Micro, Running


class Worker(NamedTuple):
    """A copy of the model."""

    executor: Executor
    flat: FlatWeights
    """Its gradients; the weights are those of the first copy."""
    stage: Stage
    stream: Optional[torch.cuda.Stream] = None
    """Where a copy beside the first one runs, on a GPU."""


@contextmanager
def copy_stream(device: torch.device) -> Iterator[Optional[torch.cuda.Stream]]:
    """Gives the stream of a copy, which the block makes; None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # its memory may have been that of a copy before
    with torch.cuda.stream(stream):
        yield stream


class Workers:
    """The workers of a rank. The first has the rank's own gradients; the others are `copies`."""

    def __init__(
        self,
        first: Worker,
        schedule: Callable[[int], Sequence[Action]],
        device: torch.device,
        copies: Sequence[Worker] = (),
    ) -> None:
        """`schedule` gives the actions for so many micro-batches."""
        self.first = first
        self.copies = list(copies)
        self._schedule = schedule
        self._device = device
        self._link()

    def resize(self, workers: int, make_replica_copy: Callable[[], Worker]) -> None:
        """Makes or drops copies until there are so many workers. Nothing runs meanwhile."""
        count = workers - 1
        if count == len(self.copies):
            return
        self.close()
        if count < len(self.copies):
            del self.copies[count:]
            self._link()  # which refers to them no more
            gc.collect()  # their hooks refer to them; larger micro-batches may need the memory
        else:
            self.copies += [make_replica_copy() for _ in range(count - len(self.copies))]
            self._link()

    def _link(self) -> None:
        """Pairs the modules of the copies with those of the first worker."""
        self._workers = [self.first, *self.copies]
        pairs = [pair for copy in self.copies for pair in zip(self.first.stage.modules(), copy.stage.modules())]
        self._running = [(of, to) for of, to in pairs if isinstance(of, Running) and isinstance(to, Running)]
        self._with_buffers: List[Tuple[nn.Module, nn.Module]] = [
            (of, to) for of, to in pairs if not isinstance(of, Running) and any(True for _ in of.buffers(recurse=False))
        ]
        for of, to in pairs:
            for theirs, own in zip(of.parameters(recurse=False), to.parameters(recurse=False)):
                if not theirs.requires_grad:
                    own.data = theirs.data
        self._streams = [copy.stream for copy in self.copies if copy.stream is not None]
        self._pool = ThreadPoolExecutor(max(1, len(self.copies)), "worker")

    def run(self, micros: Mapping[int, Optional[Micro]], factor: Factor) -> Optional[Tensor]:
        """Does what `Executor.run` does: workers take micro-batches in turn; the first one gets all gradients."""
        total = self.pass_all(micros, factor)
        self.sum_gradients()
        return total

    def pass_all(self, micros: Mapping[int, Optional[Micro]], factor: Factor) -> Optional[Tensor]:
        """Does what `run` does, but each worker keeps its gradients until `sum_gradients`."""
        dealt = [list(micros.values())[number :: len(self._workers)] for number in range(len(self._workers))]
        self._begin()
        main = torch.cuda.current_stream(self._device) if self._streams else None
        others = [
            self._pool.submit(self._run_copy, number, main, held, factor)
            for number, held in enumerate(dealt)
            if number and held  # of the last round of an adapting batch there may be fewer
        ]
        try:
            losses = [self._pass(0, dealt[0], factor)]
        finally:
            wait(others)  # where one fails, nothing is under way any more
        losses += [other.result() for other in others]
        for stream in self._streams:
            assert main is not None
            main.wait_stream(stream)
        return torch.stack([loss for loss in losses if loss is not None]).sum()

    def close(self) -> None:
        """Ends the threads of the copies; nothing runs afterwards."""
        self._pool.shutdown()

    @torch.no_grad()
    def _begin(self) -> None:
        for of, to in self._with_buffers:
            for name, buffer in of.named_buffers(recurse=False):
                setattr(to, name, buffer.clone())
        for _, to in self._running:
            to.gathered.zero_()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives the first worker the gradients and running statistics of all."""
        total, *rest = (worker.flat.grad for worker in self._workers)
        for grad in rest:
            total.add_(grad)
            grad.zero_()
        for of, to in self._running:
            of.gathered += to.gathered

    def _run_copy(
        self, number: int, main: Optional[torch.cuda.Stream], held: List[Optional[Micro]], factor: Factor
    ) -> Optional[Tensor]:
        """Runs a copy in a thread of its own; on a GPU behind what `main` has got so far."""
        stream = self._workers[number].stream
        if main is None or stream is None:
            return self._pass(number, held, factor)
        torch.cuda.set_device(stream.device)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            return self._pass(number, held, factor)

    def _pass(self, number: int, held: List[Optional[Micro]], factor: Factor) -> Optional[Tensor]:
        return self._workers[number].executor.run(self._schedule(len(held)), dict(enumerate(held)), factor)
