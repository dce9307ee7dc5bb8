"""Bounds of many layouts at once, on nodes in one order (`fasop.search.by_stage.bounds.chains`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import layouts as compiled
from fasop.costs import sizes
from fasop.costs.arrays import Floats, Integers, distinct, rolled
from fasop.costs.hardware import NodeKind
from fasop.costs.schedules import backward_left, filling, forward_left
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.search.by_stage.bounds.chains import (
    FAR,
    Chains,
    TripBound,
    Way,
    Work,
    forward_in_gpipe,
    least,
    until_returned,
    ways,
)
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.bounds.layout_links import LayoutLinks
from fasop.search.by_stage.bounds.turning import LayoutTurns
from fasop.simulation.linear import Linear
from fasop.simulation.nodes import step_s_per_parameter
from megatron_ext.contract.parallel_config import Schedule


@dataclass(frozen=True)
class _KindCosts:
    """What stages would take for one micro-batch on nodes of one kind; [layouts, stages] each, and infinite or nothing
    where a stage lies on no such node."""

    number: int
    present: NDArray[np.bool_]
    forward: Floats
    """Seconds of a unit of work."""
    backward: Floats
    ends: tuple[Floats, Floats]
    """Forward and backward: the embedding on the first stage, and the head on the last one."""
    embedding: tuple[Floats, Floats]
    """Forward and backward, [layouts, 1]: the embedding on the first stage."""


class PlacedLayouts:
    """Layouts on nodes in their order. `kinds` are the names of those of `Work`, which has the sizes of all layouts."""

    def __init__(
        self,
        layouts: LayoutBatch,
        nodes: Sequence[NodeKind],
        kinds: Sequence[str],
        among: tuple[PlacedLayouts, Integers] | None = None,
    ) -> None:
        """`among`: others that have these in such rows, which know what does not change."""
        self._layouts, self._nodes, self._names, self._among = layouts, nodes, kinds, among
        self._links = LayoutLinks(layouts, nodes)
        self._kinds = {node.name: node for node in nodes}
        self._number = np.arange(layouts.tensors.shape[1])
        self._known: dict[tuple[str, float | tuple[float, ...]], Floats] = {}
        self._last_costs: tuple[Work, list[_KindCosts]] | None = None

    def take(self, rows: Integers) -> PlacedLayouts:
        """Some of them."""
        return PlacedLayouts(self._layouts.take(rows), self._nodes, self._names, (self, rows))

    def _kept(self, name: str, of: float | tuple[float, ...], find: Callable[[PlacedLayouts], Floats]) -> Floats:
        """[layouts] or [layouts, stages, …]: what `find` returns, which depends on the name and the numbers alone; of
        all among which these are it is found once."""
        if (name, of) not in self._known:
            if self._among is None:
                self._known[name, of] = find(self)
            else:
                others, rows = self._among
                of_these = others._kept(name, of, find)[rows]
                self._known[name, of] = of_these if of_these.ndim == 1 else of_these[:, : len(self._number)]
        return self._known[name, of]

    def shortest_trip(self, one: Training, work: Work) -> Floats:
        """[layouts]: a bound like `least_seconds` that takes hardly any time: all work lies on the stage that a
        micro-batch is through first, on the fastest kind of node."""
        half = one.parallel.schedule.definition.input_share
        of_size = work.forward.min(axis=1) + half * work.backward.min(axis=1)
        of_stages = np.where(self._layouts.exists, of_size[self._sizes(work)], np.inf)
        return work.whole * of_stages.min(axis=1)

    def least_seconds(self, one: Training, work: Work) -> Floats:
        """[2, layouts], without and with a sharded optimizer, of the schedule and the micro-batches of `one`: seconds
        below which no iteration is."""
        scattered, found = self._scattered(work), np.zeros((2, len(self._layouts.tensors)))
        for way in ways(one.parallel.schedule):
            chains, hidden = self._chains(one, work, way)
            if not way.sums:
                found = np.maximum(found, least(chains, work.whole))
                continue
            for sharded, rounds in enumerate((2, 1)):  # an all-reduce, or a reduce-scatter
                exposed = np.maximum(0.0, rounds * scattered - hidden * one.overlaps)
                every = replace(chains, own=chains.own + exposed)
                found[sharded] = np.maximum(found[sharded], least(every, work.whole))
        return found + self._start(one)

    def _chains(self, one: Training, work: Work, way: Way) -> tuple[Chains, Floats]:
        """The chains but for the sums of gradients, and [layouts, stages] seconds of a unit that hide these.

        A micro-batch comes as fast as the stage's fastest kind of node lets it, and the stage's own passes take as long
        as on its slowest.
        """
        layouts, schedule, number = self._layouts, one.parallel.schedule, self._number
        fewest, most = self._shared_out(one.parallel.global_batch_size // one.parallel.micro_batch_size)
        costs, hops = self._costs(work), self._hops(work)
        own, hidden = np.zeros(layouts.tensors.shape), np.zeros(layouts.tensors.shape)
        ends = np.full(layouts.tensors.shape, np.inf)
        for kind in costs:
            batches = np.where(self._first == kind.number, most, fewest)
            back, least_back = (
                each if way.sums else until_returned(schedule, self._layouts.lag, each, first=number == 0)
                for each in (batches, fewest)
            )
            own = _largest_present(own, batches * kind.forward + back * kind.backward, kind.present)
            hidden = _largest_present(hidden, filling(schedule) * kind.backward, kind.present)
            ends = _smallest(ends, fewest * kind.ends[0] + least_back * kind.ends[1], kind.present)
        trip = self._trip([(kind.forward, kind.backward) for kind in costs], costs, way.back)
        embedding = self._trip([kind.embedding for kind in costs], costs, way.back)
        after = 0.0 if way.sums else self._ending(one)[:, np.newaxis]
        before = (1 if way.sums else 2) * (np.cumsum(hops, axis=1) - hops)
        fixed = ends + before + np.where(number > 0, embedding[:, :1], 0.0) + after
        chains = Chains(
            own=own,
            trip=np.where(layouts.exists, trip, 0.0),
            fixed=np.where(layouts.exists, fixed, 0.0),
            exists=layouts.exists,
        )
        return chains, hidden

    def turning_seconds(self, one: Training, work: Work) -> Floats:
        """[2, layouts]: the same from means with chains that turn (`LayoutTurns`)."""
        count, costs, schedule = (
            one.parallel.global_batch_size // one.parallel.micro_batch_size,
            self._costs(work),
            one.parallel.schedule,
        )
        fewest, most = self._shared_out(count)
        hop, busy, _ = np.moveaxis(self._messages(work), 2, 0)
        chains, _ = self._chains(one, work, ways(schedule)[0])
        ends = self._trip([kind.ends for kind in costs], costs, schedule.definition.input_share)
        forward, backward = self._quickest(costs, lambda kind: kind.forward, lambda kind: kind.backward)
        turns = LayoutTurns(
            schedule=schedule,
            layouts=self._layouts,
            total=count,
            fewest=fewest,
            most=most,
            ahead=np.maximum(self._layouts.ahead, 0),
            lag=self._layouts.lag,
            hop=hop,
            busy=busy,
            trip=chains.trip,
            ends=np.where(self._layouts.exists, ends, 0.0),
            passes=(forward, backward),
            ending=self._ending(one),
        )
        every = [np.maximum(beside.fixed, least(chains, work.whole, beside)) for beside in turns.every()]
        return np.max(every, axis=0) + self._start(one)

    def trip_in_parts(self, one: Training, work: Work) -> Floats:
        """[2, layouts]: a bound like `least_seconds` from another chain (`TripBound`), if layers have parts."""
        return self._of_trip(one, work, alike=False)

    def trip_seconds(self, one: Training, work: Work) -> Floats:
        """[2, layouts]: the same of whole layers, where all are alike, which takes longer to find."""
        return self._of_trip(one, work, alike=len(work.units) == 1)

    def trip_alone(self, one: Training, work: Work, rows: Integers) -> Floats:
        """[rows]: the same of some layouts without messages and steps, which takes little time: most layouts are above
        what is worth it even so."""
        return self._chain(one, work, self._ending(one), rows).least(work.whole)

    def _of_trip(self, one: Training, work: Work, *, alike: bool) -> Floats:
        chain = self._chain(one, work, 2 * self._hops(work).sum(axis=1) + self._ending(one))
        room = one.blocks.layers * self._layouts.exists if alike else None
        longest = np.maximum(chain.least(work.whole, room), self._queue(one, work, chain))
        return longest + self._start(one)

    def _chain(self, one: Training, work: Work, constant: Floats, rows: Integers | None = None) -> TripBound:
        """The chain through all stages and back of all layouts, or of some `rows`, with a `constant` [layouts] of
        seconds."""
        count = one.parallel.global_batch_size // one.parallel.micro_batch_size
        some = np.arange(len(constant)) if rows is None else rows
        find = self._compiled_chain if hasattr(compiled, "chains_of_rows") else self._chain_of_trip
        trip, ends, layer, fixed = find(one.parallel.schedule, count, work, some)
        return TripBound(trip, Linear(fixed=fixed, layer=layer), constant[some] + ends.sum(axis=1))

    def _chain_of_trip(self, schedule: Schedule, count: int, work: Work, rows: Integers) -> Floats:
        """[4, rows, stages]: seconds of a unit's trip and, beside units, of the way there and back; of a unit in the
        passes that are left, and beside units; behind the last stage a trip takes `FAR`."""
        costs, layouts, half = self._costs(work), self._layouts, schedule.definition.input_share
        fewest, most = self._shared_out(count)
        layer, fixed = np.full(layouts.tensors.shape, -np.inf), np.zeros(layouts.tensors.shape)
        trip = self._trip([(kind.forward, kind.backward) for kind in costs], costs, half)
        ends = self._trip([kind.ends for kind in costs], costs, half)
        there, there_ends = self._quickest(costs, lambda kind: kind.forward, lambda kind: kind.ends[0])
        any_replica = (~layouts.even)[:, np.newaxis] & (schedule is Schedule.gpipe)
        in_gpipe = self._forward_left(schedule, fewest, count) if schedule is Schedule.gpipe else None
        for kind in costs:
            batches = np.where(self._first == kind.number, most, fewest)
            ahead = self._forward_left(schedule, batches, count) if in_gpipe is None else in_gpipe
            back = np.asarray(backward_left(schedule, self._layouts.lag, batches), float)
            forward, beside = np.where(any_replica, [there, there_ends], [kind.forward, kind.ends[0]])
            of_kind = ahead * forward + back * kind.backward
            longer = kind.present & (of_kind > layer)
            layer = np.where(longer, of_kind, layer)
            fixed = np.where(longer, ahead * beside + back * kind.ends[1], fixed)
        nothing = np.array([FAR, 0.0, 1.0, 0.0])[:, np.newaxis, np.newaxis]
        return np.where(layouts.exists, [trip, ends, layer, fixed], nothing)[:, rows]

    def _compiled_chain(self, schedule: Schedule, count: int, work: Work, rows: Integers) -> Floats:
        """The same by the compiled loop."""
        layouts, one, shape = self._layouts, schedule.definition, self._layouts.replicas.shape
        gpipe = schedule is Schedule.gpipe
        return compiled.chains_of_rows(
            rows,
            self._present.view(np.uint8),
            _in_rows(self._sizes(work)),
            _in_rows(self._first),
            _in_rows(layouts.replicas),
            layouts.last,
            layouts.even.view(np.uint8),
            np.broadcast_to(0 if gpipe else one.ahead(layouts.ahead), shape),
            np.broadcast_to(one.lag(layouts.lag), shape),
            self._forward_left(schedule, layouts.replicas, count) if gpipe else None,
            work.forward,
            work.backward,
            work.embedding,
            work.head,
            count,
            one.input_share,
            FAR,
        )

    def _queue(self, one: Training, work: Work, chain: TripBound) -> Floats:
        """[layouts]: the busiest link sends all its messages one after another; before the first of them and behind the
        last one lies a micro-batch's trip, or where messages to both neighbours leave by it, a micro-batch's messages.
        """
        count = one.parallel.global_batch_size // one.parallel.micro_batch_size
        key = (float(count), *work.messages)
        queues = self._kept("queues", key, lambda every: every._queues(every._messages(work), count))
        shortest = chain.constant + work.whole * chain.trip.min(axis=1)
        return np.maximum(shortest + queues[:, 0, 0], queues[:, 0, 1])

    def _queues(self, messages: Floats, count: int) -> Floats:
        """[layouts, 1, 2]: for how long links are occupied by the messages of all micro-batches but one; and, where
        those to both neighbours leave by one, by all, with the way of a micro-batch there and back. The first replica
        has the most."""
        hop, busy, both = np.moveaxis(messages, 2, 0)
        most = self._shared_out(count)[1]
        times = np.maximum(most, rolled(most, -1, 1))  # those of the next stage come back
        before, ahead = rolled(busy, 1, 1), 2 * (np.cumsum(hop, axis=1) - hop)
        one_way = np.where(both > 0, ahead - before + most * (busy + before), 0.0)
        return np.stack([((times - 1) * busy).max(axis=1), one_way.max(axis=1)], axis=1)[:, np.newaxis]

    @staticmethod
    def _quickest(costs: Sequence[_KindCosts], *parts: Callable[[_KindCosts], Floats]) -> list[Floats]:
        """[layouts, stages]: the least of all kinds that a stage lies on, of each part."""
        every = [[np.where(kind.present, part(kind), np.inf) for kind in costs] for part in parts]
        return [np.where(np.isfinite(least_of := np.min(of_part, axis=0)), least_of, 0.0) for of_part in every]

    def _start(self, one: Training) -> Floats:
        """[2, layouts], without and with a sharded optimizer: seconds of the first stage's step, at least, for which
        its first micro-batch waits: that of the embedding."""
        step = min(step_s_per_parameter(kind, one) for kind in self._kinds.values())
        whole = step * self._kept("embedding", 0.0, lambda every: every._embedding_parameters(one))
        return np.array([whole, whole / self._layouts.replicas[:, 0]])

    def _embedding_parameters(self, one: Training) -> Floats:
        """[layouts]: of a rank of the first stage."""
        of_size = np.zeros(self._layouts.tensors[:, 0].max(initial=0) + 1)
        for tensor in distinct(self._layouts.tensors[:, 0]):
            of_size[tensor] = sizes.embedding_parameters(one.model, int(tensor))
        return of_size[self._layouts.tensors[:, 0]]

    def _trip(self, times: Sequence[tuple[Floats, Floats]], costs: Sequence[_KindCosts], share: float) -> Floats:
        """[layouts, stages]: as `bounds.least_trip`, of the kinds of nodes that each stage lies on."""
        together, there, back = (np.full(self._layouts.tensors.shape, np.inf) for _ in range(3))
        for (forward, backward), kind in zip(times, costs, strict=True):
            together = _smallest(together, forward + share * backward, kind.present)
            there = _smallest(there, forward, kind.present)
            back = _smallest(back, backward, kind.present)
        way_back = share * np.where(np.isfinite(back), back, 0.0)
        return np.where(self._layouts.even[:, np.newaxis], together, there + way_back)

    def _shared_out(self, count: int) -> tuple[Integers, Integers]:
        """[layouts, stages]: micro-batches of a replica, at least and at most, of so many."""
        replicas = self._layouts.replicas
        each = np.arange(1, replicas.max(initial=1) + 1)
        return (count // each).take(replicas - 1), (-(-count // each)).take(replicas - 1)

    @cached_property
    def _of_gpu(self) -> Integers:
        """[GPUs]: the number of the kind of node that each lies in."""
        return np.array([self._names.index(node.name) for node in self._nodes for _ in range(node.gpus)])

    @cached_property
    def _first(self) -> Integers:
        """[layouts, stages]: the kind of node on which a stage begins."""
        return self._of_gpu[np.minimum(self._layouts.begins, len(self._of_gpu) - 1)]

    @cached_property
    def _present(self) -> NDArray[np.bool_]:
        """[kinds, layouts, stages]: whether the stage lies on nodes of the kind, too."""
        layouts, kinds = self._layouts, np.arange(len(self._names))
        before = np.concatenate(
            [np.zeros((len(kinds), 1), int), (self._of_gpu == kinds[:, np.newaxis]).cumsum(axis=1)], 1
        )
        found: NDArray[np.bool_] = (before.take(layouts.ends, 1) > before.take(layouts.begins, 1)) & layouts.exists
        return np.ascontiguousarray(found)

    def _sizes(self, work: Work) -> Integers:
        """[layouts, stages]: the number of each stage's tensor size in `work`."""
        numbers = np.zeros(max(work.sizes) + 1, np.int64)
        numbers[[*work.sizes]] = [*work.sizes.values()]
        return numbers.take(self._layouts.tensors)

    def _costs(self, work: Work) -> list[_KindCosts]:
        """What all stages take on each kind of node that any of them lies on. Those of the last `work` are kept."""
        if self._last_costs is None or self._last_costs[0] is not work:
            self._last_costs = work, [*self._find_costs(work)]
        return self._last_costs[1]

    def _find_costs(self, work: Work) -> Iterator[_KindCosts]:
        size, last = self._sizes(work), self._layouts.last
        rows = np.arange(len(last))
        for kind, present in enumerate(self._present):
            if present.any():
                embedding, head = work.embedding[:, kind], work.head[:, kind]
                ends = np.zeros((2, *size.shape))
                ends[:, :, 0] = embedding[size[:, 0]].T
                ends[:, rows, last] += head[size[rows, last]].T
                yield _KindCosts(
                    number=kind,
                    present=present,
                    forward=work.forward[:, kind].take(size),
                    backward=work.backward[:, kind].take(size),
                    ends=(ends[0], ends[1]),
                    embedding=(embedding[size[:, :1], 0], embedding[size[:, :1], 1]),
                )

    def _forward_left(self, schedule: Schedule, each: Integers, total: int) -> Floats:
        """[layouts, stages]: forward passes that `bounds.left` counts of replicas with `each` of all `total`
        micro-batches."""
        if schedule is Schedule.gpipe:
            replicas = self._layouts.replicas
            last = replicas[np.arange(len(replicas)), self._layouts.last][:, np.newaxis]
            return np.asarray(forward_in_gpipe(replicas, last, total), float)
        return np.asarray(forward_left(schedule, self._layouts.ahead, each), float)

    def _hops(self, work: Work) -> Floats:
        return self._messages(work)[..., 0]

    def _messages(self, work: Work) -> Floats:
        """Return what `LayoutLinks.messages` does."""
        return self._kept("messages", work.messages, lambda every: every._links.messages(work.messages))

    def _scattered(self, work: Work) -> Floats:
        """[layouts, stages]: seconds in which a rank of replicas on several nodes reduce-scatters its part of a unit's
        gradients, beside all others, at least."""
        each = np.zeros(max(work.sizes) + 1)
        each[[*work.sizes]] = [work.gradients[number] for number in work.sizes.values()]
        of_byte = self._kept("gradients", 0.0, lambda every: every._links.s_per_gradient_byte)
        return each[self._layouts.tensors] * of_byte

    def _ending(self, one: Training) -> Floats:
        return self._kept("ending", one.gradient_bytes, lambda every: every._links.embedding(one))


def _largest_present(found: Floats, seconds: Floats, present: NDArray[np.bool_]) -> Floats:
    return np.maximum(found, np.where(present, seconds, 0.0))


def _smallest(found: Floats, seconds: Floats, present: NDArray[np.bool_]) -> Floats:
    return np.minimum(found, np.where(present, seconds, np.inf))


def _in_rows(every: Any) -> Any:
    """Return the array as the compiled loop takes it: one row after another."""
    return np.ascontiguousarray(every)
