"""Pipeline schedules as data: per stage a list of actions, which one executor runs and a simulator can replay.

`python -m megatron_ext.schedule` prints one as JSON (docs/formats.md, "Schedules").

The model is cut into `stages * chunks` virtual stages; chunk `c` of stage `s` is number `c * stages + s`. So the
stages are a ring: activations go to the following stage and, from the last one, to the first one's next chunk;
gradients go the other way round.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, List, NamedTuple, Sequence

from megatron_ext.contract.errors import EngineError

VERSION = 1
MODEL_PARALLEL = "model_parallel"
NAMES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", MODEL_PARALLEL)


class Kind(Enum):
    """What an action does; the values name the timeline's events and are the words of a schedule's file."""

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
    """Of the weights, where micro-batches stream (`megatron_ext.contract.schedule.streams`); elsewhere it ends the
    iteration, and no schedule has it."""


class Action(NamedTuple):
    """One step of a rank: what, for which micro-batch, in which of its chunks.

    A receive names the chunk that takes the message, a send the chunk that made it.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


Actions = List[Action]


def schedule(name: str, stages: int, chunks: int, micro_batches: int) -> List[Actions]:
    """The actions of one iteration, by stage, in the order in which a rank of that stage takes them.

    Raises:
        EngineError: there is no such schedule, or not for these sizes.
    """
    if name not in NAMES:
        raise EngineError(f"schedule={name!r} is not known; known: {', '.join(NAMES)}")
    if name == "interleaved" and (stages < 2 or chunks < 2):
        raise EngineError(f"schedule=interleaved needs at least 2 stages and 2 chunks, not {stages} and {chunks}")
    if name != "interleaved" and chunks != 1:
        raise EngineError(f"schedule={name} has 1 chunk on a stage, not {chunks}; interleaved has more")
    if min(stages, micro_batches) < 1:
        raise EngineError(f"schedule={name} needs a stage and a micro-batch, not {stages} and {micro_batches}")
    return [
        _with_messages(computing(name, stage, stages, chunks, micro_batches), stage, stages, chunks)
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
    if name not in NAMES or name == "interleaved":
        known = ", ".join(one for one in NAMES if one != "interleaved")
        raise EngineError(
            f"schedule={name} needs the same number of replicas at every stage; these schedules do not: {known}"
        )
    if not replicas or min(replicas) < 1 or micro_batches < max(replicas):
        raise EngineError(f"replicas={list(replicas)} cannot each take one of {micro_batches} micro-batches")
    stages = len(replicas)
    lists: List[List[Actions]] = []
    for stage, own in enumerate(replicas):
        ahead, lag = (sum(replicas[stage:]) - 1) // own, sum(replicas[:stage]) // own
        lists.append([])
        for replica in range(own):
            passes = _flushing(name, ahead, lag, len(range(replica, micro_batches, own)))
            numbered = [action._replace(micro_batch=replica + own * action.micro_batch) for action in passes]
            lists[stage].append(_with_messages(numbered, stage, stages, 1))
    return lists


def computing(name: str, stage: int, stages: int, chunks: int, micro_batches: int) -> Actions:
    """The passes of a stage, without its messages."""
    if name == "interleaved":
        return _interleaved(stage, stages, chunks, micro_batches)
    return _flushing(name, stages - 1 - stage, stage, micro_batches)


def _flushing(name: str, ahead: int, lag: int, micro_batches: int) -> Actions:
    """The passes of a rank with one chunk.

    `ahead` forward passes come before the first backward pass, and ZB-H1's weight gradients `lag` micro-batches later.
    """
    if name == "gpipe":
        return _gpipe(micro_batches)
    if name in ("one_f_one_b", MODEL_PARALLEL):  # which is not a pipeline: a micro-batch after the other
        return _one_f_one_b(0 if name == MODEL_PARALLEL else ahead, micro_batches)
    return _zb_h1(ahead, lag, micro_batches)


def _gpipe(micro_batches: int) -> Actions:
    """GPipe (Huang et al. 2019): all forward passes, then all backward passes; holds every micro-batch."""
    return [Action(kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches)]


def _one_f_one_b(ahead: int, micro_batches: int) -> Actions:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, section 2.2.1).

    A stage runs as many forward passes ahead as there are stages after it, then alternates, so that it never
    holds activations of more than `stages - stage` micro-batches.
    """
    forward = [Action(Kind.FORWARD, m) for m in range(micro_batches)]
    backward = [Action(Kind.BACKWARD, m) for m in range(micro_batches)]
    return _alternating(forward, backward, ahead)


def _interleaved(stage: int, stages: int, chunks: int, micro_batches: int) -> Actions:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2); divides 1F1B's bubble by `chunks`.

    Micro-batches go round in groups of `stages`: a chunk takes the whole group, then the next chunk does. If the last
    group is not whole, it is made so and what belongs to no micro-batch is left out afterwards: to leave out whole
    micro-batches takes waits away and adds none, where smaller groups can deadlock. A stage holds activations of
    at most `2 * (stages - 1 - stage) + (chunks - 1) * stages + 1` pairs of micro-batch and chunk.
    """
    groups = [range(m, m + stages) for m in range(0, micro_batches, stages)]
    forward = [Action(Kind.FORWARD, m, c) for group in groups for c in range(chunks) for m in group]
    backward = [Action(Kind.BACKWARD, m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    whole = _alternating(forward, backward, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
    return [action for action in whole if action.micro_batch < micro_batches]


def _zb_h1(ahead: int, lag: int, micro_batches: int) -> Actions:
    """ZB-H1 (Qi et al. 2023, section 2.1): 1F1B whose weight gradients lag behind, by a micro-batch for
    each stage before.

    What lags fills the time in which 1F1B waits. A stage holds the input of at most `stages - stage`
    micro-batches before their input gradient, as in 1F1B, and something of at most `stages` before their weight
    gradient, which is what 1F1B's first stage holds.
    """
    steps: Actions = []
    for action in _one_f_one_b(ahead, micro_batches):
        m = action.micro_batch
        if action.kind is Kind.FORWARD:
            steps.append(action)
        else:
            steps.append(Action(Kind.BACKWARD_INPUT, m))
            if m >= lag:
                steps.append(Action(Kind.BACKWARD_WEIGHT, m - lag))
    return steps + [Action(Kind.BACKWARD_WEIGHT, m) for m in range(max(0, micro_batches - lag), micro_batches)]


def _alternating(forward: Actions, backward: Actions, ahead: int) -> Actions:
    """`ahead` forward passes, then one forward and one backward in turn, then the backward passes left."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward)
    return forward[:ahead] + [action for pair in pairs for action in pair] + backward[len(forward) - ahead :]


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
