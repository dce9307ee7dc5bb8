"""Partitions against brute force: the balance is exact, the bounds hold, the search only ever gains."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema.experiment import Schedule
from fasop.partition import baselines, local_search
from fasop.partition.baselines import amp, even, minmax, start
from fasop.partition.bounds import quick_bound
from fasop.partition.exact import EXACT, proved
from fasop.partition.local_search import REACH, bottleneck, exhaustive, feasible, improved, largest_stage
from fasop.simulation.linear import Hidden, Linear
from fasop.simulation.pipelines import Pipelines
from tests.support.fasop.plans import MEGATRON, built, column, experiment, mixed
from tests.support.fasop.random_pipelines import FLUSHING

TIME = st.floats(0, 10, allow_nan=False)
POSITIVE = st.floats(0.1, 10, allow_nan=False)


@st.composite
def lines(draw: st.DrawFn, most_stages: int = 5, layers: int = 7, *, hides: bool = False) -> Pipelines:
    """Two pipelines of any times, with any schedule and engine, with room for any number of layers or for few.

    With `hides`, the last backward pass may hide some of the sums.
    """
    schedule = draw(st.sampled_from(FLUSHING))
    chunks = 2 if schedule is Schedule.interleaved else 1
    stages = draw(st.integers(chunks, most_stages // chunks))

    def numbers(what: st.SearchStrategy[float], rows: int = stages) -> np.ndarray:
        return np.array(draw(st.lists(what, min_size=2 * rows, max_size=2 * rows))).reshape(rows, 2)

    def linear(layer: st.SearchStrategy[float]) -> Linear:
        return Linear(fixed=numbers(TIME), layer=numbers(layer))

    def passes() -> Linear:
        return Linear(fixed=numbers(TIME, stages * chunks), layer=np.tile(numbers(POSITIVE), (chunks, 1)))

    def shares() -> np.ndarray:
        """Of which as many layers fit as `capacity` says, if the chunks have equally many."""
        weights = numbers(POSITIVE, 2 * chunks * stages).reshape(2, chunks, stages, 2)
        taken = (weights * [(capacity + 1) // 2, capacity // 2]).sum(axis=1).max(axis=0)
        return (weights / np.where(capacity > 0, taken, 1.0)).reshape(2, -1, 2)

    shared = numbers(TIME)[0] if stages > 1 else np.zeros(2)
    capacity = numbers(st.integers(0, layers)).astype(int) if draw(st.booleans()) else np.full((stages, 2), layers)
    hop = numbers(TIME)
    return Pipelines(
        schedule=schedule,
        micro_batches=draw(st.integers(1, 8)),
        forward=passes(),
        backward=passes(),
        hop=hop,
        busy=hop * numbers(st.floats(0, 1)) if draw(st.booleans()) else None,
        one_way_out=np.array(draw(st.lists(st.booleans(), min_size=stages, max_size=stages))),
        blocking=schedule is Schedule.one_f_one_b and draw(st.booleans()),
        sums=linear(TIME),
        optimizer=linear(TIME),
        embedding=shared,
        capacity=capacity,
        shares=shares() if chunks > 1 and draw(st.booleans()) else None,
        basis=np.zeros(2, int),
        hidden=Hidden(time=Linear(fixed=-numbers(TIME), layer=numbers(POSITIVE)), last=numbers(TIME))
        if hides and draw(st.booleans())
        else None,
    )


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(layers + 1):
        for rest in partitions(layers - first, stages - 1):
            yield (first, *rest)


def every(one: Pipelines, layers: int) -> np.ndarray:
    """All partitions of one pipeline that fit, [stages, partitions]."""
    table = np.array(list(partitions(layers, one.parts_count))).T
    return table[:, one.take(np.zeros(table.shape[1], int)).fits(table)]


def alone(several: Pipelines, number: int) -> Pipelines:
    return several.take(np.array([number]))


def times(one: Pipelines, table: np.ndarray) -> np.ndarray:
    return one.take(np.zeros(table.shape[1], int)).iteration(table)


@given(lines(), st.integers(0, 7))
def test_the_balance_is_the_best_there_is(several: Pipelines, layers: int) -> None:
    for number in range(2):
        one = alone(several, number)
        table = every(one, layers)
        assert feasible(one, layers).tolist() == [table.shape[1] > 0]
        if not table.shape[1]:
            continue
        found = bottleneck(one, layers)
        assert found.sum() == layers
        assert one.fits(found)[0]
        best = largest_stage(one.take(np.zeros(table.shape[1], int)), table).min()
        assert largest_stage(one, found)[0] == pytest.approx(best)


@given(lines(hides=True), st.integers(1, 7))
def test_no_partition_is_faster_than_the_bounds(several: Pipelines, layers: int) -> None:
    for number in range(2):
        one = alone(several, number)
        table = every(one, layers)
        if table.shape[1]:
            best = times(one, table).min()
            assert quick_bound(one, layers, bottleneck(one, layers))[0] <= best * (1 + 1e-12)


@settings(max_examples=50)
@given(lines(hides=True), st.integers(1, 7), st.integers(0, 3))
def test_the_best_partition_is_found_and_proved(several: Pipelines, layers: int, few: int) -> None:
    """With few boxes the bound is lower, and still one; what is hidden may leave a gap."""
    one = alone(several, 0)
    table = every(one, layers)
    if not table.shape[1]:
        return
    best = times(one, table).min()
    begin = bottleneck(one, layers)
    whole, part = (proved(one, layers, begin, boxes) for boxes in (100_000, few))
    for proof in (whole, part):
        assert proof.partition.sum() == layers
        assert one.fits(proof.partition)[0]
        assert proof.seconds == one.iteration(proof.partition)[0]
        assert proof.bound <= best * (1 + 1e-9) <= proof.seconds * (1 + 2e-9)
    if one.hidden is None:
        assert whole.bound >= whole.seconds * (1 - 2 * EXACT)


def test_a_partition_without_memory_for_it_is_no_end_of_the_proof() -> None:
    """All layers in the first stage are the fastest, but they fit only in its second chunk."""
    ones, none = np.ones((4, 1)), np.zeros((4, 1))
    one = Pipelines(
        schedule=Schedule.interleaved,
        micro_batches=1,
        forward=Linear(fixed=none, layer=np.array([[0.5], [1.0], [0.5], [1.0]])),
        backward=Linear(fixed=none, layer=ones),
        hop=none[:2],
        sums=Linear(fixed=none[:2], layer=none[:2]),
        optimizer=Linear(fixed=none[:2], layer=none[:2]),
        embedding=np.zeros(1),
        capacity=np.full((2, 1), 5),
        shares=np.array([[[4 / 19], [1 / 7], [1 / 19], [1 / 7]], [[1 / 19], [1 / 7], [1 / 19], [1 / 7]]]),
        basis=np.zeros(1, int),
    )
    best = times(one, every(one, 5)).min()
    proof = proved(one, 5, bottleneck(one, 5), 1000)
    assert proof.seconds == best
    assert proof.bound >= best * (1 - EXACT)


@given(lines(), st.integers(1, 7))
def test_the_search_ends_where_no_single_layer_can_gain(several: Pipelines, layers: int) -> None:
    one = alone(several, 0)
    if not feasible(one, layers)[0]:
        return
    begin = start(one, layers, bottleneck(one, layers))
    found, seconds = improved(one, begin)
    assert found.sum() == layers
    assert one.fits(found)[0]
    assert seconds == one.iteration(found)
    table = every(one, layers)
    near = table[:, np.abs(table - found).sum(axis=0) == 2]
    assert near.shape[1] == 0 or times(one, near).min() >= seconds[0] * (1 - 1e-12)
    for other in (minmax(one, layers), even(one, layers), amp(one, layers), bottleneck(one, layers)):
        assert not one.fits(other)[0] or seconds[0] <= one.iteration(other)[0]


@given(lines(), st.integers(1, 7))
def test_pipelines_are_searched_together_as_alone(several: Pipelines, layers: int) -> None:
    if not feasible(several, layers).all():
        return
    together, seconds = improved(several, bottleneck(several, layers))
    for number in range(2):
        one = alone(several, number)
        found, taken = improved(one, bottleneck(one, layers))
        assert (found[:, 0].tolist(), taken[0]) == (together[:, number].tolist(), seconds[number])


@given(lines(), st.integers(1, 7), st.floats(0.5, 1.1))
def test_only_what_is_far_from_worth_it_is_left_as_it_is(several: Pipelines, layers: int, part: float) -> None:
    if not feasible(several, layers).all():
        return
    begin = bottleneck(several, layers)
    limit = part * several.iteration(begin).max()
    _, whole = improved(several, begin)
    least = quick_bound(several, layers, begin)
    found, seconds = improved(several, begin, lambda seconds: seconds < limit, least)
    assert seconds.tolist() == several.iteration(found).tolist()
    assert np.all((seconds == whole) | (least + max(REACH) * (seconds - least) >= limit))
    assert improved(several, begin, lambda seconds: seconds < 0)[0].tolist() == begin.tolist()


def test_a_balance_takes_less_than_a_millisecond() -> None:
    one = built(mixed(), [0] + [1] * 7)
    bottleneck(one, 48)
    before = time.process_time()
    for _ in range(20):
        bottleneck(one, 48)
    assert (time.process_time() - before) / 20 < 1e-3


def test_the_largest_stage_is_not_what_decides() -> None:
    """The balanced partition is not the fastest, and a stage with the embedding alone can be."""
    one = built(mixed(*MEGATRON), [1, 0] + [1] * 6)
    balanced = bottleneck(one, 48)
    found, seconds = improved(one, balanced)
    assert largest_stage(one, found)[0] > largest_stage(one, balanced)[0]
    assert seconds[0] < 0.99 * one.iteration(balanced)[0]
    seed = built(experiment(*MEGATRON), [0] * 8, pipeline=8)
    assert improved(seed, column(0, 7, 7, 7, 7, 7, 7, 6))[0][0, 0] >= 0


def test_hops_change_the_best_partition() -> None:
    one = built(mixed("train.precision=fp16"), [0] + [1] * 7)
    free = Pipelines(**{**vars(one), "hop": 0 * one.hop})
    found, _ = improved(free, bottleneck(free, 48))
    mine, seconds = improved(one, bottleneck(one, 48))
    assert mine.tolist() != found.tolist()
    assert seconds[0] < one.iteration(found)[0]


def test_the_public_heuristic_balances() -> None:
    one = built(mixed(), [0] + [1] * 7)
    balanced = minmax(one, 48)
    assert largest_stage(one, balanced)[0] < largest_stage(one, even(one, 48))[0]
    assert balanced.min() >= 1


@given(lines(), st.integers(1, 7))
def test_amp_minimises_the_sum_of_all_stages_and_the_largest_for_every_further_micro_batch(
    several: Pipelines, layers: int
) -> None:
    one = alone(several, 0)
    table = np.array(list(partitions(layers, one.parts_count))).T
    if layers >= one.parts_count - 2:
        table = table[:, (table[1:-1] > 0).all(axis=0)]

    def cost(table: np.ndarray) -> np.ndarray:
        parts = one.forward.of(table) + one.backward.of(table)
        return parts.sum(axis=0) + (one.micro_batches - 1) * parts.max(axis=0)

    found = amp(one, layers)
    assert found.sum() == layers
    assert cost(found)[0] == pytest.approx(cost(table).min())


@pytest.mark.parametrize("has_compiler", [True, False], ids=["compiled", "numpy"])
def test_layers_that_take_nothing_are_balanced_and_summed_as_any_others(
    has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part's layers, or all; a largest part may then be no larger than what is fixed."""
    for module in (baselines, local_search) if not has_compiler else ():
        monkeypatch.setattr(module, "compiled", None)
    rng, layers = np.random.default_rng(0), 4
    table = np.array(list(partitions(layers, 3))).T
    some = table[:, table[1] > 0]
    for _ in range(100):
        times = [rng.integers(0, 3, (3, 1)) * rng.uniform(0.1, 5, (3, 1)) for _ in range(4)]
        one = without_messages(Linear(fixed=times[0], layer=times[1]), Linear(fixed=times[2], layer=times[1]), layers)
        parts = one.forward.of(some) + one.backward.of(some)
        least = (parts.sum(axis=0) + (one.micro_batches - 1) * parts.max(axis=0)).min()
        found = one.forward.of(amp(one, layers)) + one.backward.of(amp(one, layers))
        assert found.sum() + (one.micro_batches - 1) * found.max() == pytest.approx(least)
        assert amp(one, layers).sum() == bottleneck(one, layers).sum() == layers
        most = (one.forward.of(table) + one.backward.of(table)).max(axis=0).min()
        assert largest_stage(one, bottleneck(one, layers))[0] == pytest.approx(most)


