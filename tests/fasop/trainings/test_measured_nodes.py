"""Simulated trainings on GPUs with profiles imported from IIDP take what IIDP's performance model says."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import TdppError
from fasop.shares.of_profiles import SYNC, measured_cluster, solved
from fasop.shares.performance import Pace, in_rounds, paces, seconds_in_rounds
from fasop.tables.trainings import Results
from fasop.trainings.play import Player, State, Stretch
from fasop.trainings.replica_nodes import halves_of
from launch.commands.simulate import played
from launch.commands.simulating import experiment
from launch.commands.simulating.arguments import parse
from megatron_ext.contract.schedule.iteration import SampleDivision
from tests.fasop.search.shares.test_batch_division import compositions
from tests.fasop.shares.test_of_profiles import imported
from tests.support.fasop import quickstart

__all__ = ["imported"]
PLAN = ("cluster=unlike.yaml", "model=resnet50", "parallel=single", "parallel.data=4", "executor=slurm")
WORDS = (*PLAN, "container=none", "parallel.micro_batch_size=32", "train.iterations=10")
GIVEN = (*WORDS, "parallel.global_batch_size=512", "parallel.shares=8-4-2-2", "parallel.streams=4-2-2-1")


def by_replica(*words: str) -> list[list[Pace]]:
    """What each GPU takes by the model, by workers."""
    cluster = measured_cluster(compose(words), in_streams=True)
    assert cluster is not None
    return [paces(cluster, server, 32, SYNC) for server in cluster.servers for _ in range(server.gpus)]


def simulated(*words: str) -> Results:
    return played(parse(words))[0]


def stretches(*words: str) -> list[Stretch]:
    """On the plan's own nodes."""
    asked = experiment.simulated(parse([*words, "nodes=fast+slow"]))
    (only,) = asked.node_sets
    return [*Player(asked.training, only.nodes, State(0, 0.0, asked.training.global_batch_size)).play()]


