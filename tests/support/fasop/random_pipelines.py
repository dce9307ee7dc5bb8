"""Pipelines of any times, made from a seed, and all their partitions: what bounds are held against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conf.schema.experiment import Schedule
from fasop.simulation.linear import BackwardMessages, Hidden, LayerOrder, Linear
from fasop.simulation.pipelines import Pipelines

Numbers = Callable[[int], np.ndarray]

FLUSHING = tuple(one for one in Schedule if one not in (Schedule.pipedream, Schedule.model_parallel))
"""The schedules that a search looks at."""
MANY = 40
"""Pipelines of the same sizes that a seed makes at once."""


def random_pipelines(
    rng: np.random.Generator, schedule: Schedule | None = None, kinds: int | None = None
) -> tuple[Pipelines, int]:
    """`MANY` pipelines of the same sizes, and the layers that they share; with `kinds` these are of so many.

    Times may be equal, none, or differ a thousandfold, each kind of time in its own way; the memory may be short.
    """
    schedule = schedule or FLUSHING[rng.integers(len(FLUSHING))]
    chunks = int(rng.integers(2, 4)) if schedule is Schedule.interleaved else 1
    stages = int(rng.integers(2 if chunks > 1 else 1, 5 - chunks + 1 if chunks > 1 else 6))
    layers = int(rng.integers(1, 7 if chunks == 1 else 5))
    parts = stages * chunks

    def times(rows: int, *, least: float = 0.0) -> np.ndarray:
        """[rows, MANY]"""
        shape = (rows, MANY)
        ways = (
            lambda: rng.uniform(0, 10, shape),
            lambda: rng.integers(0, 3, shape).astype(float),
            lambda: np.zeros(shape),
            lambda: np.broadcast_to(rng.uniform(0, 5, (1, MANY)), shape),
            lambda: 10 ** rng.uniform(-3, 1.5, shape),
        )
        return np.maximum(ways[rng.integers(len(ways))](), least)

    def layer(rows: int, least: float) -> np.ndarray:
        """[rows, MANY] or [kinds, rows, MANY]: often as much longer everywhere for one kind as for the other."""
        if kinds is None:
            return times(rows, least=least)
        if rng.random() < 0.5:
            return rng.uniform(0.2, 3, (kinds, 1, 1)) * times(rows, least=least)
        return np.stack([times(rows, least=least) for _ in range(kinds)])

    def linear(rows: int, *, least: float = 0.0) -> Linear:
        return Linear(fixed=times(rows), layer=layer(rows, least))

    def passes() -> Linear:
        return Linear(fixed=times(parts), layer=np.concatenate([layer(stages, 0.0)] * chunks, axis=-2))

    def slower() -> np.ndarray | None:
        return None if kinds is None else times(stages)

    short, hop = rng.random() < 0.5, times(stages)
    capacity = rng.integers(-1 if rng.random() < 0.1 else 0, layers + 1, (stages, MANY)) if short else None
    order = None if kinds is None else _order(rng, layers, kinds)
    of_order = {}
    if order is not None:
        shares = rng.uniform(0.1, 0.5, (1 if chunks == 1 else 2, len(order.counts), parts, MANY))
        empty = rng.random((stages, MANY)) < (0.1 if rng.random() < 0.2 else 0)
        shares[..., np.tile(empty, (chunks, 1))] = np.nan
        capacity = np.where(empty, -1, layers)
        of_order = {"shares": shares if short else 1e-6 * shares, "order": order, "s_per_byte": times(stages)}
    return (
        Pipelines(
            schedule=schedule,
            micro_batches=int(rng.choice([1, 1, 2, 3, 4, 5, 8, 13])),
            forward=passes(),
            backward=passes(),
            hop=hop,
            busy=hop * rng.uniform(0, 1, hop.shape) if rng.random() < 0.5 else None,
            one_way_out=rng.random(stages) < 0.5 if rng.random() < 0.7 else None,
            blocking=schedule is Schedule.one_f_one_b and rng.random() < 0.3,
            sums=linear(stages),
            optimizer=linear(stages),
            embedding=times(1)[0] if stages > 1 else np.zeros(MANY),
            capacity=np.full((stages, MANY), layers) if capacity is None else capacity,
            basis=np.zeros(MANY, int),
            hidden=_hidden(times, stages, layer) if rng.random() < 0.5 else None,
            **of_order,
            back=BackwardMessages(
                hop=(back := times(stages)), busy=back * rng.uniform(0, 1, back.shape), s_per_byte=slower()
            )
            if rng.random() < 0.3
            else None,
        ),
        layers,
    )


def _hidden(times: Callable[..., np.ndarray], stages: int, layer: Callable[[int, float], np.ndarray]) -> Hidden:
    return Hidden(time=Linear(fixed=-times(stages), layer=layer(stages, 1e-3)), last=times(stages))


def _order(rng: np.random.Generator, layers: int, kinds: int) -> LayerOrder:
    """In runs, or in any order; some cuts are longer."""
    kind = rng.integers(0, kinds, layers)
    counts = np.zeros((kinds, layers + 1), int)
    counts[np.sort(kind) if rng.random() < 0.5 else kind, np.arange(1, layers + 1)] = 1
    return LayerOrder(counts=np.cumsum(counts, axis=1), extra=rng.integers(0, 2, layers + 1).astype(float))


def all_partitions(layers: int, parts: int) -> np.ndarray:
    """[parts, partitions]"""
    if parts == 1:
        return np.array([[layers]])
    tables = []
    for first in range(layers + 1):
        rest = all_partitions(layers - first, parts - 1)
        tables.append(np.concatenate([np.full((1, rest.shape[1]), first), rest]))
    return np.concatenate(tables, axis=1)


def all_times(lines: Pipelines, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """[parts, partitions], and [pipelines, partitions] the seconds of each; infinite where it does not fit."""
    table = all_partitions(layers, lines.parts_count)
    count, number = len(lines), table.shape[1]
    repeated = lines.take(np.repeat(np.arange(count), number))
    columns = np.tile(table, (1, count))
    seconds = np.where(repeated.fits(columns), repeated.iteration(columns), np.inf)
    return table, seconds.reshape(count, number)
