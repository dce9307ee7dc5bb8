"""The actions of an iteration as data: per stage a list, which one executor runs and a simulator can replay.

`python -m megatron_ext.schedule` prints them as JSON (docs/formats.md, "Schedules").
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.schedules import NAMES, SCHEDULES, Action, Actions, Interleaved, Kind


def dealt(shares: Sequence[int]) -> Tuple[int, ...]:
    """The replica of each micro-batch of an iteration; `shares` is how many each replica takes.

    At every moment each has been dealt about its part of what was dealt so far: the k-th of a replica's n micro-batches
    (from 0) comes at (2 k + 1) / (2 n) of the iteration, the lower replica first (Webster's method). With equal shares
    replicas take micro-batches in turn, as in Megatron.
    """
    moments = [((2 * k + 1) / (2 * count), replica) for replica, count in enumerate(shares) for k in range(count)]
    return tuple(replica for _, replica in sorted(moments))


@lru_cache(maxsize=64)
def dealt_to(replica: int, shares: Tuple[int, ...]) -> Tuple[int, ...]:
    """The numbers of a replica's micro-batches among those of the iteration, rising."""
    return tuple(m for m, taker in enumerate(dealt(shares)) if taker == replica)


class SampleDivision(NamedTuple):
    """How the replicas of a stage share the samples of an iteration."""

    shares: Tuple[int, ...]
    """Micro-batches of each replica."""
    sizes: Tuple[int, ...]
    """Samples of each of its micro-batches, by replica."""
    streams: Tuple[int, ...] = ()
    """Copies of the model that each replica runs beside each other; empty: one each."""

    @property
    def samples(self) -> int:
        """Count the samples of the global batch."""
        return sum(count * size for count, size in zip(self.shares, self.sizes))

    @property
    def copies(self) -> Tuple[int, ...]:
        """Count the model's copies on each replica."""
        return self.streams or (1,) * len(self.shares)


def several(copies: Sequence[int]) -> Tuple[int, ...]:
    """Return copies as `Division.streams` has them."""
    return () if {*copies} <= {1} else tuple(copies)


def samples_of_halves(division: SampleDivision) -> Tuple[int, int]:
    """Count the samples of the even and the odd micro-batches of an iteration."""
    if len({*division.sizes}) == 1:  # they need not be dealt to be counted
        odd = sum(division.shares) // 2 * division.sizes[0]
    else:
        odd = sum(division.sizes[replica] for replica in dealt(division.shares)[1::2])
    return division.samples - odd, odd


@lru_cache(maxsize=64)
def firsts(division: SampleDivision) -> Tuple[int, ...]:
    """Where each micro-batch begins among the samples of its iteration, which follow each other as they are dealt."""
    sizes = [division.sizes[replica] for replica in dealt(division.shares)]
    return tuple(accumulate([0, *sizes[:-1]]))


VERSION = 1


def schedule(name: str, stages: int, chunks: int, micro_batches: int) -> List[Actions]:
    """The actions of one iteration, by stage, in the order in which a rank of that stage takes them. Raises
    EngineError: there is no such schedule, or not for these sizes."""
    if name not in NAMES:
        raise EngineError(f"schedule={name!r} is not known; known: {', '.join(NAMES)}")
    one = SCHEDULES[name]
    if one.has_chunks and (stages < 2 or chunks < 2):
        raise EngineError(f"schedule={name} needs at least 2 stages and 2 chunks, not {stages} and {chunks}")
    if not one.has_chunks and chunks != 1:
        raise EngineError(f"schedule={name} has 1 chunk on a stage, not {chunks}; {Interleaved.name} has more")
    if min(stages, micro_batches) < 1:
        raise EngineError(f"schedule={name} needs a stage and a micro-batch, not {stages} and {micro_batches}")
    return [
        _with_messages(one.passes(stage, stages, chunks, micro_batches), stage, stages, chunks)
        for stage in range(stages)
    ]


def replicated(name: str, replicas: Sequence[int], micro_batches: int) -> List[List[Actions]]:
    """The actions of one iteration by stage and replica, where stages have so many replicas.

    Micro-batch m is taken by replica m mod r of a stage of r: PipeDream's round robin (Narayanan et al. 2019, section
    3.2), here with a flush. A replica runs so many of its own micro-batches ahead as the replicas of its stage and of
    those after it can hold together. With one replica everywhere this is `schedule`.

    Raises:
        EngineError: there is no such schedule, or not for these sizes.
    """
    if name not in NAMES or SCHEDULES[name].has_chunks:
        known = ", ".join(one for one in NAMES if not SCHEDULES[one].has_chunks)
        raise EngineError(
            f"schedule={name} needs the same number of replicas at every stage; these schedules do not: {known}"
        )
    if not replicas or min(replicas) < 1 or micro_batches < max(replicas):
        raise EngineError(f"replicas={list(replicas)} cannot each take one of {micro_batches} micro-batches")
    stages = len(replicas)
    lists: List[List[Actions]] = []
    for stage, own in enumerate(replicas):
        after, before = (sum(replicas[stage:]) - 1) // own, sum(replicas[:stage]) // own
        lists.append([])
        for replica in range(own):
            passes = SCHEDULES[name].passes_of_rank(after, before, len(range(replica, micro_batches, own)))
            numbered = [action._replace(micro_batch=replica + own * action.micro_batch) for action in passes]
            lists[stage].append(_with_messages(numbered, stage, stages, 1))
    return lists


def _with_messages(computing: Actions, stage: int, stages: int, chunks: int) -> Actions:
    """A receive right before what needs it and a send right after what made it.

    All stages take the forward passes in one order, and the backward passes too, so the messages of a channel are
    received in the order in which they are sent.
    """
    steps: Actions = []
    for action in computing:
        kind, m, chunk = action
        if kind is Kind.FORWARD:
            kinds = [Kind.RECV_FORWARD, kind, Kind.SEND_FORWARD]
        elif kind is Kind.BACKWARD_WEIGHT:
            kinds = [kind]
        else:
            kinds = [Kind.RECV_BACKWARD, kind, Kind.SEND_BACKWARD]
        steps += [Action(k, m, chunk) for k in kinds if exists(k, chunk * stages + stage, stages * chunks)]
    return steps


def exists(kind: Kind, virtual_stage: int, virtual_stages: int) -> bool:
    """Whether a virtual stage does this at all: the first one receives no activations, and so on."""
    if kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD):
        return virtual_stage > 0
    if kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD):
        return virtual_stage < virtual_stages - 1
    return kind is not Kind.UPDATE


def as_json(stages: List[Actions], chunks: int, micro_batches: int) -> Dict[str, Any]:
    """The content of a schedule's file."""
    return {
        "version": VERSION,
        "stages": len(stages),
        "chunks": chunks,
        "micro_batches": micro_batches,
        "actions": [[[kind.value, m, chunk] for kind, m, chunk in actions] for actions in stages],
    }
