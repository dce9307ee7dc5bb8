"""A rehearsal takes the time that the plan says: what is simulated is what runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.rehearsal import rehearsed_times
from conf.compose import compose
from conf.run_folder.log_lines import iteration_line
from conf.run_folder.rundir import RunDir
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.search.space.choices import runnable
from fasop.simulation.predict import predict
from fasop.simulation.ranks.replay import simulate
from fasop.tables.plans import plan_yaml
from launch.control.planning.plan import make_plan
from launch.control.planning.predictions import doubts
from launch.files.run_files import Faults
from launch.observe.iterations import read_log
from megatron_ext.contract.events import NAMES
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.iteration import as_json, schedule
from tests.megatron_ext.engine.executor.test_executor_soak import random_schedule
from tests.megatron_ext.engine.test_parts import RECORD
from tests.support import ROOT, cases
from tests.support.fasop.replays import pipeline_time
from tests.support.megatron_ext.engine_run import EngineRun

COMPUTE = [NAMES.index(name) for name in NAMES if name.endswith("-compute")]
SMALL = ("parallel.data=1", "parallel.pipeline=4", "parallel.partition=0-20-8-20", "parallel.global_batch_size=6")

CHUNKS = (
    "parallel.data=1",
    "parallel.pipeline=4",
    "parallel.chunks=2",
    "parallel.schedule=interleaved",
    "parallel.partition=0-9-6-6-6-6-15-0",
    "parallel.global_batch_size=8",
)
SCHEDULES = {
    "gpipe": (*SMALL, "parallel.schedule=gpipe"),
    "one_f_one_b": SMALL,
    "zb_h1": (*SMALL, "parallel.schedule=zb_h1"),
    "model_parallel": (*SMALL, "parallel.schedule=model_parallel"),
    "interleaved": CHUNKS,
}


@pytest.fixture
def rehearse(tmp_path: os.PathLike[str]) -> Callable[..., EngineRun]:
    """Rehearses XL on A10 nodes, all ranks on this machine."""

    def go(*overrides: str, schedule: str | None = None) -> EngineRun:
        run = RunDir(tmp_path / "run")
        for folder in (run.nodes, run.events, run.errors):
            folder.mkdir(parents=True)
        if schedule is not None:
            run.schedule.write_text(schedule)
        given = [
            "model=xl",
            "train=gpt2",
            "executor.rehearse=virtual",
            "train.iterations=2",
            "train.log_interval=1",
            *overrides,
        ]
        run.write_json(run.plan, make_plan(compose(given), "test/run").as_json())
        rehearsal = EngineRun(run, Plan.read(run.plan))
        path = run.nodes / "rehearsal-0"
        assert rehearsal.go() == 0, path.with_suffix(".err").read_text()
        return rehearsal

    return go


A10X8 = ("cluster=a10x8", "executor=local", "container=none", "train.precision=fp16")


def events(run: EngineRun, rank: int, iteration: int) -> np.ndarray:
    raw = run.run.rank_events(rank).read_bytes()
    records = np.frombuffer(raw[12 + int.from_bytes(raw[8:12], "little") :], RECORD)
    return records[(records["iteration"] == iteration) & (records["name"] > 0)]


def simulated(run: EngineRun) -> float:
    """Nanoseconds of the pipeline part, by the simulator, from the plan alone and the schedule's file if it has one."""
    plan = run.plan
    times = rehearsed_times(run.run.read_json(run.run.plan))
    if plan.schedule_file is not None:
        return pipeline_time(simulate(run.run.read_json(run.run.schedule), times))
    lists = schedule(plan.schedule, plan.pipeline, plan.chunks, plan.micro_batches[0])
    return pipeline_time(simulate(as_json(lists, plan.chunks, plan.micro_batches[0]), times))


def measured(run: EngineRun) -> int:
    """Nanoseconds from the first to the last computation of the first iteration, which all ranks begin together."""
    found = [events(run, rank, 1) for rank in range(run.plan.world_size)]
    computing = np.concatenate([e[np.isin(e["name"], COMPUTE)] for e in found])
    return int(computing["end_ns"].max() - computing["start_ns"].min())