def test_given_shares_and_streams_take_what_the_model_says() -> None:
    results, notes = played(parse(GIVEN))
    found = {one.name: one.seconds for one in results.trainings}
    ways = zip(by_replica(*GIVEN), (8, 4, 2, 2), (4, 2, 2, 1), strict=True)
    assert found["fast+slow"] == pytest.approx(10 * max(of[v - 1].seconds(n // v - 1) for of, n, v in ways), rel=1e-12)
    assert any("IIDP's performance model" in note for note in notes)


def test_other_nodes_take_the_shares_with_the_least_time() -> None:
    """Here with two streams on each GPU, of which the micro-batches of each replica are a multiple."""
    given = (*WORDS, "parallel.global_batch_size=1024", "parallel.streams=2")
    found = {one.name: one.seconds for one in simulated(*given).trainings}
    alone = by_replica(*WORDS, "parallel.data=2", "parallel.node_order=slow", "parallel.global_batch_size=1024")
    least = min(
        max(of[1].seconds(n - 1) for of, n in zip(alone, counts, strict=True)) for counts in compositions(16, 2)
    )
    assert found["slow"] == pytest.approx(10 * least, rel=1e-12)


def test_a_last_round_with_fewer_micro_batches_has_fewer_workers() -> None:
    """A V100 that takes 4 micro-batches beside each other, then 3, by the formula of the model."""
    (one,) = experiment.simulated(parse([*WORDS, "parallel.global_batch_size=256", "nodes=fast+slow"])).node_sets
    first, second, fourth = (quickstart.STEPS["V100", 32, workers] for workers in (1, 2, 4))
    passes = [step[1] + step[2] for step in (first, second, fourth)]
    rate = round(32 / passes[0] * 1000, 2)
    rates = [round(32 * v / took * 1000 / rate, 3) for v, took in zip((1, 2, 4), passes, strict=True)]
    slope, start = np.polyfit(np.log([1, 2, 4]), rates, 1)

    def both(v: int) -> float:
        return round(32 * v / ((slope * log(v) + start) * rate), 4)

    forward = fourth[1] / passes[2]
    copy_s, statistics_s, update_s = fourth[4] / 3 / 1000, quickstart.STATISTICS_MS / 1000, fourth[3] / 1000
    bandwidth, (p, q) = 100e9 / 8, np.polyfit(*zip(*quickstart.BETWEEN, strict=True), 1)
    reduces = [(p * (s * 2**20 / 4 * 4 * 3 / bandwidth * 1000) + q) / 1000 for s in quickstart.BUCKETS_MIB]
    data_s = {3: 3 * first[0] / 1000, 4: fourth[0] / 1000}
    round_of_4 = data_s[4] + both(4)
    round_of_3 = data_s[3] + both(3) * forward + max(both(3) * (1 - forward), sum(reduces[:-1])) + reduces[-1]
    expected = (
        round_of_4 + statistics_s * 3 + round_of_3 + update_s + 3 * copy_s
    )  # 3 copies get weights, though one idles
    division = SampleDivision((7, 1, 1, 1), (32,) * 4, (4, 1, 1, 1))
    assert one.nodes.seconds(division) == pytest.approx(expected, rel=1e-9)


def test_an_iteration_that_measures_takes_both_halves_and_a_second_sum() -> None:
    (one,) = experiment.simulated(parse([*GIVEN, "nodes=fast+slow"])).node_sets
    division = SampleDivision((13, 1, 1, 1), (32,) * 4, (4, 1, 1, 1))
    of = by_replica(*GIVEN)[0]
    bandwidth, (p, q) = 100e9 / 8, np.polyfit(*zip(*quickstart.BETWEEN, strict=True), 1)
    sum_s = sum((p * (s * 2**20 * 3 / bandwidth * 1000) + q) / 1000 for s in quickstart.BUCKETS_MIB)
    even, odd = halves_of(division.shares)[0]
    assert even + odd == 13 and abs(even - odd) < 3
    expected = in_rounds(of, 4, even, odd).whole + sum_s
    assert one.nodes.seconds(division, measures=True) == pytest.approx(expected, rel=1e-9)
    assert in_rounds(of, 4, 8, 4).passes == pytest.approx(in_rounds(of, 4, 12).passes)


def test_shares_sizes_and_streams_that_adapt_come_near_the_best_there_are() -> None:
    words = (*WORDS, "parallel.global_batch_size=2048", "train.iterations=200", "adapt.rebalance=true", "adapt.every=2")
    more = ("adapt.streams=[1,2,4]", "adapt.micro_batch_sizes=[64,128]")
    cluster = measured_cluster(compose(words), in_streams=True)
    assert cluster is not None
    best = solved(cluster, 2048, None, None, in_streams=True).seconds
    fixed, adapted = stretches(*words), stretches(*words, *more)
    assert adapted[-1].seconds < fixed[-1].seconds < fixed[0].seconds
    assert adapted[-1].seconds <= 1.03 * best
    assert max(adapted[-1].division.copies) > 1 or max(adapted[-1].division.sizes) > 32


def test_all_counts_at_once_are_those_one_by_one() -> None:
    for of in by_replica(*GIVEN):
        for workers in range(1, len(of) + 1):
            every = seconds_in_rounds(of, workers, 20)
            assert every[1:].tolist() == pytest.approx([in_rounds(of, workers, n).whole for n in range(1, 21)])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("parallel.micro_batch_size=16",), "parallel.micro_batch_size=16 was not measured on all GPUs"),
        (("parallel.micro_batch_size=64", "parallel.streams=4"), "was measured with up to 2 workers"),
        (("adapt.rebalance=true", "adapt.micro_batch_sizes=[96,192]"), "micro-batches of 192 were not measured"),
    ],
    ids=["size", "streams", "sizes"],
)
def test_what_was_not_measured_is_one_message(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(TdppError) as error:
        simulated(*WORDS, "parallel.global_batch_size=1024", *more)
    assert message in str(error.value)
    assert "profile=null estimates the times" in str(error.value)
