"""Pipeline schedules: the order in which each takes the passes of its stages, and what memory and bounds ask of it.

`iteration.py` beside it makes the actions of an iteration from them.

The model is cut into `stages * chunks` virtual stages; chunk `c` of stage `s` is number `c * stages + s`. So the
stages are a ring: activations go to the following stage and, from the last one, to the first one's next chunk;
gradients go the other way round.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

ALL = 1 << 40
"""Micro-batches: more than any iteration has."""
INPUT_SHARE = 0.5
"""The part of a backward pass in two that the stage before waits for, as predictions have it."""


class Kind(str, Enum):
    """What an action does; the values, which they equal, name the timeline's events and are the words of a schedule's
    file."""

    FORWARD = "forward-compute"
    BACKWARD = "backward-compute"
    BACKWARD_INPUT = "backward-input-compute"
    """The part that the previous stage waits for: the gradient to the input."""
    BACKWARD_WEIGHT = "backward-weight-compute"
    """The rest: the gradients to the weights."""
    RECV_FORWARD = "forward-recv"
    SEND_FORWARD = "forward-send"
    RECV_BACKWARD = "backward-recv"
    SEND_BACKWARD = "backward-send"
    UPDATE = "optimizer"
    """The update of the weights, where micro-batches stream (`megatron_ext.contract.schedule.streams`); elsewhere it
    ends the iteration, and no schedule has it."""


PARTS = {Kind.BACKWARD: 1.0, Kind.BACKWARD_INPUT: INPUT_SHARE, Kind.BACKWARD_WEIGHT: 1 - INPUT_SHARE}
"""What predictions have actions take of a whole backward pass."""


class Action(NamedTuple):
    """One step of a rank: what, for which micro-batch, in which of its chunks.

    A receive names the chunk that takes the message, a send the chunk that made it.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


Actions = List[Action]


class Bubble(NamedTuple):
    """For how much of an iteration a stage idles where stages take the same and messages nothing."""

    schedule: str
    """Its label."""
    formula: str
    """In p stages, v chunks on each, and m micro-batches."""
    idle: int
    length: int
    """How long the iteration is, in the unit of `idle`."""

    @property
    def fraction(self) -> float:
        return self.idle / self.length