def test_the_seeds_run_of_32_ranks_takes_what_the_simulator_says(rehearse: Callable[..., EngineRun]) -> None:
    run = rehearse("experiment=seed_a10x8", *A10X8)
    assert run.plan.world_size == 32
    assert measured(run) == pytest.approx(simulated(run), rel=1e-6)
    predicted = predict(compose(["experiment=seed_a10x8", *A10X8])).iteration_s
    assert run.metrics()[-1]["elapsed_ms"] == pytest.approx(predicted * 1e3, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "links"),
    cases.covering(product(SCHEDULES, ("fast", "slow")), set, always=[("interleaved", "slow"), ("zb_h1", "slow")]),
)
def test_every_schedule_runs_as_simulated(rehearse: Callable[..., EngineRun], name: str, links: str) -> None:
    """Over slow links messages wait for each other."""
    slow = ("cluster.groups.gpu2.gpus_per_node=1", "cluster.groups.gpu2.inter_gbit_per_s=0.2")
    nodes = ("parallel.node_order=gpu2*4", *slow) if links == "slow" else ("parallel.node_order=gpu2",)
    given = (*A10X8, "parallel.micro_batch_size=1", *nodes, *SCHEDULES[name])
    run = rehearse(*given)
    assert measured(run) == pytest.approx(simulated(run), rel=1e-6)
    assert run.metrics()[-1]["elapsed_ms"] == pytest.approx(
        predict(compose(["model=xl", "train=gpt2", *given])).iteration_s * 1e3, rel=1e-6
    )


FOUR = ("cluster.groups.a100.gpus_per_node=4", "cluster.groups.a10.gpus_per_node=4")
MIXED = (
    *("cluster=a100x8_a10x8", *FOUR, "executor=local", "container=none"),
    *("train.precision=fp16", "parallel.data=8", "parallel.partition=null"),
)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("parallel.node_order=a100+a10", "parallel.pipeline=1", "parallel.shares=3*4-1*4"), marks=pytest.mark.slow
        ),
        ("parallel.node_order=a100+a10*3", "parallel.pipeline=2", "parallel.shares=5*4-3*4"),
        ("parallel.node_order=a100+a10+a100+a10", "parallel.pipeline=2", "parallel.shares=15-11*3-4*4"),
        (
            *("parallel.node_order=a100+a10+a100+a10", "parallel.pipeline=2", "parallel.shares=2-3*3-1*3-2"),
            *("parallel.schedule=zb_h1", "parallel.sharded_optimizer=true", "parallel.partition=31-17"),
        ),
    ],
    ids=["one-stage", "one-stage-mixed", "1f1b", "zb-h1-sharded"],
)
def test_replicas_of_unequal_shares_take_what_is_predicted(
    rehearse: Callable[..., EngineRun], overrides: tuple[str, ...]
) -> None:
    given = (*MIXED, "parallel.micro_batch_size=1", "parallel.global_batch_size=64", *overrides)
    run = rehearse(*given)
    predicted = predict(compose(["model=xl", "train=gpt2", *given]))
    assert run.metrics()[-1]["elapsed_ms"] == pytest.approx(predicted.iteration_s * 1e3, rel=1e-6)
    for stage in predicted.stages:
        assert sum(stage.terms.by_name().values()) == pytest.approx(predicted.iteration_s)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_a_model_of_transformers_takes_what_is_predicted_of_its_blocks(
    rehearse: Callable[..., EngineRun], schedule: str
) -> None:
    config = ROOT / "tests" / "support" / "megatron_ext" / "qwen3.json"
    given = (
        *("model=huggingface", f"model.config={config}", "model.sequence_length=64", *A10X8),
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=3-1", "parallel.micro_batch_size=1"),
        *("parallel.global_batch_size=8", "parallel.node_order=gpu2", "parallel.tensor=1"),
        f"parallel.schedule={schedule}",
    )
    run = rehearse(*given)
    predicted = predict(compose(["train=gpt2", *given])).iteration_s
    assert run.metrics()[-1]["elapsed_ms"] == pytest.approx(predicted * 1e3, rel=1e-6)


