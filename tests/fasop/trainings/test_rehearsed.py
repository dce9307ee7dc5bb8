"""A training that is simulated is the virtual rehearsal of it: the same batches, in the time that it takes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.trainings.placed_nodes import node_sets
from fasop.trainings.play import Player, State, Stretch, Training
from megatron_ext.contract.adaptive.expected import Noise
from megatron_ext.contract.plan import Plan
from tests.support.megatron_ext.engine_run import EngineRun, make_run

WORDS = (
    *("cluster=a100x8_a10x8", "cluster.groups.a100.gpus_per_node=2", "cluster.groups.a10.gpus_per_node=2"),
    *("executor=local", "executor.rehearse=virtual", "container=none", "model=xl", "train=gpt2"),
    *("train.precision=fp16", "train.log_interval=1", "profile.timeline=false"),
    *("parallel.node_order=a100+a10", "parallel.partition=null", "parallel.micro_batch_size=1"),
    *("parallel.global_batch_size=16", "adapt.every=20"),
)
REPLICAS = ("parallel.data=4", "parallel.pipeline=1")
PIPELINE = ("parallel.data=2", "parallel.pipeline=2")
FOLLOWS = ("train.samples=8000", "adapt.upper=64", "executor.noise='10,80'")
CASES = {
    "noise": (*REPLICAS, "parallel.shares=5*2-3*2", *FOLLOWS, "adapt.rule=noise"),
    "similarity": (*PIPELINE, *FOLLOWS, "adapt.rule=similarity"),
    "goodput": (*REPLICAS, *FOLLOWS, "adapt.rule=goodput", "adapt.rebalance=true"),
    "sizes": (
        *REPLICAS,
        *("model=small", "train.iterations=120"),
        *("parallel.global_batch_size=32", "adapt.rebalance=true", "adapt.micro_batch_sizes=[2,4]"),
    ),
}


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
    """Shares and sizes of micro-batches, wherever they change."""
    lines = [json.loads(line) for line in run.run.decisions.read_text().splitlines()]
    behind = {one["iteration"]: (one["shares"], one["micro_batch_sizes"]) for one in lines}
    begun = lines[0]["shares_before"], lines[0]["micro_batch_sizes_before"]
    return [after for before, after in pairwise([begun, *behind.values()]) if after != before]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_training_ends_with_its_rehearsal(tmp_path: Path, case: str) -> None:
    """In a rehearsal ranks go through every iteration, by messages with each other. Beside the simulation it only has
    what measurements take: one all-reduce more in one of 20 iterations."""
    words = (*WORDS, *CASES[case])
    run = make_run(tmp_path / "run", tmp_path / "none", *words, base=())
    assert run.go() == 0, run.stderr()
    stretches, size = played(run.plan, *words), run.plan.micro_batch_size
    sizes = [list(one.sizes) or [size] * len(one.shares) for one in stretches]
    changes = [(list(one.shares), of) for one, of in zip(stretches, sizes, strict=True)][1:]
    assert divided(run) == changes
    assert len(changes) > 0
    lines = run.metrics()
    assert len(lines) == sum(one.iterations for one in stretches)
    assert lines[-1]["consumed_samples"] == stretches[-1].consumed + stretches[-1].iterations * stretches[-1].batch
    took = sum(line["elapsed_ms"] for line in lines) / 1e3
    measures = run.plan.adapt is not None and run.plan.adapt.measures
    assert sum(one.iterations * one.seconds for one in stretches) == pytest.approx(took, rel=0.02 if measures else 1e-5)
    plain = [line["elapsed_ms"] for line in lines if not measures or line["iteration"] % 20]
    simulated = [one.seconds * 1e3 for one in stretches for _ in range(one.iterations)]
    kept = [ms for number, ms in enumerate(simulated, 1) if not measures or number % 20]
    assert plain[1:] == pytest.approx(kept[1:], rel=1e-5)  # the first one fills an empty pipeline
