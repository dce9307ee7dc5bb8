"""A simulated training takes as long as a virtual rehearsal of its iterations."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from conf.schema.partition import Shares
from fasop.trainings.noise import growing
from fasop.trainings.placed_nodes import node_sets
from fasop.trainings.play import Player, State, Training
from launch.control.plan import make_plan
from megatron_ext.contract.plan import Plan
from tests.support.megatron_ext.engine_run import EngineRun

WORDS = (
    *("cluster=a100x8_a10x8", "cluster.groups.a100.gpus_per_node=2", "cluster.groups.a10.gpus_per_node=2"),
    *("executor=local", "container=none", "model=xl", "train=gpt2", "train.precision=fp16", "parallel.partition=null"),
    *("parallel.node_order=a100+a10", "parallel.micro_batch_size=1"),
)
START = ("parallel.global_batch_size=16", "parallel.shares=5*2-3*2")
PLANS = {"replicas": ("parallel.data=4", "parallel.pipeline=1"), "pipeline": ("parallel.data=2", "parallel.pipeline=2")}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_batch_takes_what_a_rehearsal_of_it_takes(tmp_path: Path, plan: str) -> None:
    """Rehearsed are two iterations of each batch that the training has; the second is in the middle of a run."""
    start = START if plan == "replicas" else (START[0],)
    length = ("train.samples=20000", "adapt.rule=noise", "adapt.upper=64", "adapt.every=20")
    experiment = compose([*WORDS, *PLANS[plan], *start, *length])
    (own,), _ = node_sets(experiment, [experiment.node_order])
    training = Training(
        adapt=experiment.adapt.planned(16),
        micro_batch_size=1,
        global_batch_size=16,
        samples=20000.0,
        noise=growing(10.0, 80.0, 20000.0),
    )
    played = [*Player(training, own.nodes, State(0, 0.0, 16)).play()]
    assert len({one.shares for one in played}) > 3
    took: dict[tuple[int, ...], float] = {}
    for number, shares in enumerate(dict.fromkeys(one.shares for one in played)):
        batch = (f"parallel.global_batch_size={sum(shares)}", f"parallel.shares={Shares(shares)}")
        given = [
            *WORDS,
            *PLANS[plan],
            *batch,
            "executor.rehearse=virtual",
            "train.iterations=2",
            "train.log_interval=1",
        ]
        run = RunDir(tmp_path / str(number))
        for folder in (run.nodes, run.events, run.errors, run.checkpoints):
            folder.mkdir(parents=True)
        run.write_json(run.plan, make_plan(compose(given), "test/run").as_json())
        rehearsal = EngineRun(run, Plan.read(run.plan))
        assert rehearsal.go() == 0, rehearsal.stderr()
        took[shares] = rehearsal.metrics()[-1]["elapsed_ms"] / 1e3
    simulated = sum(one.iterations * one.seconds for one in played)
    assert simulated == pytest.approx(sum(one.iterations * took[one.shares] for one in played), rel=1e-5)
