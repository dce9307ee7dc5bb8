"""1F1B as a list of actions: complete, in order, frugal, and free of deadlock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import EngineError
from megatron_ext.schedule import Action, Kind, actions

sizes = st.tuples(st.integers(1, 9), st.integers(1, 20))


def all_stages(stages: int, micro_batches: int) -> list[list[Action]]:
    return [actions("one_f_one_b", stage, stages, micro_batches) for stage in range(stages)]


@given(sizes)
def test_every_stage_does_each_micro_batch_once(size: tuple[int, int]) -> None:
    stages, micro_batches = size
    for stage, steps in enumerate(all_stages(stages, micro_batches)):
        wanted = {Kind.FORWARD, Kind.BACKWARD}
        if stage > 0:
            wanted |= {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}
        if stage < stages - 1:
            wanted |= {Kind.SEND_FORWARD, Kind.RECV_BACKWARD}
        assert Counter(steps) == Counter(Action(kind, m) for kind in wanted for m in range(micro_batches))


@given(sizes)
def test_a_stage_holds_no_more_micro_batches_than_stages_follow_it(size: tuple[int, int]) -> None:
    stages, micro_batches = size
    for stage, steps in enumerate(all_stages(stages, micro_batches)):
        held = most = 0
        for kind, _ in steps:
            held += (kind is Kind.FORWARD) - (kind is Kind.BACKWARD)
            most = max(most, held)
        assert held == 0
        assert most == min(stages - stage, micro_batches)


@given(sizes)
def test_no_stage_waits_for_ever(size: tuple[int, int]) -> None:
    """Replays all stages together: a receive waits for its send, and messages of one direction keep their order."""
    stages, micro_batches = size
    lists = all_stages(stages, micro_batches)
    sent: dict[tuple[Kind, int], list[int]] = {
        (kind, stage): [] for kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) for stage in range(stages)
    }
    source = {Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1), Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1)}
    done = [0] * stages
    while any(done[stage] < len(lists[stage]) for stage in range(stages)):
        before = list(done)
        for stage, steps in enumerate(lists):
            while done[stage] < len(steps):
                kind, m = steps[done[stage]]
                if kind in source:
                    send, step = source[kind]
                    queue = sent[send, stage + step]
                    if not queue:
                        break
                    assert queue.pop(0) == m
                elif (kind, stage) in sent:
                    sent[kind, stage].append(m)
                done[stage] += 1
        assert done != before, "every stage waits"


def test_an_unknown_schedule_is_named_with_the_known_ones() -> None:
    with pytest.raises(EngineError, match=r"'two_f'.*known: one_f_one_b"):
        actions("two_f", 0, 1, 1)
