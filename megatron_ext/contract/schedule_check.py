"""Reads a schedule from a file, and proves of any schedule that it runs to its end (docs/formats.md, "Schedules")."""

from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, List, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular, why
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedules import VERSION, Action, Actions, Kind, exists, replicated, schedule

_BEFORE = {
    Kind.FORWARD: [Kind.RECV_FORWARD],
    Kind.SEND_FORWARD: [Kind.FORWARD],
    Kind.BACKWARD: [Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD],
    Kind.BACKWARD_INPUT: [Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD],
    Kind.BACKWARD_WEIGHT: [Kind.BACKWARD_INPUT],
    Kind.SEND_BACKWARD: [Kind.BACKWARD, Kind.BACKWARD_INPUT],
}
"""What must come before an action of this kind on the same stage, where the stage does it at all."""

_SENDER = {Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1), Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1)}
"""What a receive waits for, and where: so many virtual stages on."""


def read(path: Path, stages: int, chunks: int, micro_batches: int) -> List[Actions]:
    """A schedule from its file.

    Raises:
        EngineError: the file is no schedule, is one for other sizes, or does not run to its end.
    """
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:  # the last one of lists within lists
        raise EngineError(f"{path}: cannot be read as a schedule: {why(error)}") from error
    try:
        return parsed(content, stages, chunks, micro_batches)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from error


