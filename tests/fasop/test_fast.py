"""The fast simulation says what the replay of the engine's own schedule says, to the last bit."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import Schedule
from fasop.fast import KNOWN, Times, ends
from fasop.simulate import StageTimes, simulate
from megatron_ext.schedule import as_json, schedule

TIMES = st.floats(0, 100, allow_nan=False)


@given(st.sampled_from(KNOWN), st.integers(1, 9), st.integers(1, 12), st.integers(2, 3), st.data())
def test_every_stage_ends_when_the_replay_says(
    name: Schedule, stages: int, micro_batches: int, chunks: int, data: st.DataObject
) -> None:
    stages, chunks = (max(2, stages), chunks) if name is Schedule.interleaved else (stages, 1)
    parts = stages * chunks

    def rows(count: int) -> np.ndarray:
        return np.array(data.draw(st.lists(TIMES, min_size=2 * count, max_size=2 * count))).reshape(count, 2)

    times = Times(rows(parts), rows(parts), rows(stages), rows(stages), np.zeros((stages, 2)))
    found = ends(name, micro_batches, times)
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


def test_thousands_of_pipelines_take_less_than_a_second() -> None:
    ones = np.random.default_rng(1).random((5, 8, 10_000))
    before = time.process_time()
    ends(Schedule.one_f_one_b, 16, Times(*ones))
    assert time.process_time() - before < 1
