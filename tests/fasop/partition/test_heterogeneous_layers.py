"""Partitions of layers that differ, of random sequences, against all terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from conf.schema.experiment import Schedule
from fasop.partition import heterogeneous_layers
from fasop.partition import least_sum as least_sum_module
from fasop.partition.baselines import even, minmax, start
from fasop.partition.bounds import quick_bound
from fasop.partition.dominance import distinct, never_worse
from fasop.partition.exact import proved
from fasop.partition.heterogeneous_layers import (
    both_of_parts,
    cuts_elsewhere,
    fitting,
    gains,
    least_largest_part,
    memory_left,
    memory_taken,
    of_first_layers,
    passes_with_one_more,
)
from fasop.partition.least_sum import amp_of_heterogeneous_layers, least_sum
from fasop.partition.local_search import bottleneck, feasible, improved_by_cuts, largest_stage, shortest
from fasop.simulation.iteration import stage_times
from fasop.simulation.linear import Hidden, LayerOrder, Linear
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.ranks.replay import simulate
from megatron_ext.contract.schedule.iteration import as_json, schedule
from tests.support.cases import fewer
from tests.support.fasop.random_pipelines import FLUSHING, all_partitions, all_times, random_pipelines
from tests.support.fasop.replays import pipeline_time
from tests.support.fasop.seeds import seeds

ROUNDING = 1e-9


def cases(count: int, name: Schedule | None = None) -> Iterator[tuple[np.random.Generator, Pipelines, int]]:
    for seed in seeds(count):
        rng = np.random.default_rng(seed)
        yield rng, *random_pipelines(rng, name, kinds=int(rng.integers(1, 4)))


def test_a_part_has_the_layers_between_its_cuts() -> None:
    """a a b a c b, cut behind two and behind five."""
    kinds = [0, 0, 1, 0, 2, 1]
    counts = np.array([[kinds[:number].count(kind) for number in range(7)] for kind in range(3)])
    order = LayerOrder(counts=counts, extra=np.zeros(7))
    assert order.layers == 6
    assert order.by_kind(np.array([[2], [3], [0], [1]]))[..., 0].T.tolist() == [
        [2, 0, 0],
        [1, 1, 1],
        [0] * 3,
        [0, 1, 0],
    ]


@pytest.mark.parametrize("name", FLUSHING)
def test_every_partition_takes_what_the_replay_of_its_layers_says(name: Schedule) -> None:
    """Layer by layer: each is looked up for itself, and so is the message behind it."""
    for rng, lines, layers in cases(fewer(5, 12), name):
        table = all_partitions(layers, lines.parts_count)
        split = table[:, [int(rng.integers(table.shape[1]))]]
        one = lines.take(np.array([int(rng.integers(len(lines)))]))
        if one.stages == 2:  # whose neighbours are one
            one = replace(one, one_way_out=np.ones(2, bool))
        assert one.order is not None
        assert one.s_per_byte is not None
        kinds = np.argmax(np.diff(one.order.counts, axis=1), axis=0)
        bounds = [0, *np.cumsum(split[:, 0])]
        held = [kinds[begin:end] for begin, end in pairwise(bounds)]
        times = stage_times(one, split[:, 0].tolist())
        chunks, stages = one.parts_count // one.stages, one.stages
        for part, own in enumerate(held):
            stage, chunk = part % stages, part // stages
            for passes, found in ((one.forward, times[stage].forward), (one.backward, times[stage].backward)):
                taken = passes.fixed[part, 0] + sum(passes.layer[kind, part, 0] for kind in own)
                assert found[chunk] == pytest.approx(taken)
        for stage in range(stages - 1):
            longest = max(one.order.extra[bounds[1 + chunk * stages + stage]] for chunk in range(chunks))
            sent = one.hop[stage, 0] + longest * one.s_per_byte[stage, 0]
            assert times[stage].send_forward == pytest.approx(sent)
            if (back := one.back) is not None:
                assert back.s_per_byte is not None
                sent = back.hop[stage, 0] + longest * back.s_per_byte[stage, 0]
            assert times[stage + 1].send_backward == pytest.approx(sent)
        lists = as_json(schedule(str(name), stages, chunks, one.micro_batches), chunks, one.micro_batches)
        begin = one.optimizer.of(one.held(split))[:, 0].tolist()
        events = simulate(lists, times, begin, blocking=one.blocking)
        assert one.parts(split).pipeline[0] == pytest.approx(pipeline_time(events))


def test_the_balance_is_the_best_there_is() -> None:
    """Of one chunk to a stage; with several a partition is found that fits, if one does that shares memory evenly."""
    tried = 0
    for _, lines, layers in cases(fewer(32, 80)):
        table, seconds = all_times(lines, layers)
        fits, possible = np.isfinite(seconds), feasible(lines, layers)
        alone = lines.parts_count == lines.stages
        assert possible.tolist() == fits.any(axis=1).tolist() if alone else not (possible & ~fits.any(axis=1)).any()
        some, fits = lines.take(np.nonzero(possible)[0]), fits[possible]
        if not len(some):
            continue
        balanced = bottleneck(some, layers)
        assert some.fits(balanced).all()
        assert (balanced.sum(axis=0) == layers).all()
        for column in range(len(some) if alone else 0):
            one = some.take(np.full(table.shape[1], column))
            best = largest_stage(one, table)[fits[column]].min()
            assert largest_stage(some, balanced)[column] <= best * (1 + 1e-6)
            tried += 1
    assert tried > 250


def test_sums_and_limits_of_compiled_loops_are_those_of_numpy_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = heterogeneous_layers.compiled
    for rng, lines, _ in cases(fewer(24, 60)):
        both, memory, room = both_of_parts(lines), memory_taken(lines), memory_left(lines)
        limits = [np.full(both.fixed.shape, np.inf), rng.uniform(0, 20, both.fixed.shape)]
        found = []
        for one in (compiled, None):
            for module in (heterogeneous_layers, least_sum_module):
                monkeypatch.setattr(module, "compiled", one)
            fits = fitting(lines)
            largest = least_largest_part(lines.take(np.flatnonzero(fits)))
            found.append((*least_sum(of_first_layers(lines, both.layer), memory, room, limits), fits, largest))
        assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


def test_the_least_sum_is_that_of_the_best_of_all_partitions() -> None:
    """Of all that fit into memory and whose parts take no more than a limit."""
    tried = 0
    for rng, lines, layers in cases(fewer(24, 60)):
        both, table = both_of_parts(lines), all_partitions(layers, lines.parts_count)
        limits = [np.full(both.fixed.shape, np.inf), rng.uniform(0, 20, both.fixed.shape)]
        memory, room = memory_taken(lines), memory_left(lines)
        found, sums = least_sum(of_first_layers(lines, both.layer), memory, room, limits)
        for column in range(0, len(lines), 5):
            one = lines.take(np.full(table.shape[1], column))
            layer = np.broadcast_to(both.layer[..., column, np.newaxis], (*both.layer.shape[:2], table.shape[1]))
            takes = (layer * one.counted(table)).sum(axis=0)
            ends = np.cumsum(table, axis=0)
            part = np.arange(len(table))[:, np.newaxis]
            held = memory[ends, part, column] - memory[ends - table, part, column]
            fits = (held <= room[:, [column]] + 1e-8).all(axis=0)
            for number, limit in enumerate(limits):
                allowed = fits & (takes <= limit[:, [column]] + 1e-8).all(axis=0)
                best = np.where(allowed, takes.sum(axis=0), np.inf).min()
                assert sums[number, column] == pytest.approx(best, rel=1e-6)
                if np.isfinite(best):
                    place = np.nonzero((table == found[number, :, [column]].T).all(axis=0))[0][0]
                    assert allowed[place]
                    assert takes[:, place].sum() == pytest.approx(best, rel=1e-6)
                    tried += 1
    assert tried > 50


def test_a_search_begins_at_no_slower_partition_than_the_public_tools() -> None:
    """Or AMP's."""
    better = 0
    for _, lines, layers in cases(fewer(16, 40)):
        possible = feasible(lines, layers)
        if not possible.any():
            continue
        some = lines.take(np.nonzero(possible)[0])
        balanced = bottleneck(some, layers)
        begun = some.iteration(start(some, layers, balanced))
        for other in (balanced, minmax(some, layers), even(some, layers), amp_of_heterogeneous_layers(some, balanced)):
            seconds = np.where(some.fits(other), some.iteration(other), np.inf)
            assert (begun <= seconds * (1 + ROUNDING)).all()
        without = [np.where(some.fits(one), some.iteration(one), np.inf) for one in (balanced, minmax(some, layers))]
        better += int((begun < 0.9 * np.min(without, axis=0)).sum())
    assert better > 12


