"""The fast simulation says what the replay of the engine's own schedule says, to the last bit."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import Schedule
from fasop.errors import SearchError
from fasop.fast import KNOWN, ends
from fasop.simulate import StageTimes, simulate
from megatron_ext.schedule import as_json, schedule

TIMES = st.floats(0, 100, allow_nan=False)


@given(
    st.sampled_from(KNOWN),
    st.integers(1, 9),
    st.integers(1, 12),
    st.data(),
)
def test_every_stage_ends_when_the_replay_says(
    name: Schedule, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    rows = st.lists(TIMES, min_size=stages, max_size=stages)
    pipelines = [[data.draw(rows) for _ in range(4)] for _ in range(2)]
    forward, backward, ahead, back = np.array(pipelines).transpose(1, 2, 0)
    found = ends(
        name,
        micro_batches,
        forward=forward,
        backward=backward,
        send_forward=ahead,
        send_backward=back,
        start=np.zeros((stages, 2)),
    )
    lists = as_json(schedule(name, stages, 1, micro_batches), 1, micro_batches)
    for number, (f, b, sf, sb) in enumerate(pipelines):
        times = [
            StageTimes(forward=[f[s]], backward=[b[s]], send_forward=sf[s], send_backward=sb[s]) for s in range(stages)
        ]
        replayed = [0.0] * stages
        for event in simulate(lists, times):
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
    plain = {"forward": one, "backward": one, "send_forward": one, "send_backward": one}
    on_time = ends(Schedule.one_f_one_b, micro_batches, **plain, start=0 * start)
    assert ends(Schedule.one_f_one_b, micro_batches, **plain, start=start)[0] == pytest.approx(on_time[0] + late[0])


@pytest.mark.parametrize("name", [Schedule.interleaved, Schedule.zb_h1])
def test_a_schedule_that_it_does_not_know_is_told(name: Schedule) -> None:
    ones = np.ones((2, 1))
    with pytest.raises(
        SearchError, match=rf"parallel\.schedule={name} is not searched; use one of: one_f_one_b, gpipe"
    ):
        ends(name, 4, forward=ones, backward=ones, send_forward=ones, send_backward=ones, start=ones)


def test_thousands_of_pipelines_take_less_than_a_second() -> None:
    ones = np.random.default_rng(1).random((5, 8, 10_000))
    before = time.process_time()
    ends(
        Schedule.one_f_one_b,
        16,
        forward=ones[0],
        backward=ones[1],
        send_forward=ones[2],
        send_backward=ones[3],
        start=ones[4],
    )
    assert time.process_time() - before < 1
