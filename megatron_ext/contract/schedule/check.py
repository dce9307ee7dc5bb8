"""Reads a schedule from a file, and proves of any schedule that it runs to its end (docs/formats.md, "Schedules")."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, List, Sequence

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_json
from megatron_ext.contract.schedule.iteration import VERSION, exists, replicated, schedule
from megatron_ext.contract.schedule.replay import check_runs, named, rank_named
from megatron_ext.contract.schedule.schedules import Action, Actions, Kind

if TYPE_CHECKING:
    from megatron_ext.contract.plan import Plan

_BEFORE = {
    Kind.FORWARD: [Kind.RECV_FORWARD],
    Kind.SEND_FORWARD: [Kind.FORWARD],
    Kind.BACKWARD: [Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD],
    Kind.BACKWARD_INPUT: [Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD],
    Kind.BACKWARD_WEIGHT: [Kind.BACKWARD_INPUT],
    Kind.SEND_BACKWARD: [Kind.BACKWARD, Kind.BACKWARD_INPUT],
}
"""What must come before an action of this kind on the same stage, where the stage does it at all."""


def read(path: Path, stages: int, chunks: int, micro_batches: int) -> List[Actions]:
    """A schedule from its file. Raises EngineError: the file is not a schedule, is one for other sizes, or does not run
    to its end."""
    content = read_json(path, EngineError, "cannot be read as a schedule")
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
            f"kinds: {', '.join(kind.value for kind in Kind if kind is not Kind.UPDATE)}"
        ) from error
    check(lists, stages, chunks, micro_batches)
    return lists


def check(lists: List[Actions], stages: int, chunks: int, micro_batches: int) -> None:
    """Proves that a schedule is complete and runs to its end. Raises EngineError: it does not; the message names the
    stage and the action."""
    if len(lists) != stages:
        raise EngineError(f"the schedule has {len(lists)} stages, but the pipeline {stages}")
    check_replicas([[actions] for actions in lists], chunks, micro_batches)


def check_replicas(lists: List[List[Actions]], chunks: int, micro_batches: int) -> None:
    """The same for a schedule by stage and replica: micro-batch m is that of replica m mod r of a stage of r. Raises
    EngineError: as `check`."""
    for stage, replicas in enumerate(lists):
        for replica, actions in enumerate(replicas):
            own = range(replica, micro_batches, len(replicas))
            where = rank_named(stage, replica, len(replicas))
            check_complete(actions, where, stage, len(lists), chunks, own)
            check_order(actions, where)
    check_runs(lists)


def _action(kind: str, micro_batch: int, chunk: int) -> Action:
    if type(micro_batch) is not int or type(chunk) is not int:
        raise TypeError(f"{micro_batch!r}, {chunk!r} are not two whole numbers")
    return Action(Kind(kind), micro_batch, chunk)


def check_complete(
    actions: Sequence[Action], where: str, stage: int, stages: int, chunks: int, micro_batches: Iterable[int]
) -> None:
    """Whether a rank does each of its micro-batches, once; raises as `check`."""
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
                    raise EngineError(f"{where} never does {named(action)}")
                wanted.add(action)
    for action, times in found.items():
        if action not in wanted:
            raise EngineError(f"{where} does {named(action)}, which does not belong there")
        if times > 1:
            raise EngineError(f"{where} does {named(action)} {times} times")


def check_order(actions: Sequence[Action], where: str) -> None:
    """Whether a rank has what each action needs; raises as `check`."""
    everything, done = set(actions), set()
    for action in actions:
        for kind in _BEFORE.get(action.kind, []):
            needed = action._replace(kind=kind)
            if needed in everything and needed not in done:
                raise EngineError(f"{where} does {named(action)} before {named(needed)}")
        done.add(action)


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
