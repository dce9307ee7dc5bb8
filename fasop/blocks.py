"""How many layers a 1F1B pipeline has room for, if an iteration is to take no longer than so many seconds.

With 1F1B, neighbouring stages s to e turn in a cycle: s waits for the gradient of a micro-batch that went forward to e,
and then runs as many micro-batches further on as the block has stages. So a block of k stages takes, for all M
micro-batches, about M / k times what its stages and the hops between them take for one, there and back. That bounds the
layers of the block, as whole numbers; and all layers together are at most what any division into blocks has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fasop.fast import Floats
from fasop.pipelines import Pipelines
from fasop.placement import Integers

ROUNDING = 1e-6
"""What is this near below a whole number of layers counts as one."""
TINY = 1e-12
"""Seconds of a layer that bound nothing."""


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Stages `first` to `last`, [blocks, 1] each, and how often a chain of waits turns in them.

    The chain goes there with the first micro-batch, through all stages behind and back to the block, turns in it until
    there is nothing left to go forward, and waits for the backward passes left. Stages of a block can take turns in
    whatever is no whole cycle, and in what is left at last: so all have the mean of it.
    """

    first: Integers
    last: Integers
    length: Floats
    turns: Floats
    """Forward and backward passes of each stage after the first micro-batch's."""
    hops: Floats
    """Of each hop within the block, both ways."""
    left: Floats
    """Backward passes of each stage at last."""


def room(pipelines: Pipelines, layers: int, seconds: Floats) -> Integers:
    """[pipelines]: at least as many layers as any partition has that takes no longer than `seconds` [pipelines].

    `layers` is how many there are: fewer room means that all of them take longer, proved.
    """
    lines = pipelines.unhidden(layers)
    stages = lines.stages
    most = np.minimum(lines.capacity, layers).astype(float)
    most = np.minimum(most, _most(lines, _blocks(stages, lines.micro_batches, single=True), layers, seconds, most))
    blocks = _blocks(stages, lines.micro_batches, single=False)
    held = _most(lines, blocks, layers, seconds, most)
    reached = np.zeros((stages + 1, len(lines)))
    begin = 0
    for last in range(stages):
        together = held[begin : begin + last + 1]
        together[last] = np.minimum(together[last], most[last])
        reached[last + 1] = (reached[: last + 1] + together).min(axis=0)
        begin += last + 1
    fitting: Integers = np.where(most.min(axis=0) < 0, -1, np.minimum(reached[-1], layers)).astype(np.int64)
    return fitting


@lru_cache(maxsize=256)
def _blocks(stages: int, micro_batches: int, *, single: bool) -> _Blocks:
    """Every stage alone, or all blocks by their last stages."""
    numbers = range(stages)
    pairs = [(s, s) for s in numbers] if single else [(s, e) for e in numbers for s in range(e + 1)]
    first, last = np.array(pairs).T[:, :, np.newaxis]
    length = last - first + 1.0
    forward = np.maximum(0, micro_batches - stages + first)
    return _Blocks(
        first=first[:, 0],
        last=last[:, 0],
        length=length,
        turns=forward / length,
        hops=forward // length + np.maximum(0.0, forward % length - 1) / length,
        left=(micro_batches - 1 - forward) / length,
    )