def parsed(content: Any, stages: int, chunks: int, micro_batches: int) -> List[Actions]:
    """The schedule that a file with this content holds; raises as `read` does."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise EngineError(f"not a schedule of version {VERSION}")
    for key, wanted, meaning in (
        ("stages", stages, "parallel.pipeline"),
        ("chunks", chunks, "parallel.chunks"),
        (
            "micro_batches",
            micro_batches,
            "parallel.global_batch_size / (parallel.data * parallel.micro_batch_size)",
        ),
    ):
        if content.get(key) != wanted:
            raise EngineError(f"{key}={content.get(key)}, but the plan has {wanted} ({meaning}); make them equal")
    try:
        lists = [[_action(*item) for item in actions] for actions in content["actions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"actions must be, by stage, a list of [kind, micro-batch, chunk]: {error}; "
            f"kinds: {', '.join(kind.value for kind in Kind)}"
        ) from error
    check(lists, stages, chunks, micro_batches)
    return lists


def check(lists: List[Actions], stages: int, chunks: int, micro_batches: int) -> None:
    """Proves that a schedule is complete and runs to its end.

    Raises:
        EngineError: it does not; the message names the stage and the action.
    """
    if len(lists) != stages:
        raise EngineError(f"the schedule has {len(lists)} stages, but the pipeline {stages}")
    check_replicas([[actions] for actions in lists], chunks, micro_batches)


def check_replicas(lists: List[List[Actions]], chunks: int, micro_batches: int) -> None:
    """The same for a schedule by stage and replica: micro-batch m is that of replica m mod r of a stage of r.

    Raises:
        EngineError: as `check`.
    """
    for stage, replicas in enumerate(lists):
        for replica, actions in enumerate(replicas):
            own = range(replica, micro_batches, len(replicas))
            where = _where(stage, replica, len(replicas))
            _check_complete(actions, where, stage, len(lists), chunks, own)
            _check_order(actions, where)
    _check_runs(lists, chunks)


def check_forward(lists: List[List[Actions]], chunks: int, micro_batches: int) -> None:
    """Proves that forward passes alone, as an evaluation takes them, are complete and run to their end.

    They are by stage and replica, as in `check_replicas`.

    Raises:
        EngineError: as `check`.
    """
    for stage, replicas in enumerate(lists):
        for replica, actions in enumerate(replicas):
            where = _where(stage, replica, len(replicas))
            for m in range(replica, micro_batches, len(replicas)):
                for action in (Action(Kind.FORWARD, m, chunk) for chunk in range(chunks)):
                    if action not in actions:
                        raise EngineError(f"{where} never does {_named(action)}")
            _check_order(actions, where)
    _check_runs(lists, chunks)


def _action(kind: str, micro_batch: int, chunk: int) -> Action:
    if type(micro_batch) is not int or type(chunk) is not int:
        raise TypeError(f"{micro_batch!r}, {chunk!r} are not two whole numbers")
    return Action(Kind(kind), micro_batch, chunk)


def _check_complete(
    actions: Actions, where: str, stage: int, stages: int, chunks: int, micro_batches: Iterable[int]
) -> None:
    found = Counter(actions)
    wanted = set()
    for m in micro_batches:
        for chunk in range(chunks):
            whole = Action(Kind.BACKWARD_INPUT, m, chunk) not in found
            left_out = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if whole else [Kind.BACKWARD]
            for kind in Kind:
                if kind in left_out or not exists(kind, chunk * stages + stage, chunks * stages):
                    continue
                action = Action(kind, m, chunk)
                if action not in found:
                    raise EngineError(f"{where} never does {_named(action)}")
                wanted.add(action)
    for action, times in found.items():
        if action not in wanted:
            raise EngineError(f"{where} has nothing to do with {_named(action)}")
        if times > 1:
            raise EngineError(f"{where} does {_named(action)} {times} times")


def _check_order(actions: Actions, where: str) -> None:
    everything, done = set(actions), set()
    for action in actions:
        for kind in _BEFORE.get(action.kind, []):
            needed = action._replace(kind=kind)
            if needed in everything and needed not in done:
                raise EngineError(f"{where} does {_named(action)} before {_named(needed)}")
        done.add(action)


def _check_runs(lists: List[List[Actions]], chunks: int) -> None:
    """Replays all ranks together: a receive waits for its send, and a channel keeps the order of its messages.

    Sends never wait, so each rank is a sequential process that only receives can block, and whether all come to
    their end does not depend on how long anything takes (Kahn 1974): one replay proves it for every timing.
    """
    stages = len(lists)
    sent: Dict[Tuple[Kind, int, int, int], Deque[Action]] = {}
    """By kind of send, sending stage, its replica, and the receiving replica."""
    ranks = [(stage, replica) for stage, replicas in enumerate(lists) for replica in range(len(replicas))]
    done = dict.fromkeys(ranks, 0)
    moved = True
    while moved:
        moved = False
        for stage, replica in ranks:
            actions = lists[stage][replica]
            while done[stage, replica] < len(actions):
                action = actions[done[stage, replica]]
                if action.kind in _SENDER:
                    send, step = _SENDER[action.kind]
                    sender = (stage + step) % stages
                    channel = sent.get((send, sender, action.micro_batch % len(lists[sender]), replica))
                    if not channel:
                        break
                    chunk, sender = divmod(action.chunk * stages + stage + step, stages)
                    wanted, comes = Action(send, action.micro_batch, chunk), channel.popleft()
                    if comes != wanted:
                        raise EngineError(
                            f"stage {stage} waits for {_named(wanted)} of stage {sender}, but {_named(comes)} comes "
                            "first: receives must have the order of their sends"
                        )
                elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                    receiver = (stage + (1 if action.kind is Kind.SEND_FORWARD else -1)) % stages
                    to = action.micro_batch % len(lists[receiver])
                    sent.setdefault((action.kind, stage, replica, to), deque()).append(action)
                done[stage, replica] += 1
                moved = True
    stuck = [
        f"{_where(s, r, len(lists[s]))} at {_named(lists[s][r][at])}"
        for (s, r), at in done.items()
        if at < len(lists[s][r])
    ]
    if stuck:
        raise EngineError(f"deadlock: for ever wait {', '.join(stuck)}")


def _where(stage: int, replica: int, replicas: int) -> str:
    return f"stage {stage}" if replicas == 1 else f"replica {replica} of stage {stage}"


def _named(action: Action) -> str:
    return f"{action.kind.value} of micro-batch {action.micro_batch}, chunk {action.chunk}"


def actions_of(plan: Plan, stage: int, replica: int) -> Actions:
    """What a replica's rank of a stage does in an iteration: by the plan's schedule, or as its file says.

    Micro-batches are numbered over those of the replica, or, where stages have unlike numbers of replicas, of all.
    """
    if not plan.layout.even:
        count = plan.global_batch_size // plan.micro_batch_size
        return replicated(plan.schedule, plan.layout.replicas, count)[stage][replica]
    count = plan.micro_batches[replica]
    if plan.schedule_file is None:
        return schedule(plan.schedule, plan.pipeline, plan.chunks, count)[stage]
    return read(plan.folder / plan.schedule_file, plan.pipeline, plan.chunks, count)[stage]