def test_no_partition_is_faster_than_the_bounds() -> None:
    tried = 0
    for _, lines, layers in cases(fewer(48, 120)):
        _, seconds = all_times(lines, layers)
        possible = feasible(lines, layers)
        if possible.any():
            some, best = lines.take(np.nonzero(possible)[0]), seconds[possible].min(axis=1)
            assert (quick_bound(some, layers, bottleneck(some, layers)) <= best * (1 + ROUNDING)).all()
            tried += len(some)
    assert tried > 500


def test_a_single_stage_takes_no_less_than_its_passes_its_sums_and_its_update() -> None:
    """There is nothing else to it, so that its bound is what it takes, if each kind of layer has passes that take time:
    bounds count in those."""
    tried = 0
    for _, lines, layers in cases(fewer(100, 200)):
        if lines.stages == 1 and lines.hidden is None and (possible := feasible(lines, layers)).any():
            some = lines.take(np.nonzero(possible)[0])
            alone = np.full((1, len(some)), layers)
            bound, seconds = quick_bound(some, layers, alone), some.iteration(alone)
            assert (bound <= seconds * (1 + ROUNDING)).all()
            timed = ((some.forward.layer + some.backward.layer).sum(axis=1) > 0).all(axis=0)
            assert np.allclose(bound[timed], seconds[timed], rtol=1e-6)
            tried += int(timed.sum())
    assert tried > 50


