"""Runs with one thing wrong, of all kinds: the first words of the page name it, and what they promise comes true.

The times of these runs are given, so that a run with the change that the page names says what it would bring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

import pandas as pd
import pytest

from fasop.costs.network.links import Link
from megatron_ext.contract.plan import Plan
from reports.facts.statistics import statistics
from reports.path.change import Cause
from reports.path.critical import IDLE
from reports.path.links import Allowed
from reports.path.slow_ranks import Expected
from reports.path.why import Why, explain
from reports.readers.events import WAITS, Timeline
from reports.sections.cause_section import cause_in_words, cause_section
from tests.support.reports.constructed import Course, period_ms, plan_of, timeline_of

ALONE = Course(partition=(4, 4, 4, 3))
PAIRS = replace(ALONE, replicas=(2, 2, 2, 2))
ZB_H1 = replace(ALONE, schedule="zb_h1")
INTERLEAVED = replace(ALONE, chunks=2, schedule="interleaved", partition=(2, 2, 2, 2, 2, 2, 2, 1))
TENSOR = Course(partition=(8, 8), tensor=2, replicas=(2, 2))
UNLIKE = replace(ALONE, partition=(8, 4), replicas=(2, 1), micro_batches=16)
STREAM = replace(ALONE, schedule="pipedream", iterations=8)
APART = replace(PAIRS, ranks_per_node=1)
LONG = replace(PAIRS, iterations=14)


def slow(rank: int, factor: float = 2.0, every: int = 1) -> Callable[[int, int], float]:
    return lambda one, iteration: factor if one == rank and iteration % every == 0 else 1.0


def only(rank: int, ms: float, others: float, every: int = 1) -> Callable[[int, int], float]:
    return lambda one, iteration: ms if one == rank and iteration % every == 0 else others


def every(number: int, ms: float, others: float = 0.0) -> Callable[[int, int], float]:
    return lambda _, iteration: ms if iteration % number == 0 else others


def link(ms: float, latency: float = 0.1, *, of: int, to: int | None = None) -> Callable[..., tuple[float, float]]:
    """What a message takes from a rank, to a rank or to all and from all."""

    def found(sender: int, receiver: int, _forward: bool, _iteration: int) -> tuple[float, float]:
        hit = of in (sender, receiver) if to is None else (sender, receiver) == (of, to)
        return (ms, latency) if hit else (0.5, 0.1)

    return found


Waits = Callable[[Timeline], pd.DataFrame]


def waits_for_cores(part: Callable[[int, int], float]) -> Waits:
    """Of a rank in an iteration, the part of its passes for which it waits."""

    def found(timeline: Timeline) -> pd.DataFrame:
        events = timeline.events[timeline.events["name"].astype(str).str.endswith("compute")]
        sums = (events["end_ns"] - events["start_ns"]).groupby([events["rank"], events["iteration"]]).sum()
        rows = [(rank, number, *[round(ns * part(rank, number))] * 2) for (rank, number), ns in sums.items()]
        return pd.DataFrame(rows, columns=WAITS)

    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    wrong: Course
    cause: Cause
    said: str
    """Among the first words."""
    changed: Course
    """With the change that they name."""
    expected: Expected | None = None
    allowed: Allowed | None = None


QUICK = Link(latency_s=0.0001, s_per_byte=0.0)
BYTES = Allowed(sent={rank: {} for rank in range(16)}, links=dict.fromkeys(range(16), QUICK))
"""Of ranks that send next to nothing on links that are quick."""
EXPECTED = Expected(stages=[61.5, 60.0, 60.0, 51.0], measured=True)
OF = {
    "a-rank": Case(wrong=replace(PAIRS, pace=slow(2)), cause=Cause.RANK, said="Rank 2 on n1 takes 2.00", changed=PAIRS),
    "a-rank-of-a-tensor-group": Case(
        wrong=replace(TENSOR, pace=slow(5)), cause=Cause.RANK, said="Rank 5 on n2 takes 2.00", changed=TENSOR
    ),
    "a-rank-without-peers": Case(
        wrong=replace(ALONE, pace=slow(1)), cause=Cause.RANK, said="Rank 1 on n0 takes 2.00", changed=ALONE
    ),
    "the-first-rank": Case(
        wrong=replace(ALONE, pace=slow(0)),
        cause=Cause.RANK,
        said="Rank 0 on n0 takes 2.",
        changed=ALONE,
        expected=EXPECTED,
    ),
    "the-last-rank-zb-h1": Case(
        wrong=replace(ZB_H1, pace=slow(3, 1.7)),
        cause=Cause.RANK,
        said="Rank 3 on n1 takes 1.7",
        changed=ZB_H1,
        expected=EXPECTED,
    ),
    "the-first-rank-interleaved": Case(
        wrong=replace(INTERLEAVED, pace=slow(0)),
        cause=Cause.RANK,
        said="Rank 0 on n0 takes 2.",
        changed=INTERLEAVED,
        expected=EXPECTED,
    ),
    "a-rank-now-and-then": Case(
        wrong=replace(LONG, pace=slow(2, 3.0, every=4)),
        cause=Cause.RANK,
        said="Every 4th iteration takes 1,",
        changed=LONG,
    ),
    "a-rank-in-most-of-the-iterations": Case(
        wrong=replace(LONG, pace=slow(2, 3.0, every=2)),
        cause=Cause.RANK,
        said="Rank 2 on n1 takes 3.00 times as long to compute",
        changed=LONG,
    ),
    "a-rank-of-unlike-replicas": Case(
        wrong=replace(UNLIKE, pace=slow(1)), cause=Cause.RANK, said="Rank 1 on n0 takes 2.00", changed=UNLIKE
    ),
    "a-rank-of-a-stream": Case(
        wrong=replace(STREAM, pace=slow(1)), cause=Cause.RANK, said="Rank 1 on n0 takes 2.00", changed=STREAM
    ),
    "the-first-rank-of-a-stream": Case(
        wrong=replace(STREAM, pace=slow(0)),
        cause=Cause.RANK,
        said="Rank 0 on n0 takes 2.",
        changed=STREAM,
        expected=EXPECTED,
    ),
    "a-link-forward": Case(
        wrong=replace(ALONE, link=link(20, of=1, to=2)),
        cause=Cause.LINK,
        said="A message from stage 1 to stage 2 takes 20.10 ms.",
        changed=replace(ALONE, link=link(10, of=1, to=2)),
    ),
    "a-link-with-latency": Case(
        wrong=replace(ALONE, link=link(0.1, 30, of=2, to=1)),
        cause=Cause.LINK,
        said="A message from stage 2 to stage 1 takes 30.10 ms.",
        changed=replace(ALONE, link=link(0.1, 15, of=2, to=1)),
    ),
    "a-link-that-is-full": Case(
        wrong=replace(STREAM, link=link(90, of=1, to=2)),
        cause=Cause.LINK,
        said="A message from stage 1 to stage 2 takes 90.10 ms.",
        changed=replace(STREAM, link=link(45, of=1, to=2)),
    ),
    "a-link-of-a-replica": Case(
        wrong=replace(APART, link=link(20, of=2, to=4)),
        cause=Cause.LINK,
        said="takes 20.10 ms from n2 to n4, but 0.60 ms in other replicas",
        changed=replace(APART, link=link(10, of=2, to=4)),
    ),
    "a-node-s-network": Case(
        wrong=replace(APART, link=link(20, of=4), shared_link=True),
        cause=Cause.LINK,
        said="Messages to and from n4 take up to 20.10 ms; messages between other nodes take 0.60 ms.",
        changed=replace(APART, link=link(10, of=4), shared_link=True),
    ),
    **{
        f"layers-{place}-{name}": Case(
            wrong=replace(even, partition=parts),
            cause=Cause.PARTITION,
            said=f"Stage {longest} computes the longest",
            changed=even,
        )
        for place, parts, longest in (
            ("first", (7, 3, 3, 2), 0),
            ("middle", (3, 7, 3, 2), 1),
            ("last", (3, 3, 3, 6), 3),
        )
        for name, even in (("1f1b", PAIRS), ("zb-h1", ZB_H1), ("stream", STREAM))
    },
    "layers-interleaved": Case(
        wrong=replace(INTERLEAVED, partition=(4, 2, 2, 2, 4, 2, 2, 1)),
        cause=Cause.PARTITION,
        said="Stage 0 computes the longest",
        changed=replace(INTERLEAVED, partition=(2, 2, 2, 2, 3, 3, 3, 2)),
    ),
    "shares-of-like-replicas": Case(
        wrong=replace(ALONE, partition=(8, 8), replicas=(2, 2), shares=(9, 3)),
        cause=Cause.SHARES,
        said="shares of the replicas 6-6",
        changed=replace(ALONE, partition=(8, 8), replicas=(2, 2), shares=(6, 6)),
    ),
    "shares-of-two-kinds-of-gpu": Case(
        wrong=replace(ALONE, partition=(16,), replicas=(2,), micro_batches=6, ranks_per_node=1, gpus=("A100",)),
        cause=Cause.SHARES,
        said="shares of the replicas 9-3",
        changed=replace(ALONE, partition=(16,), replicas=(2,), shares=(9, 3), ranks_per_node=1, gpus=("A100",)),
    ),
    "data-of-a-rank": Case(
        wrong=replace(PAIRS, data=only(0, 100, 0.5)),
        cause=Cause.DATA,
        said="Loading data takes 100.0 ms per iteration on rank 0",
        changed=replace(PAIRS, data=only(0, 0, 0.5)),
    ),
    "data-of-all": Case(
        wrong=replace(PAIRS, data=every(1, 100)),
        cause=Cause.DATA,
        said="Loading data takes 100.0 ms per iteration.",
        changed=replace(PAIRS, data=every(1, 0)),
    ),
    "data-now-and-then": Case(
        wrong=replace(LONG, data=every(4, 600, 0.5)),
        cause=Cause.DATA,
        said="all ranks spend up to 600 ms loading data instead of",
        changed=LONG,
    ),
    "embedding": Case(
        wrong=replace(ALONE, embedding_sum=200.0),
        cause=Cause.EMBEDDING,
        said="The embedding's all-reduce takes 200.0 ms",
        allowed=BYTES,
        changed=replace(ALONE, embedding_sum=0.0),
    ),
    "gradients": Case(
        wrong=replace(PAIRS, gradients_sum=lambda _: 200.0),
        cause=Cause.GRADIENTS,
        said="The gradients' all-reduce takes 200.0 ms per iteration.",
        allowed=BYTES,
        changed=replace(PAIRS, gradients_sum=lambda _: 0.0),
    ),
    "gradients-of-a-stage": Case(
        wrong=replace(PAIRS, gradients_sum=lambda stage: 200.0 if stage == 2 else 0.0),
        cause=Cause.GRADIENTS,
        said="200.0 ms per iteration on ranks 4-5 on n2",
        allowed=BYTES,
        changed=replace(PAIRS, gradients_sum=lambda _: 0.0),
    ),
    "gradients-beside-the-backward-pass": Case(
        wrong=replace(PAIRS, gradients_sum=lambda _: 200.0, overlapped=True),
        cause=Cause.GRADIENTS,
        said="The gradients' all-reduce takes",
        allowed=BYTES,
        changed=replace(PAIRS, gradients_sum=lambda _: 0.0, overlapped=True),
    ),
    "gradients-of-a-stream": Case(
        wrong=replace(STREAM, partition=(8, 4), replicas=(2, 1), gradients_sum=lambda _: 40.0),
        cause=Cause.GRADIENTS,
        said="The gradients' all-reduce takes 160.0 ms per iteration.",
        allowed=BYTES,
        changed=replace(STREAM, partition=(8, 4), replicas=(2, 1), gradients_sum=lambda _: 0.0),
    ),
    "tensor-groups": Case(
        wrong=replace(TENSOR, tensor_sum=5.0),
        cause=Cause.TENSOR,
        said="The communication of tensor groups takes 640.0 ms",
        allowed=BYTES,
        changed=replace(TENSOR, tensor_sum=0.0),
    ),
    "optimizer-of-a-rank": Case(
        wrong=replace(PAIRS, optimizer=only(3, 200, 3)),
        cause=Cause.OPTIMIZER,
        said="The optimizer takes 200.0 ms per iteration on rank 3 on n1",
        changed=replace(PAIRS, optimizer=every(1, 0)),
    ),
    "host": Case(
        wrong=replace(PAIRS, host=only(3, 10, 0)),
        cause=Cause.HOST,
        said="Time between the recorded events takes 160.0 ms",
        changed=PAIRS,
    ),
    "between-iterations": Case(
        wrong=replace(PAIRS, between=every(1, 200)),
        cause=Cause.BETWEEN,
        said="Between iterations, no rank records anything for 200.0 ms",
        changed=PAIRS,
    ),
    "between-some-iterations": Case(
        wrong=replace(LONG, between=every(4, 2000)),
        cause=Cause.BETWEEN,
        said="After every 4th iteration, the next one begins only 2,000 ms later.",
        changed=LONG,
    ),
    "a-link-like-all-others": Case(
        wrong=replace(PAIRS, partition=(8, 8), replicas=(2, 2), ranks_per_node=4, link=lambda *_: (20, 0.1)),
        cause=Cause.LINK,
        said="takes 20.10 ms.",
        changed=replace(PAIRS, partition=(8, 8), replicas=(2, 2), ranks_per_node=4, link=lambda *_: (10, 0.05)),
        allowed=BYTES,
    ),
    "a-large-vocabulary": Case(
        wrong=replace(ALONE, partition=(4, 4, 4, 4), head=10.0, embedding_sum=20.0),
        cause=Cause.EMBEDDING,
        said="The embedding of 50,257 tokens weighs as much as 2.6 layers, and on stage 3 its head computes as long as "
        "2.0 layers; its all-reduce takes 20.0 ms per iteration.",
        changed=replace(
            ALONE, partition=(4, 4, 4, 4), layer=5.625, head=0.0, embedding_sum=7.64, optimizer=every(1, 3.5)
        ),
    ),
}


def explained(
    course: Course, expected: Expected | None = None, allowed: Allowed | None = None, waits: Waits | None = None
) -> tuple[Plan, Why]:
    plan = plan_of(course)
    timeline = timeline_of(course, plan)
    if waits is not None:
        timeline = replace(timeline, core_waits=waits(timeline))
    why = explain(timeline, plan, statistics(timeline, plan.ranks), expected=expected, allowed=allowed)
    assert isinstance(why, Why)
    return plan, why


@pytest.mark.parametrize("name", OF)
def test_the_first_words_name_the_cause_and_what_they_promise_comes_true(name: str):
    case = OF[name]
    plan, why = explained(case.wrong, case.expected, case.allowed)
    best = why.gains[0]
    assert best.cause == case.cause, best
    assert case.said in cause_in_words(why)
    assert escape(cause_in_words(why)) in cause_section(why, plan).split("</p>")[0]
    idle = why.idle
    assert idle[["compute", "optimizer", *IDLE]].sum(axis=1).tolist() == pytest.approx([why.replayed_ms] * len(idle))
    assert why.length_ms == pytest.approx(why.replayed_ms, rel=1e-5)
    assert all(after.start_ns == before.end_ns for before, after in pairwise(why.path))
    assert best.period_ns / 1e6 == pytest.approx(period_ms(timeline_of(case.changed)), rel=0.03)


NATURE = {
    "gradients": (replace(PAIRS, gradients_sum=lambda _: 200.0), "no time spent on the gradients' all-reduce"),
    "tensor-groups": (replace(TENSOR, tensor_sum=5.0), "no time spent on the tensor groups' communication"),
    "optimizer": (replace(PAIRS, optimizer=every(1, 200)), "no time spent on the optimizer"),
    "host": (replace(PAIRS, host=lambda *_: 10), "no time between the recorded events"),
    "checkpoints": (replace(LONG, between=every(4, 2000), save_interval=4), "no time spent on checkpoints"),
    "evaluations": (
        replace(LONG, between=every(5, 800), save_interval=4, eval_interval=5),
        "no time spent on evaluations",
    ),
}
"""What takes a large part of an iteration, and as long as its plan makes it."""


@pytest.mark.parametrize("name", NATURE)
def test_what_the_plan_itself_takes_is_listed_but_named_as_the_cause_of_nothing(name: str):
    course, change = NATURE[name]
    busy = Allowed(sent=BYTES.sent, links=dict.fromkeys(range(16), Link(latency_s=0.02, s_per_byte=0.0)))
    plan, why = explained(course, allowed=busy)
    assert why.cause is None and why.gains[0].share > 0.15
    assert f"The largest gain, {change}, is {why.gains[0].share:.1%}" in cause_in_words(why)
    assert "; the plan itself takes all of that time." in cause_in_words(why)
    assert escape(change) in cause_section(why, plan)


ONCE = {
    "a-rank": replace(LONG, pace=lambda rank, iteration: 9.0 if (rank, iteration) == (2, 7) else 1.0),
    "data": replace(LONG, data=lambda _, iteration: 3000 if iteration == 7 else 0.5),
    "a-pause": replace(LONG, between=lambda _, iteration: 4000 if iteration in (6, 7) else 0),
    "all-ranks-now-and-then": replace(LONG, pace=lambda _, iteration: 2.0 if iteration % 4 == 0 else 1.0),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_hiccup_or_a_busy_machine_is_not_named(name: str):
    _, why = explained(ONCE[name])
    assert why.cause is None and why.gains[0].share > 0.05
    assert "No single cause stands out" in cause_in_words(why)


def shared(rank: int, iteration: int) -> float:
    """Of passes that wait for cores: now this rank, now that."""
    return 0.2 + 0.5 * ((7 * rank + 5 * iteration + rank * iteration) % 4) / 4


def on_shared_cores(course: Course) -> Course:
    pace = course.pace
    return replace(course, pace=lambda rank, iteration: pace(rank, iteration) / (1 - shared(rank, iteration)))


@pytest.mark.parametrize("course", [LONG, replace(LONG, replicas=(1, 1, 1, 1))], ids=["pairs", "alone"])
def test_waits_for_cores_are_no_cause(course: Course):
    _, why = explained(on_shared_cores(course), waits=waits_for_cores(shared))
    assert why.cause is None, cause_in_words(why)


@pytest.mark.parametrize(
    "name", ["a-rank", "layers-middle-1f1b", "layers-last-zb-h1", "data-of-all", "a-large-vocabulary"]
)
def test_what_is_wrong_is_named_beneath_waits_for_cores(name: str):
    case = replace(OF[name], wrong=replace(OF[name].wrong, iterations=14))
    alone = explained(case.wrong, case.expected, case.allowed)[1].cause
    _, why = explained(on_shared_cores(case.wrong), case.expected, case.allowed, waits_for_cores(shared))
    assert alone is not None and why.cause is not None, cause_in_words(why)
    assert (why.cause.cause, why.listed[0]) == (case.cause, why.cause)
    assert why.cause.usual_excess == pytest.approx(alone.usual_excess, rel=0.15)


@pytest.mark.parametrize("course", [ALONE, PAIRS, ZB_H1, INTERLEAVED, TENSOR, STREAM], ids=range(6))
def test_where_nothing_is_wrong_no_rank_and_no_link_is_named(course: Course):
    _, why = explained(course, EXPECTED if course.stages == 4 else None)
    assert {one.cause for one in why.gains if one.share > 0.02} <= {Cause.TENSOR, Cause.OPTIMIZER}
