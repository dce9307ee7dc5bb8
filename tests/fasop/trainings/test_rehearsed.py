"""A training that is simulated is the virtual rehearsal of it: the same batches, in the time that it takes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.trainings.placed_nodes import node_sets
from fasop.trainings.play import Player, State, Stretch, Training
from fasop.trainings.played import Trajectory
from megatron_ext.contract.adaptive.noise import Noise
from megatron_ext.contract.plan import Plan
from tests.support.megatron_ext.engine_run import EngineRun, make_run

WORDS = (
    *("cluster=a100x8_a10x8", "cluster.groups.a100.gpus_per_node=2", "cluster.groups.a10.gpus_per_node=2"),
    *("executor=local", "executor.rehearse=virtual", "container=none", "model=xl", "train=gpt2"),
    *("train.precision=fp16", "train.log_interval=1", "profile.timeline=false"),
    *("parallel.node_order=a100+a10", "parallel.partition=null", "parallel.micro_batch_size=1"),
    "parallel.global_batch_size=16",
)
REPLICAS = ("parallel.data=4", "parallel.pipeline=1")
PIPELINE = ("parallel.data=2", "parallel.pipeline=2")
FOLLOWS = ("train.samples=4000", "adapt.upper=64", "executor.noise='10,80'")
CASES = {
    "noise": (*REPLICAS, "parallel.shares=5*2-3*2", *FOLLOWS, "adapt.rule=noise", "adapt.every=10"),
    "similarity": (*PIPELINE, *FOLLOWS, "adapt.rule=similarity", "adapt.every=1"),
    "goodput": (
        *(*PIPELINE, "model=tiny", "model.layers=8", *FOLLOWS, "adapt.rule=goodput", "adapt.every=2"),
        *("adapt.rebalance=true", "adapt.micro_batch_sizes=[2,4]"),
    ),
    "sizes": (
        *REPLICAS,
        *("model=small", "train.iterations=100", "adapt.every=20"),
        *("parallel.global_batch_size=32", "adapt.rebalance=true", "adapt.micro_batch_sizes=[2,4]"),
    ),
}
"""A tiny model's pipeline spends its time on messages, so that its pace is not that of its slowest stage."""


def played(plan: Plan, *words: str) -> list[Stretch]:
    """What is simulated of a rehearsal."""
    experiment = compose(words)
    (own,), _ = node_sets(experiment, [experiment.node_order])
    assert plan.rehearsal is not None
    points = plan.rehearsal.noise
    training = Training(
        adapt=plan.adapt,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        samples=float(plan.train.samples or plan.train.iterations * plan.global_batch_size),
        noise=None if points is None else Noise([one.samples for one in points], [one.scale for one in points]),
    )
    return [*Player(training, own.nodes, State(0, 0.0, plan.global_batch_size)).play()]


def divided(run: EngineRun) -> list[tuple[list[int], list[int]]]:
    """Shares and sizes of micro-batches, wherever they change; with what the last iteration decides nothing is run."""
    lines = [json.loads(line) for line in run.run.decisions.read_text().splitlines()]
    last = len(run.metrics())
    behind = {one["iteration"]: (one["shares"], one["micro_batch_sizes"]) for one in lines if one["iteration"] < last}
    begun = lines[0]["shares_before"], lines[0]["micro_batch_sizes_before"]
    return [after for before, after in pairwise([begun, *behind.values()]) if after != before]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_training_ends_with_its_rehearsal(tmp_path: Path, case: str) -> None:
    """In a rehearsal ranks go through every iteration, by messages with each other."""
    words = (*WORDS, *CASES[case])
    run = make_run(tmp_path / "run", tmp_path / "none", *words, base=())
    assert run.go() == 0, run.stderr()
    stretches = played(run.plan, *words)
    changes = [(list(one.division.shares), list(one.division.sizes)) for one in stretches][1:]
    assert divided(run) == changes
    assert len(changes) > 0
    lines, adapt = run.metrics(), run.plan.adapt
    assert adapt is not None
    assert lines[-1]["consumed_samples"] == stretches[-1].consumed + stretches[-1].iterations * stretches[-1].batch
    every = [one for one in stretches for _ in range(one.iterations)]
    simulated = [
        one.measured_s if adapt.measures and adapt.due(number) else one.seconds for number, one in enumerate(every, 1)
    ]
    ran = [line["elapsed_ms"] / 1e3 for line in lines]
    assert ran[1:] == pytest.approx(simulated[1:], rel=1e-5, abs=1e-7)  # the first one fills an empty pipeline
    assert Trajectory.of(stretches).whole_s.sum() == pytest.approx(sum(ran), rel=1e-3)
