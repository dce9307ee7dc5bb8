"""A training that is played in jumps is that of a loop over every iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from random import Random

import pytest

from fasop.trainings.noise import growing
from fasop.trainings.play import Player, State, Stretch, Training
from fasop.trainings.played import Trajectory
from fasop.trainings.simulate import Trajectories
from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.adaptive.controller import Controller
from megatron_ext.contract.adaptive.noise import Noise, halves, measurement, noise_scale, similarity
from megatron_ext.contract.adaptive.shares import Times, longest
from megatron_ext.contract.schedule.iteration import SampleDivision
from tests.support.cases import fewer


@dataclass
class Linear:
    """Replicas that take the same for each of their micro-batches, and a rest."""

    weights: Sequence[int]
    micro_batch_s: Sequence[float]
    rest_s: float
    ways: None = None
    pipelined: bool = False

    @property
    def streams(self) -> Sequence[int]:
        return (1,) * len(self.weights)

    def seconds(self, division: SampleDivision, measures: bool = False) -> float:
        return longest(self.micro_batch_s, division.shares) + self.rest_s * (2 if measures else 1)

    def times(self, division: SampleDivision, iterations: int, measures: bool) -> Times | None:
        return Times(self.micro_batch_s, self.seconds(division))


def adapted(random: Random, rule: str, lower: int, upper: int) -> AdaptConfig:
    return AdaptConfig(
        rule=rule,
        target=random.choice([0.2, 0.3, 0.5]),
        lower=lower,
        upper=upper,
        every=random.choice([1, 3, 10, 40]),
        rate=random.choice([0.1, 0.3]),
        smoothing=random.choice([1, 4]),
        lr_scaling="sqrt",
        rebalance=random.random() < 0.4,
    )


def drawn(seed: int) -> tuple[Training, Linear]:
    random = Random(seed)
    size, replicas = random.choice([1, 4, 24]), random.randint(1, 4)
    weights = [random.randint(1, 3) for _ in range(replicas)]
    batch = sum(weights) * size * 2
    samples = float(random.randint(100, 900) * batch + random.randint(0, batch))
    points = sorted(random.sample(range(int(samples)), random.choice([1, 2, 3, 12])))
    rule = random.choice(["noise", "similarity", "goodput", "none"])
    training = Training(
        adapt=adapted(random, rule, random.choice([batch, size * max(2, replicas)]), batch * random.choice([2, 9, 40])),
        micro_batch_size=size,
        global_batch_size=batch,
        samples=samples,
        noise=Noise(tuple(map(float, points)), tuple(batch * math.exp(random.uniform(-2, 4)) for _ in points)),
    )
    return training, Linear(
        [2 * weight for weight in weights], [random.uniform(0.01, 0.1) for _ in weights], random.uniform(0, 0.2)
    )


def halved(shares: tuple[int, ...], size: int) -> tuple[int, int]:
    """The samples of both halves."""
    count = sum(shares)
    return (count + 1) // 2 * size, count // 2 * size


def one_by_one(training: Training, nodes: Linear) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Consumed samples before each iteration and its shares, as a run's ranks go through them."""
    config, size = training.adapt, training.micro_batch_size
    assert config is not None and training.noise is not None
    controller = Controller(config, size, training.global_batch_size, nodes.weights)
    shares: tuple[int, ...]
    shares, iteration, consumed = tuple(nodes.weights), 0, 0.0
    last = training.samples // training.global_batch_size

    def fitted() -> tuple[int, ...]:
        left = training.samples - consumed
        if config.measures and controller.least_samples <= left < sum(shares) * size:
            return controller.fitted(int(left) // size * size)
        return shares

    shares = fitted()
    while iteration < last if not config.measures else training.samples - consumed >= controller.least_samples:
        yield consumed, shares
        iteration, consumed = iteration + 1, consumed + sum(shares) * size
        if config.due(iteration):
            found = halves(training.noise.at(consumed), *halved(shares, size)) if config.measures else None
            times = nodes.times(SampleDivision(shares, (size,) * len(shares)), config.every, config.measures)
            shares = controller.decide(shares, found, times).shares
        shares = fitted()


def flat(stretches: Sequence[Stretch], size: int) -> list[tuple[float, tuple[int, ...]]]:
    return [
        (one.consumed + number * sum(one.division.shares) * size, one.division.shares)
        for one in stretches
        for number in range(one.iterations)
    ]


@pytest.mark.parametrize("seed", range(fewer(24, 60)))
def test_jumps_are_the_loop_over_every_iteration(seed: int) -> None:
    training, nodes = drawn(seed)
    wanted = [*one_by_one(training, nodes)]
    player = Player(training, nodes, State(0, 0.0, training.global_batch_size))
    played = [*player.play()]
    assert flat(played, training.micro_batch_size) == wanted, training
    assert all(one.seconds == nodes.seconds(one.division) for one in played)
    if training.adapt is not None and training.adapt.measures:
        assert sum(one.measured for one in played) == len(wanted) // training.adapt.every


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_a_training_that_is_played_in_parts_is_the_same(seed: int) -> None:
    """As one that changes its nodes does, and here goes on with the same."""
    training, nodes = drawn(seed)
    whole = flat(
        [*Player(training, nodes, State(0, 0.0, training.global_batch_size)).play()], training.micro_batch_size
    )
    player = Player(training, nodes, State(0, 0.0, training.global_batch_size))
    parts = [one for end in (0.25, 0.5, 0.9, 2.0) for one in player.play(end * training.samples)]
    assert flat(parts, training.micro_batch_size) == whole


@pytest.mark.parametrize("seed", range(40))
def test_nodes_that_share_a_course_take_what_each_would_alone(seed: int) -> None:
    """With replicas of other speeds and shares, also with more of them, for which the smallest batch is larger."""
    training, nodes = drawn(seed)
    random = Random(seed)
    sets = [nodes]
    for _ in range(4):
        replicas = random.choice([len(nodes.weights), random.randint(1, 6)])
        weights = nodes.weights if replicas == len(nodes.weights) else [random.randint(1, 5) for _ in range(replicas)]
        sets.append(Linear(weights, [random.uniform(0.01, 0.1) for _ in weights], random.uniform(0, 0.2)))
    trajectories = Trajectories(training)
    for one in sets:
        try:
            alone = Trajectory.of([*Player(training, one, State(0, 0.0, training.global_batch_size)).play()])
        except ValueError:
            with pytest.raises(ValueError, match="no even number"):
                trajectories.on(one)
            continue
        shared = trajectories.on(one)
        for field in fields(Trajectory):
            assert getattr(shared, field.name).tolist() == getattr(alone, field.name).tolist(), (field.name, training)


def test_halves_say_on_average_what_the_noise_scale_is() -> None:
    for scale, count in ((50.0, 2), (1.0, 8), (3000.0, 64), (7.0, 5)):
        found = measurement(halves(scale, *halved((count,), 12)))
        assert found is not None
        assert noise_scale([found]) == pytest.approx(scale, rel=1e-9)
        if count % 2 == 0:
            assert similarity([found]) == pytest.approx(1.0 / (1.0 + 2.0 * scale / (12 * count)), rel=1e-9)


def test_a_training_of_very_many_iterations_is_played_at_once() -> None:
    """Ten million iterations and a hundred thousand decisions: only those that change something are looked at."""
    config = AdaptConfig("noise", 0.3, 64, 65536, 100, 0.1, 4, "sqrt", rebalance=False)
    training = Training(
        adapt=config, micro_batch_size=8, global_batch_size=64, samples=1e10, noise=growing(100.0, 20000.0, 1e10)
    )
    asked = []

    class Counted(Linear):
        def times(self, division: SampleDivision, iterations: int, measures: bool) -> Times | None:
            asked.append(division)
            return super().times(division, iterations, measures)

    nodes = Counted([2, 2, 2, 2], [0.1] * 4, 0.1)
    played = [*Player(training, nodes, State(0, 0.0, 64)).play()]
    batches = [one.batch for one in played]
    assert sum(one.iterations for one in played) > 1e6
    assert len(asked) < 3000
    assert all(b > a for a, b in pairwise(batches[:-1]))