def _most(lines: Pipelines, blocks: _Blocks, layers: int, seconds: Floats, most: Floats) -> Floats:
    """[blocks, pipelines]: the layers of a block, at most, where a single stage has at most `most` [stages, pipelines].

    A chain takes what is fixed and a price for every layer. Layers outside of the block are counted at the price of the
    slowest stage, less what the other stages save if they have as many as they may; and so are those inside.
    """
    f, b = lines.forward, lines.backward
    slowest = (f.layer + b.layer).max(axis=0)
    saved = _sums((slowest - f.layer - b.layer) * most)
    inside = [(1 + blocks.turns, f.layer + b.layer), (blocks.left, b.layer)]
    fixed = _fixed(lines, blocks)
    outside = slowest * layers - saved[-1] + saved[blocks.last + 1]
    first = _Ending(
        fixed=lines.sums.fixed[0] + np.minimum(0.0, layers * lines.sums.layer[0]) + lines.embedding,
        outside=outside - saved[blocks.first],
        summed=None,
    )
    found = np.full(fixed.shape, np.inf)
    for ending in (first, _any_ending(lines, blocks, most, slowest, outside)):
        terms = inside if ending.summed is None else [*inside, ending.summed]
        price, spare = _priced(blocks, terms, most)
        left = seconds - fixed - ending.fixed - ending.outside + spare
        whole = np.floor(left / np.maximum(price - slowest, TINY) + ROUNDING)
        found = np.minimum(found, np.where(price - slowest > TINY, whole, np.inf))
    return found


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How a chain ends after its last pass in the block, [blocks, pipelines] each."""

    fixed: Floats
    """More than the way back to the first stage, or less."""
    outside: Floats
    """What all layers cost at least that are outside of the block, if they were all of them."""
    summed: tuple[Floats, Floats] | None
    """How often the block's stages sum their gradients, and seconds of a layer."""


def _fixed(lines: Pipelines, blocks: _Blocks) -> Floats:
    """[blocks, pipelines]: of a chain back to the first stage, what does not depend on layers."""
    both, backward = _sums(lines.forward.fixed + lines.backward.fixed), _sums(lines.backward.fixed)
    hops, first, after = _sums(_hops(lines)), blocks.first, blocks.last + 1
    fixed: Floats = (
        lines.optimizer.fixed[0]
        + both[-1]
        + 2 * hops[-1]
        + blocks.turns * (both[after] - both[first])
        + blocks.left * (backward[after] - backward[first])
        + 2 * blocks.hops * (hops[blocks.last] - hops[first])
    )
    return fixed


def _any_ending(lines: Pipelines, blocks: _Blocks, most: Floats, slowest: Floats, outside: Floats) -> _Ending:
    """The mean of the chains that end with the sums of stages 0 to the block's last one, and go no further back."""
    f, b, g, hop = lines.forward, lines.backward, lines.sums, _hops(lines)
    stage, first, last = np.arange(1.0, lines.stages + 1)[:, np.newaxis], blocks.first, blocks.last
    share = 1 / (last[:, np.newaxis] + 1.0)
    passed, backward, summed = _sums((b.fixed + hop) * stage), _sums(b.fixed + hop), _sums(g.fixed)
    prices = f.layer + (b.layer * stage + g.layer) / stage.reshape(-1, 1, 1)
    saved = np.cumsum((slowest - np.minimum(slowest, prices)) * most, axis=1)
    before = np.concatenate([np.zeros_like(saved[:, :1]), saved], axis=1)
    return _Ending(
        fixed=share * (passed[first] + summed[last + 1] + lines.embedding) - backward[first],
        outside=outside - before[last, first],
        summed=(share, g.layer),
    )


def _priced(blocks: _Blocks, terms: Sequence[tuple[Floats, Floats]], most: Floats) -> tuple[Floats, Floats]:
    """[blocks, pipelines]: the highest price of a layer in a block, and what cheaper stages save of it at most."""
    first, last, counts = blocks.first, blocks.last, _sums(most)
    count = counts[last + 1] - counts[first]
    price, paid = np.zeros_like(count), np.zeros_like(count)
    for times, values in terms:
        total = _sums(values * most)
        price += times * _highest(values)[first, last]
        paid += times * (total[last + 1] - total[first])
    return price, price * count - paid


def _hops(lines: Pipelines) -> Floats:
    """Without the one from the last stage to the first."""
    return np.concatenate([lines.hop[:-1], np.zeros_like(lines.hop[:1])])


def _sums(values: Floats) -> Floats:
    """[rows + 1, pipelines]: of the first rows."""
    return np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])


def _highest(values: Floats) -> Floats:
    """[rows, rows, pipelines]: the largest value of the rows from one to another."""
    stages = len(values)
    below = np.where(np.tri(stages, dtype=bool).T[:, :, np.newaxis], values, -np.inf)
    highest: Floats = np.maximum.accumulate(below, axis=1)
    return highest
