"""Micro-batches that a run may change to fit into memory, replica by replica."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from conf.compose import compose
from fasop.costs.profiles.profile import Room
from fasop.costs.profiles.steps import Steps, StepTimes
from fasop.errors import SearchError
from fasop.search.shares.micro_batch_memory import rooms_of_replicas, that_fit, that_fit_on
from fasop.simulation.predict import planned

CLUSTER = "experiment=seed_a100x1_a10x7"


def test_what_no_gpu_holds_by_prediction_is_refused_with_a_way_out() -> None:
    experiment = compose([CLUSTER])
    own = experiment.parallel.micro_batch_size
    assert that_fit(experiment, [2, 4], []) == [{own: [1], 2: [1], 4: [1]}] * 4
    with pytest.raises(
        SearchError, match=re.escape("micro-batches of 64 samples do not fit in the memory of any replica, by pre")
    ):
        that_fit(experiment, [2, 64], [])


def test_each_replica_has_the_room_that_its_gpu_was_seen_to_have() -> None:
    experiment = compose([CLUSTER, "parallel.pipeline=1", "parallel.data=32", "parallel.partition=null"])
    placed, room = planned(experiment), {"hgx": 16, "gpu2": 4}
    training = placed.training
    nodes = []
    for node in placed.nodes:
        assert node.profile is not None
        name = min(node.profile.names(training.model))
        seen = Room(model=name, precision=training.precision, micro_batch_size=room[node.name])
        nodes.append(replace(node, profile=replace(node.profile, room=[seen])))
    ranks = experiment.ranks_per_node()
    assert rooms_of_replicas(replace(placed, nodes=nodes), ranks) == [16] * 4 + [4] * 28
    assert rooms_of_replicas(placed, ranks) == [None] * 32, "nothing was tried"


def test_streams_fit_as_they_were_seen_to_on_the_host_with_least_room() -> None:
    experiment = compose(
        [CLUSTER, "parallel.pipeline=1", "parallel.tensor=1", "parallel.data=32", "parallel.partition=null"]
    )
    placed = planned(experiment)
    size, times = (
        experiment.parallel.micro_batch_size,
        StepTimes(workers=1, data=0, forward=1, backward=2, update=1, copy=0),
    )
    nodes = []
    for node in placed.nodes:
        assert node.profile is not None
        seen = [
            Steps(
                model=min(node.profile.names(placed.training.model)),
                host=host,
                micro_batch_size=size,
                times=[times],
                most_workers=room,
                precision=placed.training.precision,
            )
            for host, room in (("a", 8), ("b", 4 if node.name == "hgx" else 2))
        ]
        nodes.append(replace(node, profile=replace(node.profile, steps=seen)))
    found = that_fit_on(replace(placed, nodes=nodes), experiment.ranks_per_node(), [], [2, 4, 8])
    assert found == [{size: [1, 2, 4]}] * 4 + [{size: [1, 2]}] * 28
