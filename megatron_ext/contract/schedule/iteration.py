"""The actions of an iteration as data: per stage a list, which one executor runs and a simulator can replay.

`python -m megatron_ext.schedule` prints them as JSON (docs/formats.md, "Schedules").
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.schedules import NAMES, SCHEDULES, Action, Actions, Interleaved, Kind

VERSION = 1


def schedule(name: str, stages: int, chunks: int, micro_batches: int) -> List[Actions]:
    """The actions of one iteration, by stage, in the order in which a rank of that stage takes them.

    Raises:
        EngineError: there is no such schedule, or not for these sizes.
    """
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
