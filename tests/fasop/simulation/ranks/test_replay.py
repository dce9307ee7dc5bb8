"""Messages on links: they follow each other, in both directions at once, and delay nobody where the times allow it."""

from __future__ import annotations

from typing import Any

import pytest

from fasop.simulation.ranks.replay import Event, StageTimes, simulate
from megatron_ext.contract.schedule.iteration import as_json, schedule
from tests.support.fasop.replays import pipeline_time


def lists(name: str, stages: int, micro_batches: int, chunks: int = 1) -> dict[str, Any]:
    return as_json(schedule(name, stages, chunks, micro_batches), chunks, micro_batches)


def alike(stages: int, hop: float, forward: float, backward: float, **more: Any) -> list[StageTimes]:
    one = StageTimes(forward=[forward] * 2, backward=[backward] * 2, send_forward=hop, send_backward=hop, **more)
    return [one] * stages


def gpipe(micro_batches: int, *times: float, **more: Any) -> float:
    return pipeline_time(simulate(lists("gpipe", 2, micro_batches), alike(2, *times, **more)))


def test_more_micro_batches_take_the_link_as_much_longer_as_their_messages_need() -> None:
    """Forward and backward: 28 messages of 0.21 s more, each way."""
    assert gpipe(32, 0.21, 0.05, 0.1) - gpipe(4, 0.21, 0.05, 0.1) == pytest.approx(2 * 28 * 0.21)
    assert gpipe(4, 0.21, 0.05, 0.1) == pytest.approx(0.05 + 4 * 0.21 + 0.05 + 0.1 + 4 * 0.21 + 0.1)


def test_a_link_takes_the_next_message_while_the_last_one_is_still_on_its_way() -> None:
    """Of 0.21 s the bytes need 0.01 s, and the rest is latency."""
    more = {"busy_forward": 0.01, "busy_backward": 0.01}
    assert gpipe(32, 0.21, 0.05, 0.1, **more) == pytest.approx(0.21 + 32 * 0.05 + 0.05 + 32 * 0.1 + 0.1 + 0.21)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1"])
def test_messages_that_are_shorter_than_passes_wait_for_no_link(name: str) -> None:
    actions = lists(name, 4, 8)
    queued = simulate(actions, alike(4, 0.5, 1.0, 1.0, one_way_out=True))
    free = simulate(actions, alike(4, 0.5, 1.0, 1.0, busy_forward=0.0, busy_backward=0.0))
    assert queued == free


def test_both_directions_of_a_link_are_used_at_once() -> None:
    """Two stages that exchange activations and gradients, each of which takes as long as a pass."""
    for event in simulate(lists("one_f_one_b", 2, 8), alike(2, 3.0, 3.0, 1.0)):
        if event.sent is not None:
            assert event.end == max(event.start, event.sent + 3.0)


def arrivals(events: list[Event], stage: int) -> list[float]:
    return [event.end for event in events if event.stage == stage and event.sent is not None]


def test_two_stages_with_chunks_have_one_link_for_both_kinds_of_messages() -> None:
    """Activations for the next chunk and gradients of the last one go the same way."""
    actions, apart = lists("interleaved", 2, 4, 2), lists("interleaved", 3, 6, 2)
    events = simulate(actions, alike(2, 3.0, 1.0, 1.0))
    assert len(set(arrivals(events, 0))) == len(arrivals(events, 0))
    assert min(b - a for a, b in zip(sorted(arrivals(events, 0)), sorted(arrivals(events, 0))[1:], strict=False)) >= 3
    two, one = (simulate(apart, alike(3, 3.0, 1.0, 1.0, one_way_out=out)) for out in (False, True))
    assert pipeline_time(two) < pipeline_time(one)


def test_with_megatron_lm_both_stages_wait_for_the_whole_message() -> None:
    """Three stages, one micro-batch after another: F send, F send, F B, send, B, send, B."""
    times = alike(3, 3.0, 1.0, 2.0)
    events = simulate(lists("one_f_one_b", 3, 1), times, blocking=True)
    sends = {(e.stage, e.kind): (e.start, e.end) for e in events if e.kind.endswith("send")}
    assert sends == {
        (0, "forward-send"): (1, 4),
        (1, "forward-send"): (5, 8),
        (2, "backward-send"): (11, 14),
        (1, "backward-send"): (16, 19),
    }
    assert pipeline_time(events) == 21
    two = simulate(lists("one_f_one_b", 2, 4), alike(2, 3.0, 1.0, 2.0), blocking=True)
    # F | 3 | F F: an exchange of 3 between every F and B of the first stage and the second one's B and F, then 3 B
    assert pipeline_time(two) == 1 + 3 + (1 + 2 + 3) * 4 + 2


def test_an_interleaved_stage_of_megatron_waits_until_a_busy_one_takes_what_it_sends() -> None:
    """The second stage begins to receive micro-batch 1 once it has passed micro-batch 0."""
    slow = StageTimes(forward=[10.0, 10.0], backward=[1.0, 1.0], send_forward=0.5, send_backward=0.5)
    events = simulate(lists("interleaved", 2, 2, 2), [*alike(1, 0.5, 1.0, 1.0), slow], blocking=True)
    first = [(e.kind, e.micro_batch, e.chunk, e.start, e.end, e.sent) for e in events if e.stage == 0]
    assert first[:6] == [
        ("forward-compute", 0, 0, 0.0, 1.0, None),
        ("forward-send", 0, 0, 1.0, 1.5, 1.0),
        ("forward-compute", 1, 0, 1.5, 2.5, None),
        ("forward-recv", 0, 1, 2.5, 12.0, 11.5),
        ("forward-send", 1, 0, 12.0, 12.0, 11.5),
        ("forward-compute", 0, 1, 12.0, 13.0, None),
    ]


def test_megatron_lms_stages_wait_for_each_other_along_the_pipeline() -> None:
    """While it is filled, every stage sends before it takes the next one's message."""
    events = simulate(lists("one_f_one_b", 4, 8), alike(4, 1.0, 10.0, 10.0), blocking=True)
    second = [e for e in events if e.stage == 0 and e.kind == "forward-send"][1]
    assert (second.start, second.end) == (21, 23)  # the second stage begins to take it once it has sent its own
    freely = simulate(lists("one_f_one_b", 4, 8), alike(4, 1.0, 10.0, 10.0))
    assert pipeline_time(freely) < pipeline_time(events)
