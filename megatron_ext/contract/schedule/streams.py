"""PipeDream's schedules (Narayanan et al. 2019): micro-batches stream through the stages, and nothing is flushed.

Micro-batch m is taken by replica m mod r of a stage of r. Each stage updates its weights by itself, after every
`update_every` rounds of its replicas, so that a micro-batch meets weights of several versions: version v is what a
stage has after its v-th update. A stream begins with version 0 on an empty pipeline, and ends when the pipeline is
empty again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from megatron_ext.contract.keys import Word
from megatron_ext.contract.layout import lcm
from megatron_ext.contract.schedule.iteration import exists
from megatron_ext.contract.schedule.schedules import Action, Kind

STREAM_VERSION = 2
PIPEDREAM = "pipedream"


class Semantics(Word):
    """Which version of a stage's weights a micro-batch meets (megatron_ext/contract/schedule/streams.py)."""

    stashing = "stashing"
    """The newest version at the forward pass; the backward pass uses the same one."""
    vertical = "vertical"
    """Versions that have learned from the same micro-batches on all stages, in both passes."""
    latest = "latest"
    """The newest version in each pass: no memory for versions, but inexact gradients."""
    two = "two"
    """The version before the newest, in both passes (PipeDream-2BW); needs an `update_every` of at least the depth."""


STASHING, VERTICAL, LATEST, TWO = SEMANTICS = tuple(Semantics)


class StreamAction(NamedTuple):
    """An action of a stream: one of a schedule, for the weights of a `version`.

    An update makes its version; `micro_batch` is the last one that it learns from. A message has version 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    version: int = 0

    @property
    def action(self) -> Action:
        """Without its version."""
        return Action(self.kind, self.micro_batch, self.chunk)


Steps = List[StreamAction]


@dataclass(frozen=True)
class Stream:
    """A pipeline without a flush."""

    replicas: Tuple[int, ...]
    """Replicas of each stage."""
    semantics: Semantics = STASHING
    update_every: int = 1
    """Rounds of a stage's replicas between two updates."""
    depth: Optional[Tuple[int, ...]] = None
    """For each stage, how many forward passes a replica takes before its first backward pass; None: as many as keep all
    ranks busy."""

    def ahead(self, stage: int) -> int:
        """Forward passes that a replica of a stage takes before its first backward pass."""
        if self.depth is not None:
            return self.depth[stage]
        return (sum(self.replicas[stage:]) - 1) // self.replicas[stage]

    def learned(self, stage: int, version: int, micro_batches: int) -> range:
        """The micro-batches, of so many in all, from which the update to a version learns."""
        each = self.update_every * self.replicas[stage]
        return range(min((version - 1) * each, micro_batches), min(version * each, micro_batches))

    def updates(self, stage: int, micro_batches: int) -> int:
        """Count the updates of a stage in a stream of so many micro-batches."""
        return -(-micro_batches // (self.update_every * self.replicas[stage]))

    def met(self, stage: int, micro_batch: int) -> Tuple[int, int]:
        """The versions of a stage's weights in the forward and in the backward pass of a micro-batch."""
        every, replicas = self.update_every, self.replicas[stage]
        turn = micro_batch // replicas
        newest = max(0, turn - self.ahead(stage)) // every
        if self.semantics == LATEST:
            return newest, turn // every
        if self.semantics == TWO:
            version = max(0, turn // every - 1)
        elif self.semantics == VERTICAL:
            first = self.replicas[0]
            entered = max(0, micro_batch // first - self.ahead(0)) // every
            version = entered * first // replicas
        else:
            version = newest
        return version, version

    @property
    def period(self) -> int:
        """Micro-batches after which every rank does the same again, once the pipeline is full."""
        return self.update_every * lcm(self.replicas)

    @property
    def in_flight(self) -> int:
        """Micro-batches that are under way at once, or wait for an update, at most."""
        return max(
            replicas * (self.ahead(stage) + 1 + self.update_every) for stage, replicas in enumerate(self.replicas)
        )

    def steps(self, stage: int, replica: int, micro_batches: int) -> Iterator[StreamAction]:
        """What a replica does in a stream of so many micro-batches: 1F1B without an end.

        Two streams that differ in their length alone are equal up to the shorter one's last forward pass.
        """
        own = range(replica, micro_batches, self.replicas[stage])
        ahead, made = min(self.ahead(stage), len(own)), 0
        for turn in range(len(own) + ahead):
            if turn < len(own):
                yield from self._with_messages(stage, own[turn], Kind.FORWARD)
            if turn >= ahead:
                yield from self._with_messages(stage, own[turn - ahead], Kind.BACKWARD)
                if (turn - ahead + 1) % self.update_every == 0:
                    made += 1
                    yield self._update(stage, made, micro_batches)
        if made < self.updates(stage, micro_batches):  # the last rounds are not whole
            yield self._update(stage, made + 1, micro_batches)

    def awaited(self, stage: int, micro_batches: range, newest: int) -> Set[int]:
        """The versions before the newest one that these micro-batches of a replica, in turn, meet in forward passes."""
        found: Set[int] = set()
        for m in micro_batches:
            version, _ = self.met(stage, m)
            if version >= newest:
                break
            found.add(version)
        return found

    def _with_messages(self, stage: int, m: int, kind: Kind) -> Steps:
        forward, backward = self.met(stage, m)
        stages = len(self.replicas)
        if kind is Kind.FORWARD:
            every = (
                StreamAction(Kind.RECV_FORWARD, m),
                StreamAction(kind, m, version=forward),
                StreamAction(Kind.SEND_FORWARD, m),
            )
        else:
            every = (
                StreamAction(Kind.RECV_BACKWARD, m),
                StreamAction(kind, m, version=backward),
                StreamAction(Kind.SEND_BACKWARD, m),
            )
        return [step for step in every if exists(step.kind, stage, stages)]

    def _update(self, stage: int, version: int, micro_batches: int) -> StreamAction:
        return StreamAction(Kind.UPDATE, self.learned(stage, version, micro_batches).stop - 1, version=version)


def end_of(steps: Sequence[StreamAction], micro_batches: int) -> int:
    """How many of a replica's steps it takes until its stage has learned from the first so many micro-batches."""
    return next(
        (at + 1 for at, step in enumerate(steps) if step.kind is Kind.UPDATE and step.micro_batch >= micro_batches - 1),
        len(steps),
    )


def stream_as_json(stream: Stream, micro_batches: int) -> Dict[str, Any]:
    """The content of a stream's file (docs/formats.md, "Streams")."""
    return {
        "version": STREAM_VERSION,
        "replicas": list(stream.replicas),
        "semantics": stream.semantics,
        "update_every": stream.update_every,
        "depth": [stream.ahead(stage) for stage in range(len(stream.replicas))],
        "micro_batches": micro_batches,
        "actions": [
            [[step.kind.value, step.micro_batch, step.version] for step in stream.steps(stage, replica, micro_batches)]
            for stage, replicas in enumerate(stream.replicas)
            for replica in range(replicas)
        ],
    }