def without_messages(forward: Linear, backward: Linear, layers: int) -> Pipelines:
    """A pipeline of as many stages, with room for all layers on each."""
    none = np.zeros_like(forward.fixed)
    return Pipelines(
        schedule=Schedule.one_f_one_b,
        micro_batches=3,
        forward=forward,
        backward=backward,
        hop=none,
        sums=Linear(fixed=none, layer=none),
        optimizer=Linear(fixed=none, layer=none),
        embedding=np.zeros(1),
        capacity=np.full(none.shape, layers),
        basis=np.zeros(1, int),
    )


@given(lines(most_stages=4), st.integers(1, 7))
def test_trying_all_partitions_finds_the_best(several: Pipelines, layers: int) -> None:
    if not feasible(several, layers).all():
        return
    partitions, seconds = exhaustive(several, layers)
    assert several.iteration(partitions).tolist() == seconds.tolist()
    assert several.fits(partitions).all()
    assert seconds.tolist() == [times(one, every(one, layers)).min() for one in (alone(several, 0), alone(several, 1))]


def test_one_stage_has_one_partition() -> None:
    one = built(
        experiment("cluster.groups.gpu2.count=1", "parallel.pipeline=1", "parallel.partition=48"), [0], pipeline=1
    )
    assert one.schedule is Schedule.one_f_one_b
    assert improved(one, bottleneck(one, 48))[0].tolist() == minmax(one, 48).tolist() == [[48]]
