"""Streams as lists of steps: they run to their end, every pass meets the weights that it is to meet, few are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.iteration import schedule
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.contract.schedule.stream_check import Proof, check_stream, prove, versions_alive
from megatron_ext.contract.schedule.streams import (
    LATEST,
    SEMANTICS,
    STASHING,
    TWO,
    VERTICAL,
    Stream,
    StreamAction,
    end_of,
)
from megatron_ext.schedule import main
from tests.support import cases

COUNTS = (1, 7, 24, 37)


def compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to share out ranks among stages."""
    if not ranks:
        yield ()
    for first in range(1, ranks + 1):
        yield from ((first, *others) for others in compositions(ranks - first))


def stream_of(replicas: tuple[int, ...], semantics: str, update_every: int = 1) -> Stream:
    """With the least interval that two versions need."""
    found = Stream(replicas, semantics, update_every)
    deepest = max(found.ahead(stage) for stage in range(len(replicas)))
    return replace(found, update_every=max(update_every, deepest)) if semantics == TWO else found


def lists_of(stream: Stream, count: int) -> list[list[list[StreamAction]]]:
    return [
        [list(stream.steps(stage, replica, count)) for replica in range(replicas)]
        for stage, replicas in enumerate(stream.replicas)
    ]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_layout_runs_to_its_end_with_the_right_weights(ranks: int, semantics: str) -> None:
    layouts = cases.drawn(compositions(ranks), 16, always=[(1,) * ranks, (ranks - 1, 1), (1, ranks - 1)])
    for replicas in layouts:
        for count in COUNTS:
            for every in (1, 3) if ranks < 5 else (1,):
                stream = stream_of(replicas, semantics, every)
                proof = prove(stream, count)
                if semantics == TWO:
                    assert max(proof.versions) <= 2
                if semantics == LATEST:
                    assert set(proof.versions) == {1}
                if semantics == STASHING:
                    assert proof.versions <= tuple(stream.ahead(stage) + 1 for stage in range(len(replicas)))


@pytest.mark.parametrize(
    ("stream", "versions"),
    [
        (Stream((1, 1, 1, 1)), (4, 3, 2, 1)),
        (Stream((15, 1)), (2, 1)),
        (Stream((1, 1, 1, 1), VERTICAL), (4, 4, 4, 4)),
        (Stream((1, 1, 1, 1), LATEST), (1, 1, 1, 1)),
        (Stream((1, 1, 1, 1), TWO, 3), (2, 2, 2, 2)),
        (Stream((1, 1, 1, 1), depth=(1, 1, 1, 0)), (2, 2, 2, 1)),
    ],
    ids=lambda value: str(value.replicas) + value.semantics if isinstance(value, Stream) else "",
)
def test_the_most_versions_alive_are_the_memory(stream: Stream, versions: tuple[int, ...]) -> None:
    assert prove(stream, 100).versions == versions


@pytest.mark.parametrize(("stages", "count"), [(2, 3), (4, 25), (7, 200)])
def test_a_straight_stream_without_its_updates_is_one_f_one_b(stages: int, count: int) -> None:
    stream = Stream((1,) * stages)
    lists = [[step.action for step in steps if step.kind is not Kind.UPDATE] for (steps,) in lists_of(stream, count)]
    assert lists == schedule("one_f_one_b", stages, 1, count)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("replicas", [(15, 1), (3, 2, 1), (1, 3), (2, 2), (1,) * 7, (1,) * 12], ids=str)
def test_the_proof_of_a_long_stream_is_that_of_the_whole(replicas: tuple[int, ...], semantics: str) -> None:
    stream = stream_of(replicas, semantics)
    count = 40 * stream.period + 5
    assert prove(stream, count) == check_stream(stream, lists_of(stream, count), count)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (3, 1), (1, 3), (2, 3)], ids=str)
def test_what_a_rank_keeps_at_an_update_is_what_it_meets_later(replicas: tuple[int, ...], semantics: str) -> None:
    """The engine's rule, which looks at the passes under way and those to come, against the whole list."""
    count, stream = 31, stream_of(replicas, semantics)
    for stage, lists in enumerate(lists_of(stream, count)):
        for replica, steps in enumerate(lists):
            own = range(replica, count, replicas[stage])
            under_way: dict[int, int] = {}
            begun, most = 0, 1
            for step in steps:
                if step.kind is Kind.FORWARD:
                    under_way[step.micro_batch] = step.version
                    begun += 1
                elif step.kind is Kind.BACKWARD:
                    del under_way[step.micro_batch]
                elif step.kind is Kind.UPDATE:
                    held = set() if semantics == LATEST else set(under_way.values())
                    most = max(most, len(held | stream.awaited(stage, own[begun:], step.version) | {step.version}))
            assert most == versions_alive(steps)


def test_streams_of_unlike_lengths_begin_alike() -> None:
    """So that one that is to end early need not begin anew."""
    stream, shorter, longer = Stream((3, 1, 2)), 20, 50
    for stage, lists in enumerate(lists_of(stream, shorter)):
        for replica, steps in enumerate(lists):
            last = max(at for at, step in enumerate(steps) if step.kind is Kind.FORWARD)
            assert steps[:last] == list(stream.steps(stage, replica, longer))[:last]


def test_all_ranks_can_stop_at_the_end_of_any_iteration() -> None:
    steps = list(Stream((2, 1)).steps(0, 0, 9))
    assert [steps[end_of(steps, count) - 1] for count in (1, 2, 3, 9)] == [
        StreamAction(Kind.UPDATE, 1, version=1),
        StreamAction(Kind.UPDATE, 1, version=1),
        StreamAction(Kind.UPDATE, 3, version=2),
        StreamAction(Kind.UPDATE, 8, version=5),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: step._replace(version=0) if step.kind is Kind.BACKWARD else step, "requires version 1"),
        (lambda step: step._replace(version=9) if step.kind is Kind.FORWARD else step, "requires version"),
        (lambda step: None if step == StreamAction(Kind.UPDATE, 3, version=4) else step, "out of turn"),
        (lambda step: None if step == StreamAction(Kind.SEND_FORWARD, 3) else step, "never does forward-send"),
    ],
    ids=["backward", "forward", "update", "message"],
)
def test_what_is_wrong_is_found(change: object, message: str) -> None:
    stream = Stream((1, 1))
    lists = lists_of(stream, 8)
    lists[0][0] = [new for step in lists[0][0] if (new := change(step)) is not None]  # type: ignore[operator]
    with pytest.raises(EngineError, match=message):
        check_stream(stream, lists, 8)


def test_a_stage_that_runs_further_ahead_than_the_one_before_waits_for_ever() -> None:
    with pytest.raises(EngineError, match="deadlock"):
        prove(Stream((1, 1, 1), depth=(0, 1, 0)), 20)


def test_the_command_prints_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipedream", "--replicas", "2-1", "--micro-batches", "5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["version"], printed["depth"], len(printed["actions"])) == (2, [1, 0], 3)
    assert printed["actions"][2][:4] == [
        ["forward-recv", 0, 0],
        ["forward-compute", 0, 0],
        ["backward-compute", 0, 0],
        ["backward-send", 0, 0],
    ]
    assert prove(Stream((2, 1)), 5) == Proof((2, 1), (2, 1))
