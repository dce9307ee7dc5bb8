"""Simulated trainings with several streams on a GPU take what a launch predicts, and choose streams as runs do."""

from __future__ import annotations

import pytest

from conf.compose import compose
from fasop.simulation.predict import predict
from fasop.tables.trainings import Results
from fasop.trainings.play import Player, State, Stretch
from launch.commands.simulate import played
from launch.commands.simulating import experiment
from launch.commands.simulating.arguments import parse
from megatron_ext.contract.schedule.iteration import SampleDivision
from tests.fasop.shares.test_own_streams import words

__all__ = ["words"]
BATCH = ("parallel.micro_batch_size=2", "parallel.global_batch_size=28", "parallel.shares=6-8", "train.iterations=10")
ADAPTS = (*BATCH, "adapt.rebalance=true", "adapt.every=2")


def simulated(*more: str) -> Results:
    return played(parse(more))[0]


def stretches(*more: str) -> list[Stretch]:
    """On the plan's own nodes."""
    asked = experiment.simulated(parse([*more, "nodes=fast+slow"]))
    (only,) = asked.node_sets
    return [*Player(asked.training, only.nodes, State(0, 0.0, asked.training.global_batch_size)).play()]


def test_given_streams_take_what_is_predicted_of_a_launch(words: list[str]) -> None:
    given = [*words, *BATCH, "parallel.streams=3-2"]
    found = {one.name: one.seconds for one in simulated(*given).trainings}
    assert found["fast+slow"] == pytest.approx(10 * predict(compose(given)).iteration_s, rel=1e-9)
    alone = [*words, *BATCH[:2], "train.iterations=10", "parallel.data=1", "parallel.node_order=slow"]
    assert found["slow"] == pytest.approx(10 * predict(compose([*alone, "parallel.streams=2"])).iteration_s, rel=1e-9)
    assert "fast" not in found  # 3 streams do not divide 14 micro-batches


def test_a_last_round_with_fewer_micro_batches_runs_beside_fewer(words: list[str]) -> None:
    (one,) = experiment.simulated(parse([*words, *BATCH, "parallel.streams=3-2", "nodes=fast+slow"])).node_sets

    def seconds(fast: int) -> float:
        return one.nodes.seconds(SampleDivision((fast, 1), (2, 2), (3, 2)))

    base = seconds(3)
    single = (base - seconds(2)) / (3 / 1.8 - 2 / 1.5)  # a micro-batch alone: 3 in 3 streams take 3 / 1.8 of it
    assert seconds(4) - base == pytest.approx(single, rel=1e-6)
    assert seconds(5) - base == pytest.approx(single * 2 / 1.5, rel=1e-6)


def test_streams_are_tried_and_kept_where_they_are_faster(words: list[str]) -> None:
    large = (*words, *ADAPTS, "train.iterations=60", "parallel.global_batch_size=112")
    found = stretches(*large, "adapt.streams=[1,2,3]")
    assert all(one.batch == 112 for one in found)
    assert found[-1].division.copies[0] == 3  # by the rates that were measured
    assert found[-1].seconds == min(one.seconds for one in found) < 0.8 * stretches(*large)[-1].seconds


def test_other_nodes_after_an_epoch_try_streams_and_sizes_anew(words: list[str]) -> None:
    more = ("adapt.streams=[1,2,3]", "adapt.micro_batch_sizes=[4]", "epoch=1400", "elastic=time", "restart_s=0")
    follows = ("adapt.rule=noise", "adapt.upper=112", "noise=10,200", "train.samples=14000", "train.iterations=null")
    found = simulated(*words, *ADAPTS[:-3], "adapt.rebalance=true", "adapt.every=2", *follows, *more)
    assert found.elastic is not None
    assert found.elastic.seconds <= 1.02 * found.quickest.seconds
