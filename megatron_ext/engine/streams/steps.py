"""A rank's steps where micro-batches stream through the stages, an iteration at a time.

An iteration is a global batch of micro-batches, in which nothing waits for its end: a rank's part of it goes to the
update that learns from the last of them. A stream is empty where all ranks need the same weights: when they are saved
or evaluated, and at the end.
"""

from __future__ import annotations

from itertools import islice
from typing import Iterator, List

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.contract.schedule.streams import StreamAction
from megatron_ext.contract.train_config import TrainConfig


def last_of_stream(train: TrainConfig, iteration: int) -> int:
    """The next iteration, from this one on, after which the pipeline is empty."""
    intervals = [train.eval_interval, train.save_interval if train.checkpoint else None, train.save_memory]
    ends = [-(-iteration // every) * every for every in intervals if every]
    return min([train.iterations, *ends])


class StreamSteps:
    """Gives the steps of one rank in the stream under way."""

    def __init__(self, plan: Plan, place: Place, last: int) -> None:
        """The pipeline is empty after the iteration `last`."""
        assert plan.stream is not None
        self.stream = plan.stream
        self._train = plan.train
        self._place = place
        self.window = plan.global_batch_size // plan.micro_batch_size
        """Micro-batches of an iteration."""
        self.first, self.until = last + 1, last
        """The stream's first and last iteration."""
        self._steps: Iterator[StreamAction] = iter(())
        self._taken = 0
        self._learned = 0
        """Micro-batches of the stream that the updates taken so far have learned from."""

    @property
    def micro_batches(self) -> int:
        """How many the stream has."""
        return (self.until - self.first + 1) * self.window

    @property
    def max_iteration_skew(self) -> int:
        """The most iterations that ranks may be apart, at least 1."""
        return -(-self.stream.in_flight // self.window) + 1

    def begins(self, iteration: int) -> bool:
        """Whether a stream begins with an iteration, which then is the one under way."""
        if iteration <= self.until:
            return False
        self.first, self.until = iteration, last_of_stream(self._train, iteration)
        self._steps, self._taken, self._learned = self._all(), 0, 0
        return True

    def of(self, iteration: int) -> List[StreamAction]:
        """The steps of the next iteration; none where an update before it has learned from all of its micro-batches.

        So no rank is further than in_flight micro-batches.
        """
        end = self.end(iteration)
        found: List[StreamAction] = []
        while self._learned < end and (step := next(self._steps, None)) is not None:
            found.append(step)
            if step.kind is Kind.UPDATE:
                self._learned = step.micro_batch + 1
        self._taken += len(found)
        return found

    def end(self, iteration: int) -> int:
        """The stream's micro-batches up to the end of an iteration."""
        return (iteration - self.first + 1) * self.window

    def shorten(self, iteration: int) -> int:
        """Ends the stream as soon after an iteration as all ranks can: before what any has begun; where that is."""
        if iteration + self.max_iteration_skew < self.until:
            self.until = iteration + self.max_iteration_skew
            self._steps = islice(self._all(), self._taken, None)
        return max(iteration, self.until)

    def _all(self) -> Iterator[StreamAction]:
        return self.stream.steps(self._place.stage, self._place.dp, self.micro_batches)
