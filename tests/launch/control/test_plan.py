"""plan.json: Megatron's rank order on the nodes in their order, and readable by the engine."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.schema.experiment import Cluster, Experiment, Gpu, NodeGroup, Parallel
from launch.control.planning.plan import make_plan
from launch.judge.evidence import plan_line
from megatron_ext.contract.keys import left_out
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Corpus
from megatron_ext.contract.train_config import TrainConfig

DEMO = compose([])


def gpu(name: str) -> Gpu:
    return Gpu(name=name, memory_gib=1, fp32_tflops=1, fp16_tflops=1, bf16_tflops=1, memory_gb_per_s=1)


def group(per_node: int, count: int, kind: str) -> NodeGroup:
    rates = {"intra_gbit_per_s": 1, "intra_latency_us": 1, "inter_gbit_per_s": 1, "inter_latency_us": 1}
    return NodeGroup(count=count, gpus_per_node=per_node, gpu=kind, **rates)


def experiment(tensor: int, data: int, pipeline: int, per_node: int, order: str | None = None) -> Experiment:
    """GPUs of two kinds: one node of group `big`, the others of group `small`."""
    nodes = tensor * data * pipeline // per_node
    groups = {"big": group(per_node, 1, "b")} | ({"small": group(per_node, nodes - 1, "s")} if nodes > 1 else {})
    cluster = Cluster(name="mixed", gpus={"b": gpu("B100"), "s": gpu("S10")}, groups=groups)
    parallel = Parallel(
        tensor=tensor, data=data, pipeline=pipeline, micro_batch_size=1, global_batch_size=data, node_order=order
    )
    return replace(DEMO, cluster=cluster, parallel=parallel)


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    tensor = draw(st.sampled_from([1, 2, 4]))
    data, pipeline = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    blocks = data * pipeline
    per_node = tensor * draw(st.sampled_from([d for d in range(1, blocks + 1) if blocks % d == 0]))
    return experiment(tensor, data, pipeline, per_node)


@given(experiments())
def test_ranks_stand_in_megatrons_grid(wanted: Experiment) -> None:
    plan = make_plan(wanted, "a/b")
    tensor, data, pipeline = plan.tensor, plan.data, plan.pipeline
    grid = np.arange(tensor * data * pipeline).reshape(pipeline, data, tensor)
    for rank, place in enumerate(plan.ranks):
        assert place.rank == rank == grid[place.stage, place.dp, place.tp]


@given(experiments())
def test_nodes_are_filled_one_after_another(wanted: Experiment) -> None:
    plan = make_plan(wanted, "a/b")
    assert [rank for node in plan.nodes for rank in node.ranks] == list(range(len(plan.ranks)))
    for place in plan.ranks:
        assert plan.nodes[place.node].ranks[place.local_rank] == place.rank


def test_nodes_are_named_by_group_and_counted_in_the_order_of_the_plan() -> None:
    plan = make_plan(experiment(1, 4, 1, per_node=1, order="small+big+small*2"), "a/b")
    assert [(node.name, node.gpu) for node in plan.nodes] == [
        ("small-0", "S10"),
        ("big-0", "B100"),
        ("small-1", "S10"),
        ("small-2", "S10"),
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ([], "device", "cpu"),
        (["cluster=a10x8", "executor=local", "parallel=d4p8", "model=xl"], "device", "cuda"),
        ([], "partition", [1, 3]),
        (["parallel.partition=null"], "partition", [2, 2]),
        (["data.split='98,2,0'"], "data_split", [98.0, 2.0, 0.0]),
        ([], "data_cache", None),
        (["data.cache=/a/../b"], "data_cache", "/b"),
        (["executor.master_port=6787"], "master_port", 6787),
        (["profile.timeline=false"], "timeline", False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else None,
)
def test_the_plan_says_what_the_configuration_says(overrides: list[str], key: str, value: object) -> None:
    assert make_plan(compose(overrides), "a/b").as_json()[key] == value


def test_without_a_length_the_learning_rate_decays_over_all_iterations() -> None:
    assert make_plan(DEMO, "a/b").train.lr_decay_iterations == DEMO.train.iterations


def test_a_relative_data_prefix_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_plan(compose(["data.prefix=../x"]), "a/b").data_prefix == str(tmp_path.parent / "x")
    blended = make_plan(compose(["data.prefix=../x", "data.blend=[{prefix:y,weight:3}]"]), "a/b").data_blend
    assert blended == [
        Corpus(prefix=str(tmp_path.parent / "x"), weight=1.0),
        Corpus(prefix=str(tmp_path / "y"), weight=3.0),
    ]


def test_a_relative_checkpoint_to_load_becomes_absolute_and_none_stays_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_plan(compose(["train.load=runs/x"]), "a/b").train.load == str(tmp_path / "runs" / "x")
    assert make_plan(compose([]), "a/b").train.load is None


def test_the_vocabulary_is_padded_for_the_tensor_size() -> None:
    assert make_plan(experiment(2, 1, 1, per_node=2), "a/b").model.padded_vocab_size == 512


def test_the_engine_reads_the_plan(tmp_path: Path) -> None:
    wanted = make_plan(DEMO, "a/b")
    (tmp_path / "plan.json").write_text(json.dumps(wanted.as_json()))
    plan = Plan.read(tmp_path / "plan.json")
    assert replace(plan, folder=wanted.folder) == wanted
    assert (plan.world_size, plan.run, plan.partition) == (4, "a/b", [1, 3])


def test_the_plan_in_a_line() -> None:
    assert plan_line(make_plan(DEMO, "a/b")) == (
        "tensor 1 x data 2 x pipeline 2, partition 1-3, micro-batch 2, global batch 16, 4 ranks on 1 node"
    )


def test_a_plan_names_only_the_options_of_training_that_are_not_at_their_default() -> None:
    options = ["train.optimizer=sgd", "train.momentum=0.5", "train.lr_policy=step", "train.lr_step_iterations=7"]
    before = make_plan(compose([]), "a/b").as_json()["train"]
    assert set(before) - {"mtbf_s"} == {field.name for field in fields(TrainConfig)} - {*left_out(TrainConfig)}
    own = {"optimizer": "sgd", "momentum": 0.5, "lr_policy": "step", "lr_step_iterations": 7}
    assert make_plan(compose(options), "a/b").as_json()["train"] == {**before, **own}