def test_all_tied_parameters_of_a_model_take_what_is_predicted_of_them_together(
    rehearse: Callable[..., EngineRun],
) -> None:
    """Of T5 three stages have the words, and two the positions."""
    given = (
        *("model=t5-base", *A10X8, "parallel.node_order=gpu2", "parallel.tensor=1", "parallel.data=1"),
        *("parallel.pipeline=4", "parallel.partition=5-5-7-7", "parallel.micro_batch_size=1"),
        "parallel.global_batch_size=4",
    )
    run = rehearse(*given)
    predicted = predict(compose(["train=gpt2", *given])).iteration_s
    assert run.metrics()[-1]["elapsed_ms"] == pytest.approx(predicted * 1e3, rel=1e-6)


def test_a_schedule_from_a_file_runs_as_simulated_from_that_file(rehearse: Callable[..., EngineRun]) -> None:
    """Nobody's order, with uneven chunks and a part of the backward passes split."""
    own = json.dumps(as_json(random_schedule(Random(7), 4, 2, 8), 2, 8))
    given = ("parallel.micro_batch_size=1", "parallel.node_order=gpu2", "parallel.schedule_file=own.json")
    run = rehearse(*A10X8, *CHUNKS, *given, schedule=own)
    assert "backward-compute" in own
    assert "backward-weight-compute" in own
    assert measured(run) == pytest.approx(simulated(run), rel=1e-6)


def test_events_tell_the_chunk(rehearse: Callable[..., EngineRun]) -> None:
    run = rehearse(*A10X8, "parallel.micro_batch_size=1", "parallel.node_order=gpu2", *CHUNKS)
    actions = schedule(run.plan.schedule, run.plan.pipeline, run.plan.chunks, run.plan.micro_batches[0])
    for rank in range(run.plan.world_size):
        found = events(run, rank, 1)[["name", "micro_batch", "chunk"]].tolist()
        known = [(NAMES[name], m, chunk) for name, m, chunk in found if m >= 0]
        assert known == [(kind.value, m, chunk) for kind, m, chunk in actions[rank]]


def test_ranks_tell_the_node_that_they_stand_for(rehearse: Callable[..., EngineRun]) -> None:
    run = rehearse("experiment=seed_a10x8", *A10X8)
    assert b'"node": "gpu2-3"' in run.run.rank_events(13).read_bytes()


def test_the_plan_names_the_nodes_and_gpus_that_ranks_stand_for() -> None:
    mixed = compose(["experiment=seed_a100x1_a10x7", *A10X8[1:], "executor.rehearse=virtual"])
    plan = make_plan(mixed, "test/run")
    assert [node.gpu for node in plan.planned_nodes] == ["A100-40GB"] + ["A10"] * 7
    assert {rank: node.name for node in plan.planned_nodes for rank in node.ranks} == {
        place.rank: place.emulates for place in plan.ranks
    }


def test_there_is_no_loss_and_none_is_told(rehearse: Callable[..., EngineRun]) -> None:
    run = rehearse(*A10X8, *SMALL, "parallel.micro_batch_size=1", "parallel.node_order=gpu2")
    assert [(line["loss"], line["grad_norm"]) for line in run.metrics()] == [(None, None)] * 2
    told = [iteration_line(line) for line in run.run.node_out("local-0").read_text().splitlines()]
    lines = [line for line in told if line is not None]
    assert [line.iteration for line in lines] == [1, 2]
    assert [(math.isnan(line.loss), line.grad_norm, line.nan) for line in lines] == [(True, None, 0)] * 2
    (seen,) = {one.loss for one in read_log(run.run.metrics, Faults())}
    assert seen is None


def test_the_anchored_clock_really_lasts_that_long(rehearse: Callable[..., EngineRun]) -> None:
    run = rehearse(
        *A10X8, *SMALL, "parallel.micro_batch_size=1", "parallel.node_order=gpu2", "executor.rehearse=anchored"
    )
    log = run.metrics()
    # Never shorter than the plan says; how much longer is for the benchmark to tell.
    assert log[-1]["unix"] - log[0]["unix"] > 0.95 * simulated(run) / 1e9