@pytest.mark.slow
def test_no_partition_is_faster_than_what_is_proved() -> None:
    near = []
    for _, lines, layers in cases(fewer(24, 60)):
        _, seconds = all_times(lines, layers)
        possible = feasible(lines, layers) & np.isfinite(seconds).any(axis=1)
        for number in np.nonzero(possible)[0][:2]:
            one, best = lines.take(np.array([number])), seconds[number].min()
            proof = proved(one, layers, bottleneck(one, layers), 0)
            assert proof.bound <= best * (1 + ROUNDING) <= proof.seconds * (1 + 2 * ROUNDING)
            assert one.fits(proof.partition)[0]
            assert one.iteration(proof.partition)[0] == proof.seconds
            near.append(proof.bound / best if best else 1.0)
    assert len(near) > 20
    assert np.mean(near) > 0.8


def test_no_move_gains_more_than_is_expected_of_it() -> None:
    """With nothing hidden; else a move may also change what is."""
    for rng, lines, layers in cases(fewer(24, 60)):
        plain = lines.unhidden(layers)
        table = all_partitions(layers, plain.parts_count)
        parts = table[:, rng.integers(0, table.shape[1], len(plain))]
        pairs = np.array([(a, b) for a in range(len(parts)) for b in range(len(parts)) if a != b], int).reshape(-1, 2)
        slopes, before = plain.longest(parts)
        expected = gains(plain, parts, slopes, pairs)
        for number, (source, target) in enumerate(pairs):
            here = np.nonzero(parts[source] > 0)[0]
            moved = parts[:, here].copy()
            moved[source] -= 1
            moved[target] += 1
            after = plain.take(here).iteration(moved)
            assert (before[here] - after <= expected[here, number] + ROUNDING * before[here]).all()
            assert (passes_with_one_more(plain, parts, pairs)[here, number] <= after * (1 + ROUNDING)).all()


