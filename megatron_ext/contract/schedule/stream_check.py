"""Proves of a stream that it runs to its end, that every pass meets the weights that it is to meet, and how many
versions of them a rank holds."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.check import check_complete, check_order
from megatron_ext.contract.schedule.replay import CheckedReplay, check_runs, named, rank_named
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.contract.schedule.streams import LATEST, STASHING, TWO, VERTICAL, Steps, Stream, StreamAction, end_of

_MOST_REPLAYED = 4
"""Periods after the pipeline is full, and what is left over, that a long stream is replayed for."""


class Proof(NamedTuple):
    """What a stream needs."""

    versions: Tuple[int, ...]
    """For each stage, the most versions of the weights that a rank holds at once: of each use, the newest among
    them."""
    activations: Tuple[int, ...]
    """For each stage, the most micro-batches that a rank holds between forward and backward pass."""


def prove(stream: Stream, micro_batches: int) -> Proof:
    """Prove a stream of so many micro-batches.

    A long one is proved by a shorter one: once the pipeline is full, all ranks do the same again after each period.
    Where their steps and what is under way are the same, relative to the micro-batch, at the end of two periods, they
    are at the end of every later one, too. The shorter one goes on for as many micro-batches as are under way at once,
    for only then is known how long versions of the full pipeline are used.

    Raises:
        EngineError: it does not run to its end, or a pass does not meet the right weights.
    """
    period = stream.period
    full = -(-stream.in_flight // period) * period
    until = 2 * full + (_MOST_REPLAYED - 1) * period
    is_long = micro_batches > until + period
    if is_long and _state(stream, full, micro_batches) == _state(stream, full + period, micro_batches):
        micro_batches = until + (micro_batches - until) % period
    stages = range(len(stream.replicas))
    lists = [
        [list(stream.steps(stage, replica, micro_batches)) for replica in range(stream.replicas[stage])]
        for stage in stages
    ]
    return check_stream(stream, lists, micro_batches)


def check_stream(stream: Stream, lists: Sequence[Sequence[Steps]], micro_batches: int) -> Proof:
    """Prove these steps, by stage and replica, as those of the stream; raises as `prove`."""
    first: Dict[int, int] = {}
    """The version that each micro-batch meets on the first stage."""
    versions, activations = [], []
    for stage, replicas in enumerate(lists):
        most = []
        for replica, steps in enumerate(replicas):
            where = rank_named(stage, replica, len(replicas))
            passes = [step.action for step in steps if step.kind is not Kind.UPDATE]
            check_complete(passes, where, stage, len(lists), 1, range(replica, micro_batches, len(replicas)))
            check_order(passes, where)
            _check_updates(stream, steps, where, stage, micro_batches)
            _check_versions(stream, steps, where, stage, first)
            most.append(versions_alive(steps))
        versions.append(max(most))
        activations.append(max(_held(steps) for steps in replicas))
    check_runs(lists)
    return Proof(tuple(versions), tuple(activations))


def versions_alive(steps: Steps) -> int:
    """The most versions that a rank holds at once: each from its update to its last use, and the newest."""
    last_use = {step.version: at for at, step in enumerate(steps) if step.kind in (Kind.FORWARD, Kind.BACKWARD)}
    alive, newest, most = {0}, 0, 1
    for at, step in enumerate(steps):
        if step.kind is Kind.UPDATE:
            newest = step.version
            alive = {version for version in alive if last_use.get(version, -1) > at} | {newest}
            most = max(most, len(alive))
    return most


def _held(steps: Steps) -> int:
    now = most = 0
    for step in steps:
        now += (step.kind is Kind.FORWARD) - (step.kind is Kind.BACKWARD)
        most = max(most, now)
    return most


def _check_updates(stream: Stream, steps: Steps, where: str, stage: int, micro_batches: int) -> None:
    """Each version is made once, in turn, after the backward passes that it learns from and before any later one."""
    made, left = 0, set()
    for step in steps:
        if step.kind is Kind.BACKWARD:
            left.add(step.micro_batch)
        elif step.kind is Kind.UPDATE:
            learned = stream.learned(stage, made + 1, micro_batches)
            if step.version != made + 1 or step.micro_batch != learned.stop - 1 or not left <= set(learned):
                raise EngineError(f"{where} has {named(step)} to version {step.version} out of turn")
            made += 1
            left = set()
    if left or made != stream.updates(stage, micro_batches):
        raise EngineError(f"{where} ends with {made} updates, but needs {stream.updates(stage, micro_batches)}")


def _check_versions(stream: Stream, steps: Steps, where: str, stage: int, first: Dict[int, int]) -> None:
    """Every pass meets a version that is made, and the one that the semantics ask for."""
    newest = 0
    met: Dict[int, int] = {}
    for step in steps:
        if step.kind is Kind.UPDATE:
            newest = step.version
        if step.kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        wanted = newest
        if step.kind is Kind.FORWARD:
            met[step.micro_batch] = step.version
            if stage == 0:
                first[step.micro_batch] = step.version
        if stream.semantics == VERTICAL:
            wanted = first[step.micro_batch] * stream.replicas[0] // stream.replicas[stage]
        elif stream.semantics == TWO:
            wanted = max(0, step.micro_batch // stream.replicas[stage] // stream.update_every - 1)
        elif stream.semantics == STASHING and step.kind is Kind.BACKWARD:
            wanted = met[step.micro_batch]
        if step.version != wanted or wanted > newest:
            raise EngineError(
                f"{where} does {named(step)} with version {step.version} of its weights; semantics="
                f"{stream.semantics} requires version {wanted}, and the newest is {newest}"
            )
    if stream.semantics != LATEST and any(
        step.version != met[step.micro_batch] for step in steps if step.kind is Kind.BACKWARD
    ):
        raise EngineError(f"{where} has a backward pass that meets other weights than its forward pass")


def _state(stream: Stream, end: int, micro_batches: int) -> object:
    """What ranks still have to do, and what is under way, when all have learned from the first `end` micro-batches and
    nothing more; relative to these. None where they cannot all stop there."""
    count = min(micro_batches, end + 2 * stream.in_flight + 2 * stream.period)
    lists = [
        [list(stream.steps(stage, replica, count)) for replica in range(replicas)]
        for stage, replicas in enumerate(stream.replicas)
    ]
    replay = CheckedReplay(lists, [end_of(steps, end) for replicas in lists for steps in replicas])
    if replay.go_on():
        return object()

    def relative(stage: int, step: StreamAction) -> Tuple[Kind, int, int]:
        version = step.version - end // (stream.update_every * stream.replicas[stage]) if step.version else 0
        return step.kind, step.micro_batch - end, version

    until = end + stream.in_flight
    waiting: List[object] = [
        [relative(stage, step) for step in steps[done:] if step.micro_batch < until]
        for (stage, _, _), steps, done in zip(replay.places, replay.actions, replay.taken)
    ]
    sent = {
        way: [message.micro_batch - end for message in messages]
        for way, messages in replay.messages.items()
        if messages
    }
    return waiting, sent