def test_what_is_no_measurement_is_told_and_what_is_one_is_not() -> None:
    """A roofline, and a micro-batch that the profile lacks: both as a search tells them."""
    seeds = ("experiment=seed_a10x8", *A10X8, "executor.rehearse=virtual")
    assert doubts(compose([*seeds])) == []
    (larger,) = doubts(compose([*seeds, "parallel.micro_batch_size=2"]))
    assert larger.startswith("extrapolated: beyond the micro-batch sizes of the profile")
    told = doubts(compose([*seeds, "cluster.gpus.a10.profile=null"]))
    assert [line.split(":")[0] for line in told] == ["not measured", "A10 has no profile"]


SEARCHED = {
    "gpipe": ("gpipe", "full", "true", "false", "train.precision=fp16"),
    "one_f_one_b": ("one_f_one_b", "selective", "false", "true", "cluster.gpus.a10.profile=null"),
    "zb_h1": ("zb_h1", "none", "true", "false", "train.precision=bf16"),
    "interleaved": ("interleaved", "full", "false", "true", "train.precision=fp32"),
}
"""Schedule, recomputation, sharded optimizer, sharing the sequence, and what the times rest on."""
OPTIONS = ("schedule", "recompute", "sharded_optimizer", "sequence_parallel")


def test_every_option_that_can_be_searched_is_rehearsed_below() -> None:
    one = compose(["executor.rehearse=virtual"])
    can = runnable(one.engine, one.train, one.model)
    for number, key in enumerate(OPTIONS):
        values = {str(value).lower() for value in getattr(can, key)}
        assert values == {options[number] for options in SEARCHED.values()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in {"one_f_one_b", "interleaved"} else pytest.mark.slow)
        for name, options in SEARCHED.items()
    ],
)
def test_the_plan_that_a_search_recommends_takes_what_it_says(
    rehearse: Callable[..., EngineRun], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """On two kinds of nodes."""
    *chosen, basis = options
    sharded = chosen[OPTIONS.index("sharded_optimizer")] == "true"
    words = [
        *("cluster=a100x1_a10x7", "model=xl", "model.layers=24", "train=gpt2", "parallel.global_batch_size=16"),
        *("cluster.groups.hgx.gpus_per_node=2", "cluster.groups.gpu2.gpus_per_node=2", "cluster.groups.gpu2.count=1"),
        *("executor=local", "container=none", "executor.rehearse=virtual", basis),
    ]
    sizes = ("parallel.pipeline=2", f"parallel.data={2 if sharded else 1}", f"parallel.tensor={1 if sharded else 2}")
    given = [f"parallel.{key}={value}" for key, value in zip(OPTIONS, chosen, strict=True)]
    plan = best_plans(read([*words, *sizes, *given]), Arguments()).plans[0]
    (tmp_path / "best.yaml").write_text(plan_yaml(plan, "tdpp search"))
    run = rehearse(*words, f"parallel={tmp_path}/best.yaml")
    assert [str(getattr(run.plan, key)).lower() for key in OPTIONS] == chosen
    assert run.metrics()[-1]["elapsed_ms"] == pytest.approx(plan.total * 1e3, rel=1e-6)


@pytest.mark.parametrize("overrides", [SMALL, CHUNKS], ids=["one_f_one_b", "interleaved"])
def test_events_are_those_that_are_predicted(rehearse: Callable[..., EngineRun], overrides: tuple[str, ...]) -> None:
    """Of an iteration that is not the first, each rank's: what, which micro-batch, and when."""
    given = (*A10X8, "parallel.micro_batch_size=1", "parallel.node_order=gpu2", *overrides)
    run = rehearse(*given)
    expected = predict(compose(["model=xl", "train=gpt2", *given]))
    for stage in range(4):
        found = events(run, stage, 2)
        mine = [event for event in expected.events if event.stage == stage]
        mine.sort(key=lambda event: event.start)
        whole = [NAMES[name] for name in found["name"]]
        assert sorted(whole) == sorted(event.kind for event in mine)
        took = {name: int((found["end_ns"] - found["start_ns"])[np.array(whole) == name].sum()) for name in whole}
        for name, ns in took.items():
            assert ns == pytest.approx(sum(e.end - e.start for e in mine if e.kind == name) * 1e9, rel=1e-5, abs=200)