class PipelineSchedule:
    """In which order stages take their passes, and what memory and bounds ask of it.

    This class has what 1F1B, GPipe and ZB-H1 share: a rank takes some forward passes ahead, then one forward and one
    backward pass in turn. To its `before` stages before and `after` stages after it belong as many micro-batches;
    both are numbers, or arrays of numbers.
    """

    name: str
    """The word of `parallel.schedule`."""
    label: str
    """In the literature: for tables, sentences and pages."""
    flushes = True
    """Whether an iteration ends with an empty pipeline; otherwise micro-batches stream
    (`megatron_ext.contract.schedule.streams`)."""
    has_chunks = False
    """Whether a stage has several chunks of the model."""
    splits_backward = False
    """Whether the gradients of the weights are a pass of their own, for which no other stage waits."""
    searched = True
    """Whether it can be the fastest, so that a search has to try it."""
    megatron_lm = False
    """Whether Megatron-LM has it."""

    def ahead(self, after: Any) -> Any:
        """Forward passes that a rank takes before it alternates."""
        return after

    def lag(self, before: Any) -> Any:
        """Micro-batches that weight gradients come later than the input's."""
        return 0 * before

    def overlapped(self, after: Any) -> Any:
        """Forward passes that a stage takes while the first micro-batch goes through all stages and back."""
        return self.ahead(after) + 1

    @property
    def input_share(self) -> float:
        """The part of a backward pass that the stage before waits for."""
        return INPUT_SHARE if self.splits_backward else 1.0

    def bubble(self, stages: int, chunks: int, micro_batches: int) -> Optional[Bubble]:
        """The ideal one; None where no formula is known to hold.

        A stage idles for p-1 of m+p-1 pairs of a forward and a backward pass (Narayanan et al. 2021, section 2.2, which
        gives the ratio to the computing time, (p-1)/m).
        """
        return Bubble(self.label, "(p−1)/(m+p−1)", stages - 1, micro_batches + stages - 1)

    def passes(self, stage: int, stages: int, chunks: int, micro_batches: int) -> Actions:
        """What a stage computes, without its messages."""
        return self.passes_of_rank(stages - 1 - stage, stage, micro_batches)

    def passes_of_rank(self, after: int, before: int, micro_batches: int) -> Actions:
        """What a rank with one chunk computes for its micro-batches, numbered from 0."""
        back = Kind.BACKWARD_INPUT if self.splits_backward else Kind.BACKWARD
        alternating = _alternating(_each(Kind.FORWARD, micro_batches), _each(back, micro_batches), self.ahead(after))
        if not self.splits_backward:
            return alternating
        steps: Actions = []
        lag, weights = self.lag(before), _each(Kind.BACKWARD_WEIGHT, micro_batches)
        for action in alternating:
            steps.append(action)
            if action.kind is back and action.micro_batch >= lag:
                steps.append(weights[action.micro_batch - lag])
        return steps + weights[max(0, micro_batches - lag) :]

    def held(self, stage: Any, stages: int, chunks: int = 1) -> Any:
        """Pairs of micro-batch and chunk of which a stage holds activations at once, at most, of any number."""
        if chunks > 1:
            return _ahead_in_groups(stage, stages, chunks) + 1
        return self.ahead(stages - 1 - stage) + 1 + self.lag(stage)

    def left_by_chunk(self, stage: int, stages: int, chunks: int, micro_batches: int, gone: int) -> List[Sequence[int]]:
        """With several chunks, the forward and backward passes of each that a stage has left when `gone` gradients of
        the first group of micro-batches have left its first chunk.

        The group has gone back through all other chunks by then.
        """
        group, turn = stages * chunks, self.in_turn(stages, micro_batches)
        whole, begun = divmod(_ahead_in_groups(stage, stages, chunks) + (chunks - 1) * stages + gone, group)
        done = [whole * stages + min(max(begun - chunk * stages, 0), stages) for chunk in range(chunks)]
        return [
            (max(0, micro_batches - forward), micro_batches - (turn if chunk else gone))
            for chunk, forward in enumerate(done)
        ]

    def held_by_chunk(self, stage: int, stages: int, chunks: int, micro_batches: int) -> List[List[int]]:
        """With several chunks, micro-batches of each that a stage holds, at the moments that may take most memory.

        Forward passes go in groups of as many micro-batches as stages through one chunk after another, backward passes
        the other way round, and so many forward passes ahead; so the numbers repeat with every group. Between the
        moments at which one of the two goes on to another chunk, or has no micro-batch left, they grow or fall evenly:
        no other moment takes more memory.
        """
        group, ahead = stages * chunks, self.held(stage, stages, chunks)
        turns = [stages * chunk for chunk in range(chunks)]
        by_forward = [(turn + last - ahead) % group for last in (0, micro_batches % stages) for turn in turns]

        def passed(passes: int, earlier: int) -> int:
            """Count the passes of a chunk, with so many others before it in a group."""
            whole, begun = divmod(passes, group)
            return whole * stages + min(max(begun - earlier * stages, 0), stages)

        moments = []
        for backward in turns + by_forward:
            forward = min(ahead + backward, -(-micro_batches // stages) * group)
            counts = [passed(forward, chunk) - passed(backward, chunks - 1 - chunk) for chunk in range(chunks)]
            moments.append([min(max(count, 0), micro_batches) for count in counts])
        return moments

    def in_turn(self, stages: int, micro_batches: int) -> int:
        """Micro-batches that go through a chunk in turn before the next chunk takes them. So on its way back the first
        one may hand over to the last one, in any chunk, and that one goes on."""
        return min(stages, micro_batches)


class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes; holds every micro-batch (Huang et al. 2019)."""

    name, label = "gpipe", "GPipe"

    def ahead(self, after: Any) -> Any:
        return 0 * after + ALL

    def overlapped(self, after: Any) -> Any:
        """The first one alone: the last stage waits for all others of its own before it goes back."""
        return 0 * after + 1


class OneFOneB(PipelineSchedule):
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, section 2.2.1).

    A stage runs as many forward passes ahead as there are stages after it, then alternates, so that it never holds
    activations of more than `stages - stage` micro-batches.
    """

    name, label = "one_f_one_b", "1F1B"
    megatron_lm = True


class Interleaved(PipelineSchedule):
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2); divides 1F1B's bubble by the number of chunks.

    A stage holds activations of at most `2 * (stages - 1 - stage) + (chunks - 1) * stages + 1` pairs of micro-batch and
    chunk.
    """

    name, label = "interleaved", "interleaved 1F1B"
    has_chunks = megatron_lm = True

    def passes(self, stage: int, stages: int, chunks: int, micro_batches: int) -> Actions:
        """Micro-batches go round in groups of `stages`: a chunk takes the whole group, then the next chunk does.

        If the last group is not whole, it is made so and what belongs to no micro-batch is left out afterwards: to
        leave out whole micro-batches takes waits away and adds none, where smaller groups can deadlock.
        """
        forward, backward = _in_groups(stages, chunks, micro_batches)
        whole = _alternating(forward, backward, _ahead_in_groups(stage, stages, chunks))
        return [action for action in whole if action.micro_batch < micro_batches]

    def bubble(self, stages: int, chunks: int, micro_batches: int) -> Optional[Bubble]:
        """Idles for p-1 of m*v+p-1 pairs of a chunk, if p divides m."""
        if micro_batches % stages:
            return None
        return Bubble(self.label, "(p−1)/(m·v+p−1)", stages - 1, micro_batches * chunks + stages - 1)


class ZBH1(PipelineSchedule):
    """ZB-H1 (Qi et al. 2023, section 2.1): 1F1B whose weight gradients lag behind, by a micro-batch for each stage
    before.

    What lags fills the time in which 1F1B waits. A stage holds the input of at most `stages - stage` micro-batches
    before their input gradient, as in 1F1B, and something of at most `stages` before their weight gradient, which is
    what 1F1B's first stage holds.
    """

    name, label = "zb_h1", "ZB-H1"
    splits_backward = True

    def lag(self, before: Any) -> Any:
        return before

    def bubble(self, stages: int, chunks: int, micro_batches: int) -> Optional[Bubble]:
        """Idles (p-1) * (F + B - W), where F is a forward pass, B and W are the parts of a backward pass for inputs and
        weights, and computes m * (F + B + W); with F = B = W, as there, p-1 of 3m+p-1. It takes m >= p, or there are
        too few W to fill the waits."""
        if micro_batches < stages:
            return None
        return Bubble(self.label, "(p−1)/(3m+p−1)", stages - 1, 3 * micro_batches + stages - 1)


class ModelParallel(PipelineSchedule):
    """One micro-batch after the other, which is no pipeline."""

    name, label = "model_parallel", "model parallelism"
    searched = False

    def ahead(self, after: Any) -> Any:
        return 0 * after

    def bubble(self, stages: int, chunks: int, micro_batches: int) -> Optional[Bubble]:
        """Idles while the other stages work."""
        return Bubble(self.label, "(p−1)/p", stages - 1, stages)


class PipeDream(PipelineSchedule):
    """1F1B that does not flush: its steps are a stream's."""

    name, label = "pipedream", "PipeDream"
    flushes = searched = False

    def bubble(self, stages: int, chunks: int, micro_batches: int) -> Optional[Bubble]:
        return None


SCHEDULES = {one.name: one for one in (GPipe(), OneFOneB(), Interleaved(), ZBH1(), ModelParallel(), PipeDream())}
NAMES = tuple(one.name for one in SCHEDULES.values() if one.flushes)
DEFAULT = OneFOneB.name
OF_ANY_COUNT = (
    DEFAULT,
    *(one.name for one in SCHEDULES.values() if one.searched and not one.has_chunks and one.name != DEFAULT),
)
"""Those that can be the fastest and have no groups of micro-batches: for batches that change and stages that differ."""


@lru_cache(maxsize=64)
def _each(kind: Kind, micro_batches: int) -> Actions:
    """A pass of each micro-batch, which the lists of all stages share."""
    return [Action(kind, m) for m in range(micro_batches)]


@lru_cache(maxsize=64)
def _in_groups(stages: int, chunks: int, micro_batches: int) -> Tuple[Actions, Actions]:
    """Forward and backward passes of all chunks, each group of micro-batches in turn; of a stage like of any other."""
    groups = [range(m, m + stages) for m in range(0, micro_batches, stages)]
    forward = [Action(Kind.FORWARD, m, c) for group in groups for c in range(chunks) for m in group]
    backward = [Action(Kind.BACKWARD, m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    return forward, backward


def _ahead_in_groups(stage: Any, stages: int, chunks: int) -> Any:
    """Forward passes that a stage takes before it alternates, where micro-batches go round in groups of `stages`."""
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages


def _alternating(forward: Actions, backward: Actions, ahead: int) -> Actions:
    """`ahead` forward passes, then one forward and one backward in turn, then the backward passes left."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward)
    return forward[:ahead] + [action for pair in pairs for action in pair] + backward[len(forward) - ahead :]
