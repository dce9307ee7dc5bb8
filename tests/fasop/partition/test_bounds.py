"""No bound leaves out a plan that it should not: each is held against all partitions, or all plans, of random cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fasop.costs.arrays import Floats, Integers
from fasop.partition import bounds, exact, local_search
from fasop.partition.bounds import quick_bound
from fasop.partition.chains import with_one_more
from fasop.partition.dominance import distinct, never_worse
from fasop.partition.exact import EXACT, proved, proved_of_paths
from fasop.partition.local_search import bottleneck, feasible
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.simulation.linear import Again, Hidden, Layers, Linear
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.parallel_config import Schedule
from tests.support.cases import fewer
from tests.support.fasop.random_clusters import best_times, random_case
from tests.support.fasop.random_pipelines import all_times, random_pipelines
from tests.support.fasop.searches import floor
from tests.support.fasop.seeds import seeds

ROUNDING = 1e-9


def test_no_partition_is_faster_than_the_bounds() -> None:
    tried = 0
    for seed in seeds(fewer(60, 150)):
        lines, layers = random_pipelines(np.random.default_rng(seed))
        _, seconds = all_times(lines, layers)
        fits = np.isfinite(seconds).any(axis=1)
        assert feasible(lines, layers).tolist() == fits.tolist()
        if not fits.any():
            continue
        some, best = lines.take(np.nonzero(fits)[0]), seconds[fits].min(axis=1) * (1 + ROUNDING)
        balanced = bottleneck(some, layers)
        assert (quick_bound(some, layers, balanced) <= best).all()
        tried += len(some)
    assert tried > 400


def test_bounds_are_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for seed in seeds(fewer(40, 100)):
        lines, layers = random_pipelines(np.random.default_rng(seed))
        some = lines.take(np.nonzero(feasible(lines, layers))[0])
        balanced = bottleneck(some, layers)
        found = quick_bound(some, layers, balanced)
        with monkeypatch.context() as patch:
            for module in (bounds, local_search):
                patch.setattr(module, "compiled", None)
            assert (bottleneck(some, layers) == balanced).all()
            assert quick_bound(some, layers, balanced) == pytest.approx(found, rel=1e-12)
        tried += len(some)
    assert tried > 400


def test_no_partition_is_faster_than_the_bounds_of_a_move_to_it() -> None:
    tried = closest = 0
    for seed in seeds(fewer(40, 100)):
        rng = np.random.default_rng(seed)
        lines, layers = random_pipelines(rng)
        every, _ = all_times(lines, layers)
        parts, stages = lines.parts_count, lines.stages
        pairs = np.array([(a, b) for a in range(parts) for b in range(parts) if a % stages != b % stages])
        if not len(pairs) or lines.order is not None:
            continue
        partitions = every[:, rng.integers(0, every.shape[1], len(lines))]
        bounds = with_one_more(lines, partitions)(pairs)
        for (source, target), bound in zip(pairs, bounds.T, strict=True):
            moved = partitions.copy()
            moved[source] -= 1
            moved[target] += 1
            some = moved[source] >= 0
            seconds = lines.iteration(np.maximum(moved, 0))
            assert (bound <= seconds * (1 + ROUNDING))[some].all()
            tried, closest = tried + int(some.sum()), max(closest, (bound / seconds)[some].max(initial=0))
    assert tried > 1000
    assert closest > 0.99


def test_no_partition_of_interleaved_stages_is_faster_than_the_bounds_or_what_is_proved() -> None:
    """Boxes of them are halved by the layers of whole stages."""
    tried = proofs = tight = 0
    for seed in range(2000, 2000 + fewer(40, 600)):
        lines, layers = random_pipelines(np.random.default_rng(seed), Schedule.interleaved)
        _, seconds = all_times(lines, layers)
        fits = np.isfinite(seconds).any(axis=1)
        if not fits.any():
            continue
        some, best = lines.take(np.nonzero(fits)[0]), seconds[fits].min(axis=1) * (1 + ROUNDING)
        balanced = bottleneck(some, layers)
        assert (quick_bound(some, layers, balanced) <= best).all(), seed
        tried += len(some)
        for boxes in (1, 4, 10_000):
            proof = proved(some.take(np.array([0])), layers, balanced[:, :1], boxes)
            assert proof.bound <= best[0] <= proof.seconds * (1 + 2 * ROUNDING), (seed, boxes)
        proofs, tight = proofs + 1, tight + (proof.bound >= best[0] * (1 - 2 * EXACT))
    assert tried > 1000
    assert tight > 0.9 * proofs > 30


def test_no_partition_of_interleaved_stages_is_faster_than_the_bounds_where_links_are_slow() -> None:
    """There the queue of messages of the busiest link often takes longest; links differ a hundredfold."""
    tried = close = 0
    for seed in range(7000, 7000 + fewer(16, 400)):
        rng = np.random.default_rng(seed)
        lines, layers = random_pipelines(rng, Schedule.interleaved)
        if lines.replicas:
            continue
        slower = 10 ** rng.uniform(0, 2, lines.hop.shape)
        busy = None if lines.busy is None else lines.busy * slower
        lines = replace(lines, hop=lines.hop * slower, busy=busy)
        if lines.back is not None:
            lines = replace(lines, back=replace(lines.back, hop=lines.back.hop * slower, busy=lines.back.busy * slower))
        _, seconds = all_times(lines, layers)
        fits = np.isfinite(seconds).any(axis=1)
        if not fits.any():
            continue
        some, best = lines.take(np.nonzero(fits)[0]), seconds[fits].min(axis=1) * (1 + ROUNDING)
        bounds = quick_bound(some, layers, bottleneck(some, layers))
        assert (bounds <= best).all(), seed
        tried, close = tried + len(some), close + int((bounds > 0.95 * best).sum())
    assert tried > 200
    assert close > 20


@pytest.mark.parametrize("seed", [7215, 7242, 7342, 7381, 7461])
def test_no_partition_is_faster_than_what_is_proved_of_iterations_of_a_millisecond(seed: int) -> None:
    lines, layers = random_pipelines(np.random.default_rng(seed), Schedule.interleaved)
    short = _times(lines, 1e-5)
    _, seconds = all_times(short, layers)
    for number in np.nonzero(np.isfinite(seconds).any(axis=1))[0][:2]:
        one, best = short.take(np.array([number])), seconds[number].min() * (1 + ROUNDING)
        assert best < 0.01
        assert proved(one, layers, bottleneck(one, layers), 300).bound <= best


class _SomePaths(exact._PipelinePaths):
    """None of single divisions, as of those where several paths are equally long; the `begin` does not fit."""

    def __init__(self, one: Pipelines, layers: int, begin: Integers) -> None:
        super().__init__(one, layers)
        self._begin = begin

    def longest(self, divisions: Layers) -> tuple[Floats, Floats]:
        slopes, constants = super().longest(divisions)
        some = slice(0, 0 if divisions.shape[1] == 1 else None)
        return slopes[:, some], constants[some]

    def seconds(self, partition: Integers) -> float:
        return np.inf if (partition == self._begin).all() else super().seconds(partition)


def test_a_proof_goes_on_where_a_division_has_no_path_and_its_first_partition_does_not_fit() -> None:
    closed = 0
    for seed in range(7000, 7012):
        lines, layers = random_pipelines(np.random.default_rng(seed), Schedule.gpipe)
        if lines.stages == 1:
            continue
        one = replace(lines, capacity=np.full_like(lines.capacity, layers)).take(np.array([0]))
        table, (seconds,) = all_times(one, layers)
        begin = table[:, [seconds.argmax()]]
        proof = proved_of_paths(_SomePaths(one, layers, begin), layers, begin, 300)
        best = seconds.min() * (1 + ROUNDING)
        assert proof.bound <= best
        closed += proof.seconds <= best and proof.bound > best * (1 - 1e-3)
    assert closed > 6


def _times(one: Pipelines, factor: float) -> Pipelines:
    """The same pipelines, in which everything takes so many times as long."""

    def longer(times: Linear) -> Linear:
        return Linear(fixed=factor * times.fixed, layer=factor * times.layer)

    hidden, back = one.hidden, one.back
    return replace(
        one,
        **{name: longer(getattr(one, name)) for name in ("forward", "backward", "sums", "optimizer")},
        hop=factor * one.hop,
        busy=None if one.busy is None else factor * one.busy,
        embedding=factor * one.embedding,
        hidden=None if hidden is None else Hidden(time=longer(hidden.time), last=factor * hidden.last),
        back=None if back is None else replace(back, hop=factor * back.hop, busy=factor * back.busy),
    )


@pytest.mark.slow
@pytest.mark.parametrize("boxes", [0, 3, 10_000])
def test_no_partition_is_faster_than_what_is_proved(boxes: int) -> None:
    """However early the proof is broken off."""
    tried = 0
    for seed in seeds(fewer(20, 40)):
        lines, layers = random_pipelines(np.random.default_rng(seed))
        _, seconds = all_times(lines, layers)
        for number in np.nonzero(np.isfinite(seconds).any(axis=1))[0][:4]:
            one, best = lines.take(np.array([number])), seconds[number].min()
            proof = proved(one, layers, bottleneck(one, layers), boxes)
            assert proof.bound <= best * (1 + ROUNDING) <= proof.seconds * (1 + 2 * ROUNDING)
            tried += 1
    assert tried > 20


def test_what_is_never_worse_is_so_with_every_partition() -> None:
    never = 0
    for seed in seeds(fewer(60, 150)):
        rng = np.random.default_rng(seed)
        one, layers = random_pipelines(rng)
        other = _near(rng, one)
        found = never_worse(one, other, layers)
        (_, mine), (_, others) = all_times(one, layers), all_times(other, layers)
        assert (mine <= others * (1 + ROUNDING))[found].all()
        never += int(found.sum())
    assert never > 250


def test_messages_that_arrive_later_are_worse_though_the_link_is_occupied_no_longer() -> None:
    slower = 0
    for seed in seeds(fewer(20, 40)):
        one, layers = random_pipelines(np.random.default_rng(seed))
        one = replace(one, busy=one.hop / 2)
        sooner = replace(one, hop=one.hop * 0.6)
        (_, late), (_, early) = all_times(one, layers), all_times(sooner, layers)
        assert (early <= late * (1 + ROUNDING))[never_worse(sooner, one, layers)].all()
        assert (late <= early * (1 + ROUNDING))[never_worse(one, sooner, layers)].all()
        slower += int((late > early * (1 + ROUNDING)).any())
    assert slower > 5


def _near(rng: np.random.Generator, one: Pipelines) -> Pipelines:
    """The same pipelines with some times that are longer, and seldom one that is shorter."""
    factors = np.array([1, 1, 1.5] if rng.random() < 0.7 else [1] * 30 + [1.5] * 10 + [0.9])

    def longer(values: np.ndarray) -> np.ndarray:
        return values * rng.choice(factors, values.shape) + (rng.random(values.shape) < 0.2)

    def stages(times: Linear) -> Linear:
        return Linear(fixed=longer(times.fixed), layer=times.layer * rng.choice(factors, times.layer.shape))

    def passes(times: Linear) -> Linear:
        grown, chunks = stages(times), one.parts_count // one.stages
        return replace(grown, layer=np.tile(grown.layer[: one.stages], (chunks, 1)))

    hidden = one.hidden
    if hidden is not None:
        time = Linear(fixed=hidden.time.fixed * rng.choice([0.7, 1, 1.4]), layer=longer(hidden.time.layer))
        hidden = None if rng.random() < 0.1 else Hidden(time=time, last=longer(hidden.last))
    return replace(
        one,
        forward=passes(one.forward),
        backward=passes(one.backward),
        hop=longer(one.hop),
        busy=None if one.busy is None else longer(one.busy),
        sums=stages(one.sums),
        optimizer=stages(one.optimizer),
        embedding=longer(one.embedding),
        capacity=one.capacity - (rng.random(one.capacity.shape) < 0.1),
        hidden=hidden,
    )


def test_twins_take_the_same_with_every_partition() -> None:
    for seed in seeds(fewer(20, 40)):
        rng = np.random.default_rng(seed)
        lines, layers = random_pipelines(rng)
        columns = rng.integers(0, 5, 20)
        _, seconds = all_times(lines.take(columns), layers)
        left = distinct(lines.take(columns))
        assert {row.tobytes() for row in seconds[left]} == {row.tobytes() for row in seconds}


def test_pipelines_that_differ_in_what_is_computed_again_or_falls_behind_are_no_twins() -> None:
    lines, _ = random_pipelines(np.random.default_rng(0))
    lines, two = lines.take(np.array([0, 0])), np.array([1, 2])
    again = Again(most=two, layer=np.ones_like(lines.backward.layer))
    longer = replace(lines, backward=replace(lines.backward, again=again))
    zero = np.zeros_like(lines.sums.fixed)
    nothing = Linear(fixed=zero, layer=zero)
    hidden = [Hidden(time=nothing, last=zero, behind=replace(nothing, layer=zero + some)) for some in (0, two)]
    assert len(distinct(lines)) == 1
    assert len(distinct(longer)) == 2
    assert [len(distinct(replace(lines, hidden=some))) for some in hidden] == [1, 2]


@pytest.mark.slow
def test_a_search_finds_the_best_of_all_sizes_orders_and_partitions() -> None:
    """With all the ways in which it leaves out plans: bounds, options that are never worse, orders that are alike."""
    tried = 0
    for seed in seeds(fewer(12, 40)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng)
        best = best_times(training, kinds, choices)
        if not best:
            continue
        keep = Best(1)
        explore([Space(training, kinds, choices)], keep)
        found = keep.plans[0].total if keep.plans else np.inf
        assert found == pytest.approx(min(seconds for _, seconds in best), rel=ROUNDING)
        assert all(floor(sized, kinds) <= seconds * (1 + ROUNDING) for sized, seconds in best)
        tried += 1
    assert tried > 5
