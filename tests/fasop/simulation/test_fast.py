"""The fast simulation says what the replay of the engine's own schedule says, to the last bit: its compiled loops
as its arrays."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema.experiment import Schedule
from fasop.simulation import blocking, rendezvous, vectorised
from fasop.simulation.ranks.replay import StageTimes, simulate
from fasop.simulation.steps import steps
from fasop.simulation.vectorised import Times, Traffic, ends
from fasop.simulation.vectorised import longest as longest_path
from megatron_ext.contract.schedule.iteration import as_json, schedule
from tests.support.fasop.random_pipelines import FLUSHING

SCHEDULES = (*FLUSHING, Schedule.model_parallel)
TIMES = st.floats(0, 100, allow_nan=False)


def uncompiled() -> AbstractContextManager[None]:
    """While it lasts, arrays are used, as where no C compiler was there."""
    return patch.object(vectorised, "compiled", None)


def test_loops_are_compiled_where_a_compiler_is() -> None:
    assert vectorised.compiled is not None or shutil.which("cc") is None, "pip install -e . builds them"


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 12), st.integers(2, 3), st.data())
def test_every_stage_ends_when_the_replay_says(
    name: Schedule, stages: int, micro_batches: int, chunks: int, data: st.DataObject
) -> None:
    stages, chunks = (max(2, stages), chunks) if name is Schedule.interleaved else (stages, 1)
    parts = stages * chunks

    def rows(count: int) -> np.ndarray:
        return np.array(data.draw(st.lists(TIMES, min_size=2 * count, max_size=2 * count))).reshape(count, 2)

    times = Times(rows(parts), rows(parts), rows(stages), rows(stages), np.zeros((stages, 2)))
    found = ends(name, micro_batches, times)
    with uncompiled():
        assert np.array_equal(found, ends(name, micro_batches, times))
    lists = as_json(schedule(name, stages, chunks, micro_batches), chunks, micro_batches)
    for number in range(2):
        forward, backward, ahead, back, _ = (kind[:, number].tolist() for kind in times)
        stage_times = [
            StageTimes(forward=forward[s::stages], backward=backward[s::stages], send_forward=f, send_backward=b)
            for s, (f, b) in enumerate(zip(ahead, back, strict=True))
        ]
        replayed = [0.0] * stages
        for event in simulate(lists, stage_times):
            replayed[event.stage] = event.end
        assert found[:, number].tolist() == replayed


@settings(max_examples=200)
@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 12), st.integers(2, 3), st.integers(0, 2**32 - 1))
def test_links_that_are_occupied_for_a_part_of_a_message_are_free_when_the_replay_says(
    name: Schedule, stages: int, micro_batches: int, chunks: int, seed: int
) -> None:
    """Messages that never queue, that sometimes do and that always do, by links that stages have one or two of."""
    stages, chunks = (max(2, stages), chunks) if name is Schedule.interleaved else (stages, 1)
    random, parts, many = np.random.default_rng(seed), stages * chunks, 11
    longest = 10.0 ** random.integers(-2, 2, many)
    passes, hops = random.random((2, parts, many)), longest * random.random((2, stages, many))
    busy, begin = hops * random.random((2, stages, many)), random.random((stages, many))
    out = random.random(stages) < random.choice([0.0, 0.5, 1.0]) if stages != 2 else np.ones(2, bool)
    times, traffic = Times(*passes, *hops, begin), Traffic(*busy, out)  # type: ignore[call-arg]
    after = random.random((stages, many))
    found, why = ends(name, micro_batches, times, traffic), longest_path(name, micro_batches, times, after, traffic)
    with uncompiled():
        assert np.array_equal(found, ends(name, micro_batches, times, traffic))
        path = longest_path(name, micro_batches, times, after, traffic)
    assert all(np.array_equal(one, other) for one, other in zip(why, path, strict=True))
    lists = as_json(schedule(name, stages, chunks, micro_batches), chunks, micro_batches)
    for number in range(many):
        stage_times = [
            StageTimes(
                forward=passes[0, s::stages, number].tolist(),
                backward=passes[1, s::stages, number].tolist(),
                send_forward=hops[0, s, number],
                send_backward=hops[1, s, number],
                busy_forward=busy[0, s, number],
                busy_backward=busy[1, s, number],
                one_way_out=bool(out[s]),
            )
            for s in range(stages)
        ]
        replayed = [0.0] * stages
        for event in simulate(lists, stage_times, begin[:, number].tolist()):
            replayed[event.stage] = event.end
        assert found[:, number].tolist() == replayed
    assert why.total == pytest.approx((found + after).max(axis=0), rel=1e-11)
    slower = times._replace(forward=times.forward + random.random((parts, many)))
    path = why.total + (why.forward * (slower.forward - times.forward)).sum(axis=0)
    assert ((ends(name, micro_batches, slower, traffic) + after).max(axis=0) >= path * (1 - 1e-11)).all()
    assert why.messages is not None
    more = 3 * random.random((2, stages, many))
    slower = times._replace(send_forward=hops[0] + more[0], send_backward=hops[1] + more[1])
    path = why.total + (why.messages * more).sum(axis=(0, 1))
    taken = ends(name, micro_batches, slower, Traffic(busy[0] + more[0], busy[1] + more[1], out)) + after
    assert (taken.max(axis=0) >= path * (1 - 1e-11)).all()


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_stages_that_wait_for_what_they_send_end_when_the_replay_says(
    stages: int, micro_batches: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    times = Times(*random.random((5, stages, 2)))
    after = random.random((stages, 2))
    found, why = blocking.ends(micro_batches, times), blocking.longest(micro_batches, times, after)
    lists = as_json(schedule("one_f_one_b", stages, 1, micro_batches), 1, micro_batches)
    for number in range(2):
        forward, backward, ahead, back, begin = (kind[:, number].tolist() for kind in times)
        stage_times = [
            StageTimes(forward=[f], backward=[b], send_forward=a, send_backward=z)
            for f, b, a, z in zip(forward, backward, ahead, back, strict=True)
        ]
        replayed = [0.0] * stages
        for event in simulate(lists, stage_times, begin, blocking=True):
            replayed[event.stage] = event.end
        assert found[:, number].tolist() == replayed
    assert why.total.tolist() == (found + after).max(axis=0).tolist()
    slower = times._replace(backward=times.backward + random.random((stages, 2)))
    path = why.total + (why.backward * (slower.backward - times.backward)).sum(axis=0)
    assert ((blocking.ends(micro_batches, slower) + after).max(axis=0) >= path * (1 - 1e-11)).all()


@given(st.integers(2, 6), st.integers(1, 13), st.integers(2, 3), st.integers(0, 2**32 - 1))
def test_megatrons_interleaved_stages_wait_for_both_ends_of_a_message(
    stages: int, micro_batches: int, chunks: int, seed: int
) -> None:
    """Beside a replay of one pipeline in plain Python, and in the order of passes of the schedule."""
    random, parts = np.random.default_rng(seed), stages * chunks
    passes, hops = random.random((2, parts, 2)), 10.0 ** random.integers(-2, 2) * random.random((2, stages, 2))
    times, after = Times(*passes, *hops, random.random((stages, 2))), random.random((stages, 2))  # type: ignore[call-arg]
    found, why = blocking.ends(micro_batches, times), blocking.longest(micro_batches, times, after)
    lists = as_json(schedule("interleaved", stages, chunks, micro_batches), chunks, micro_batches)
    for number in range(2):
        assert found[:, number] == pytest.approx(_replayed(times, chunks, micro_batches, number))
        stage_times = [
            StageTimes(
                forward=passes[0, s::stages, number].tolist(),
                backward=passes[1, s::stages, number].tolist(),
                send_forward=hops[0, s, number],
                send_backward=hops[1, s, number],
            )
            for s in range(stages)
        ]
        events = simulate(lists, stage_times, times.start[:, number].tolist(), blocking=True)
        for s, actions in enumerate(lists["actions"]):
            own = [event for event in events if event.stage == s]
            assert own[-1].end == found[s, number]
            done = sorted((event.kind, event.micro_batch, event.chunk) for event in own)
            assert done == sorted((kind, m, chunk) for kind, m, chunk in actions)
            order = [(e.kind, e.micro_batch, e.chunk) for e in own if e.kind.endswith("compute")]
            assert order == [tuple(action) for action in actions if action[0].endswith("compute")]
    assert why.total == pytest.approx((found + after).max(axis=0))
    slower = times._replace(backward=times.backward + random.random((parts, 2)))
    path = why.total + (why.backward * (slower.backward - times.backward)).sum(axis=0)
    assert ((blocking.ends(micro_batches, slower) + after).max(axis=0) >= path * (1 - 1e-11)).all()


def _replayed(times: Times, chunks: int, micro_batches: int, column: int) -> list[float]:
    """When each stage ends: sweeps over all stages until no operation moves, each as late as what it waits for."""
    stages = len(times.start)
    lists = rendezvous.operations(stages, chunks, micro_batches)
    came: dict[tuple[object, bool], float] = {}
    over: dict[rendezvous.Message, float] = {}
    queues = {
        (stage, way): [one.of for one in own if one.do.name == "SEND" and one.of.way == way]
        for stage, own in enumerate(lists)
        for way in (0, 1)
    }
    while True:
        ends, known = [], (dict(came), dict(over))
        for stage, own in enumerate(lists):
            now = float(times.start[stage, column])
            for do, of in own:
                if do.name in ("FORWARD", "BACKWARD"):
                    now += (times.forward if do.name == "FORWARD" else times.backward)[of[1] * stages + stage, column]
                elif do.name in ("SEND", "RECEIVE"):
                    came[of, do.name == "SEND"] = now
                else:
                    now = max(now, over.get(of, 0.0))
            ends.append(now)
        for (stage, way), messages in queues.items():
            takes, free = (times.send_forward, times.send_backward)[way][stage, column], 0.0
            for message in messages:
                free = over[message] = max(came[message, True], came[message, False], free) + takes
        if known == (came, over):
            return ends


@given(st.integers(1, 6), st.integers(1, 8), st.lists(TIMES, min_size=6, max_size=6))
def test_a_stage_that_begins_later_is_as_one_whose_first_pass_is_longer(
    stages: int, micro_batches: int, late: list[float]
) -> None:
    """Of the first stage: it waits for nobody before its first pass."""
    one = np.ones((stages, 1))
    start = np.zeros((stages, 1))
    start[0] = late[0]
    on_time = ends(Schedule.one_f_one_b, micro_batches, Times(one, one, one, one, 0 * start))
    behind = ends(Schedule.one_f_one_b, micro_batches, Times(one, one, one, one, start))
    assert behind[0] == pytest.approx(on_time[0] + late[0])


@pytest.mark.parametrize(("stages", "micro_batches"), [(16, 32), (32, 16), (12, 40), (7, 9)])
@pytest.mark.parametrize(("name", "slices"), [(Schedule.zb_h1, 6)])
def test_stages_two_apart_share_their_slices(name: Schedule, slices: int, stages: int, micro_batches: int) -> None:
    """So a simulation takes a few operations for each step of the pipeline, however many stages it has."""
    assert len(steps(name, stages, 1, micro_batches).steps) <= slices * (stages + micro_batches)