def test_no_cut_that_is_left_out_would_gain_elsewhere() -> None:
    """With nothing hidden, as where layers move."""
    for rng, lines, layers in cases(fewer(24, 60)):
        plain = lines.unhidden(layers)
        table = all_partitions(layers, plain.parts_count)
        parts = table[:, rng.integers(0, table.shape[1], len(plain))]
        if len(parts) == 1:
            continue
        before = plain.iteration(parts)
        owner, near = cuts_elsewhere(plain, parts, before)
        known = {(number, *one) for number, one in zip(owner.tolist(), near.T.tolist(), strict=True)}
        assert (near >= 0).all()
        assert (near.sum(axis=0) == layers).all()
        for cut, step in product(range(len(parts) - 1), (-4, -2, -1, 1, 2, 4)):
            moved = parts.copy()
            moved[cut] += step
            moved[cut + 1] -= step
            here = np.nonzero((moved >= 0).all(axis=0))[0]  # it passes no other
            after = plain.take(here).iteration(moved[:, here]) if len(here) else before[here]
            for number in here[after < before[here] * (1 - ROUNDING)].tolist():
                assert (number, *moved[:, number].tolist()) in known


def test_a_search_among_many_partitions_finds_one_that_is_hardly_worse_than_the_best() -> None:
    """Here all terms are few; so the search is made to begin at the balance."""
    ratios = []
    for _, lines, layers in cases(fewer(24, 60)):
        _, seconds = all_times(lines, layers)
        possible = feasible(lines, layers)
        if not possible.any():
            continue
        some, best = lines.take(np.nonzero(possible)[0]), seconds[possible].min(axis=1)
        _, all_of_them = shortest(some, layers, bottleneck(some, layers))
        assert (all_of_them <= best * (1 + ROUNDING)).all()
        found, taken = improved_by_cuts(some, bottleneck(some, layers))
        assert some.fits(found).all()
        ratios += (taken / best).tolist()
    assert np.mean(ratios) < 1.01
    assert np.mean(np.array(ratios) < 1 + ROUNDING) > 0.9


def test_what_is_never_worse_is_so_with_every_partition() -> None:
    never = 0
    for rng, one, layers in cases(fewer(40, 100)):
        other = longer(rng, one)
        found = never_worse(one, other, layers)
        (_, mine), (_, others) = all_times(one, layers), all_times(other, layers)
        assert (mine <= others * (1 + ROUNDING))[found].all()
        never += int(found.sum())
    assert never > 120


def test_twins_take_the_same_with_every_partition() -> None:
    for rng, lines, layers in cases(fewer(16, 40)):
        columns = rng.integers(0, 5, 20)
        _, seconds = all_times(lines.take(columns), layers)
        left = distinct(lines.take(columns))
        assert {row.tobytes() for row in seconds[left]} == {row.tobytes() for row in seconds}


def longer(rng: np.random.Generator, one: Pipelines) -> Pipelines:
    """The same pipelines with some times that are longer, and seldom one that is shorter."""
    factors = np.array([1, 1, 1.5] if rng.random() < 0.7 else [1] * 30 + [1.5] * 10 + [0.9])

    def grown(values: np.ndarray) -> np.ndarray:
        return values * rng.choice(factors, values.shape)

    def times(passes: Linear) -> Linear:
        return Linear(fixed=grown(passes.fixed), layer=grown(passes.layer))

    hidden = one.hidden
    assert one.s_per_byte is not None
    return replace(
        one,
        forward=times(one.forward),
        backward=times(one.backward),
        hop=grown(one.hop),
        s_per_byte=grown(one.s_per_byte),
        sums=times(one.sums),
        optimizer=times(one.optimizer),
        shares=None if one.shares is None else grown(one.shares),
        hidden=None if hidden is None else Hidden(time=times(hidden.time), last=grown(hidden.last)),
    )
