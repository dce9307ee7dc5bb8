"""Plays a training on each of many sets of nodes, and one that changes its nodes at the end of epochs.

Where batches follow each other alike, many sets of nodes share one trajectory: what a rule that looks at nothing but
the noise decides does not depend on the nodes. Only how the replicas share the batches, and how long they take, is
found for each set of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fasop.costs.arrays import Integers
from fasop.errors import SearchError
from fasop.trainings.play import Nodes, Player, State, Stretch, Training
from fasop.trainings.played import Leg, NodeSet, Played, Trajectory
from megatron_ext.contract.adaptive.config import NONE, AdaptConfig, BatchRange
from megatron_ext.contract.adaptive.forecast import GOALS, TIME, Candidate, choose, forecast
from megatron_ext.contract.adaptive.shares import Times, fastest
from megatron_ext.contract.schedule.iteration import SampleDivision, several


class Trajectories:
    """The trajectories of one training from its beginning."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._known: dict[tuple[BatchRange, int], _Batches] = {}

    def on(self, nodes: Nodes) -> Trajectory:
        """What these nodes go through; nothing if the samples are less than a batch.

        Raises ValueError where no batch fits the bounds.
        """
        training = self._training
        player = Player(training, nodes, State(0, 0.0, training.global_batch_size))
        adapt, batches = training.adapt, player.controller.batches
        if adapt is None or batches is None or adapt.follows_times or not _simple(nodes, adapt):
            return Trajectory.of([*player.play()])
        key = batches, sum(player.division.shares)
        if key not in self._known:
            self._known[key] = _batches(training, *key)
        return _taken(self._known[key], player, nodes, adapt)


def _simple(nodes: Nodes, adapt: AdaptConfig) -> bool:
    """Whether replicas take the micro-batches of every batch in one order (`shares.dealt`)."""
    return nodes.ways is None and max(nodes.streams) == 1 and not (adapt.rebalance and nodes.pipelined)


@dataclass(frozen=True)
class _Batches:
    """A trajectory whose seconds nobody knows."""

    trajectory: Trajectory
    fitted: bool
    """Whether the last stretch is what was left of the samples."""
    counts: Sequence[int]
    """Micro-batches of its batches, each number once, upwards."""
    place: Integers
    """Among them, of each stretch."""


class _Anywhere:
    """Nodes that take a batch whole, of which nobody knows how long they take."""

    ways = None
    streams = (1,)
    pipelined = False

    def __init__(self, count: int) -> None:
        self.weights = (count,)

    def seconds(self, division: SampleDivision, measures: bool = False) -> float:
        return 0.0

    def times(self, division: SampleDivision, iterations: int, measures: bool) -> Times | None:
        return None


def _batches(training: Training, batches: BatchRange, count: int) -> _Batches:
    """That follow each other from one of `count` micro-batches on."""
    size = training.micro_batch_size
    assert training.adapt is not None, "a batch that stays is not shared"
    adapt = replace(training.adapt, lower=batches.least * size, upper=batches.most * size)
    player = Player(replace(training, adapt=adapt), _Anywhere(count), State(0, 0.0, count * size))
    trajectory = Trajectory.of([*player.play()])
    counts, place = np.unique(np.rint(trajectory.batches / size).astype(int), return_inverse=True)
    return _Batches(trajectory, player.fitted, counts.tolist(), place)


def _taken(batches: _Batches, player: Player, nodes: Nodes, adapt: AdaptConfig) -> Trajectory:
    """Play a training on nodes whose player has not begun."""
    trajectory, controller = batches.trajectory, player.controller
    if not trajectory:
        return trajectory
    times = nodes.times(player.division, adapt.every, adapt.measures) if adapt.rebalance else None
    divisions = [player.divided(one) for one in _dealt(controller.order(times), len(nodes.weights), batches.counts)]
    seconds, measured_s = (
        np.array([nodes.seconds(one, measures) for one in divisions])[batches.place] for measures in (False, True)
    )
    ends = [(0, player.division)]
    if batches.fitted and len(seconds) > 1:
        ends.append((-1, player.divided(controller.fitted(int(trajectory.batches[-1])))))
    for place, division in ends:
        seconds[place], measured_s[place] = nodes.seconds(division), nodes.seconds(division, measures=True)
    trajectory = replace(trajectory, seconds=seconds, measured_s=np.where(trajectory.measured, measured_s, 0.0))
    now = player.division
    balanced = player.divided(controller.decide(now.shares, None, times, now.sizes, now.copies).shares)
    if balanced != now and trajectory.iterations[0] > adapt.every:  # the first decision changes the shares alone
        return _split(trajectory, adapt.every, nodes.seconds(balanced), nodes.seconds(balanced, measures=True))
    return trajectory


def _split(trajectory: Trajectory, iterations: int, seconds: float, measured_s: float) -> Trajectory:
    """With its first stretch in two: so many iterations as they are, the last of which measures, and the others of
    other seconds."""
    left, batch = float(trajectory.iterations[0]) - iterations, trajectory.batches[0]
    measured = trajectory.measured[0] - 1
    return Trajectory(
        consumed=np.insert(trajectory.consumed, 1, trajectory.consumed[0] + iterations * batch),
        iterations=np.concatenate([[iterations, left], trajectory.iterations[1:]]),
        batches=np.insert(trajectory.batches, 1, batch),
        seconds=np.insert(trajectory.seconds, 1, seconds),
        measured=np.concatenate([[1.0, measured], trajectory.measured[1:]]),
        measured_s=np.insert(trajectory.measured_s, 1, measured_s if measured else 0.0),
    )


def _dealt(order: Iterator[int], replicas: int, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """The shares of each number of micro-batches, upwards."""
    shares, found, known = [1] * replicas, [], replicas
    for count in counts:
        for _ in range(count - known):
            shares[next(order)] += 1
        known = count
        found.append(tuple(shares))
    return found


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a training chooses other nodes at the end of each epoch."""

    epoch: float
    """Samples."""
    goal: str = TIME
    """What is to be least, of the next epoch."""
    restart_s: float = 0.0
    """Seconds in which nothing is trained while nodes change."""

    def __post_init__(self) -> None:
        assert self.goal in GOALS


def simulate(training: Training, node_sets: Sequence[NodeSet]) -> tuple[list[Played], dict[str, str]]:
    """The training on each set of nodes alone, and of those that cannot train it why not."""
    found, refused, trajectories = list[Played](), dict[str, str](), Trajectories(training)
    for one in node_sets:
        try:
            trajectory = trajectories.on(one.nodes)
        except ValueError as error:
            refused[one.name] = str(error)
            continue
        if trajectory:
            found.append(Played(name=one.name, legs=[Leg(node_set=one, restart_s=0.0, trajectory=trajectory)]))
        else:
            refused[one.name] = f"{training.samples:,.0f} samples are less than a batch"
    return found, refused


def simulate_elastic(training: Training, node_sets: Sequence[NodeSet], how: Elastic) -> Played:
    """The training on those nodes that take least for the next epoch, by a forecast of its batch, chosen anew at the
    end of each epoch (`forecast.choose`). It begins on those that take least for the first one.

    Raises:
        SearchError: no set of nodes can train it.
    """
    adapt = training.adapt
    bounds = (training.global_batch_size,) * 2 if adapt is None or adapt.rule == NONE else (adapt.lower, adapt.upper)
    every = [_Seconds(training, one.nodes) for one in node_sets]
    state, history = State(0, 0.0, training.global_batch_size), [(0.0, float(training.global_batch_size))]
    legs, now = list[tuple[NodeSet, float, list[Stretch]]](), None
    player: Player | None = None
    while player is None or not player.over:
        end = (math.floor(state.consumed / how.epoch) + 1) * how.epoch
        span = min(how.epoch, training.samples - state.consumed)
        ahead = forecast(history, span, *bounds)
        factor = 1.0
        if player is not None and now is not None:  # what is seen corrects what is predicted
            factor = node_sets[now].nodes.seconds(player.division) / every[now].of_batch(state.batch)
        candidates = [
            Candidate(partial(_longer, of.of_batch, factor), one.price_per_hour)
            for of, one in zip(every, node_sets, strict=True)
        ]
        try:
            choice = choose(candidates, now or 0, ahead, 0.0 if now is None else how.restart_s, how.goal)
        except ValueError as error:
            raise SearchError(f"no set of nodes can take the batches of a training up to {bounds[1]}") from error
        if player is None or choice.number != now:
            player = Player(training, node_sets[choice.number].nodes, state)
            restart_s = 0.0 if now is None else how.restart_s
            legs.append((node_sets[choice.number], restart_s, list[Stretch]()))
            now = choice.number
        played = [*player.play(end)]
        legs[-1][2].extend(played)
        history += [(one.consumed, float(one.batch)) for one in played]
        state = player.state
        history.append((state.consumed, float(state.batch)))
    kept = [
        Leg(node_set=one, restart_s=restart_s, trajectory=Trajectory.of(stretches))
        for one, restart_s, stretches in legs
        if stretches
    ]
    return Played(name="elastic", legs=kept)


def _longer(seconds: Callable[[float], float], factor: float, batch: float) -> float:
    return factor * seconds(batch)


class _Seconds:
    """The seconds of an iteration on a set of nodes, by its batch in samples, with the plan's micro-batches and
    streams."""

    def __init__(self, training: Training, nodes: Nodes) -> None:
        self._size, self._nodes = training.micro_batch_size, nodes
        self._copies = several(nodes.streams)
        adapt = training.adapt
        times = None
        if adapt is not None and adapt.rebalance:
            times = nodes.times(self._division(tuple(nodes.weights)), adapt.every, measures=False)
        self._fixed = () if times is None else times.fixed_s
        self._split = [1.0 / weight for weight in nodes.weights] if times is None else times.micro_batch_s
        self._known: dict[int, float] = {}

    def of_batch(self, batch: float) -> float:
        """Infinite where there are more replicas than micro-batches, of which rules keep an even number."""
        count = 2 * round(batch / self._size / 2.0)
        if count < len(self._split):
            return math.inf
        if count not in self._known:
            self._known[count] = self._nodes.seconds(self._division(fastest(self._split, count, self._fixed)))
        return self._known[count]

    def _division(self, shares: tuple[int, ...]) -> SampleDivision:
        return SampleDivision(shares, (self._size,) * len(shares), self._copies)
