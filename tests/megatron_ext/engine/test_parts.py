"""The engine's smaller parts against figures and definitions that are not its own."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.contract.events import NAMES
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.models.counts import flops_per_sample
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.engine.executor.messages import channels
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.log import iteration_line
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.engine.optimizer.optimizer import DataGroup, Optimizer
from megatron_ext.engine.optimizer.precision import LossScaler
from megatron_ext.engine.optimizer.update_rules import NORM_ROW
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.meeting import difference
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.timeline.recorder import Recorder
from tests.support.megatron_ext.engine_run import make_run
from tests.support.reports.raw_events import NO_EVENTS

RECORD = np.dtype(
    [
        ("name", "<u2"),
        ("chunk", "<u2"),
        ("iteration", "<u4"),
        ("micro_batch", "<i4"),
        ("peer", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
SEED_TRAIN = TrainConfig(
    iterations=50,
    seed=1234,
    lr=1.5e-4,
    min_lr=1e-5,
    lr_warmup_iterations=3200,
    lr_decay_iterations=320000,
    weight_decay=0.01,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_eps=1e-8,
    clip_grad=1.0,
    precision="fp32",
    compile=False,
    log_interval=10,
    load=None,
    checkpoint=False,
    save_interval=None,
    keep_checkpoints=2,
    save_async=False,
    comm_timeout_s=60,
)


@pytest.mark.parametrize(
    ("updates", "logged"), [(15, "7.031E-07"), (25, "1.172E-06"), (35, "1.641E-06")], ids=["15", "25", "35"]
)
def test_warm_up_gives_the_learning_rates_of_the_published_run(updates: int, logged: str) -> None:
    assert f"{learning_rate(updates, SEED_TRAIN):.3E}" == logged


def test_the_cosine_starts_at_lr_passes_the_middle_and_ends_at_min_lr() -> None:
    middle = (3200 + 320000) // 2
    assert learning_rate(3200, SEED_TRAIN) == 1.5e-4
    assert learning_rate(middle, SEED_TRAIN) == pytest.approx((1.5e-4 + 1e-5) / 2)
    assert learning_rate(320000, SEED_TRAIN) == learning_rate(400000, SEED_TRAIN) == 1e-5


def test_the_norm_counts_every_gradient_once(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path, corpus).plan
    stage = stage_of(plan, 0, TensorGroup())
    flat = FlatWeights(stage.parameters_by_name(), torch.float32, torch.device("cpu"))
    flat.grad.normal_(generator=torch.Generator().manual_seed(1))
    word = flat.parameters["embedding.word"]
    elsewhere = flat.gradient(word)
    expected = (flat.grad.double().square().sum() - elsewhere.double().square().sum()).sqrt().item()
    assert flat.grad.numel() % NORM_ROW and elsewhere.numel() % NORM_ROW and flat.grad.numel() > 2 * NORM_ROW
    optimizer = Optimizer(flat, plan.train, None, DataGroup(1, 0, None), False, [flat.where(word)])
    assert optimizer.step(Recorder(None)) == pytest.approx(expected, rel=1e-6)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_groups_cover_the_grid_in_megatrons_order(tensor: int, data: int, pipeline: int) -> None:
    grid = Layout.grid(tensor, data, pipeline)
    world = tensor * data * pipeline
    every = range(pipeline)
    for groups, differing in ((grid.data_groups(), 1), (grid.channel_groups(every), 0), (grid.tensor_groups(), 2)):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            places = np.array([(rank // tensor // data, rank // tensor % data, rank % tensor) for rank in group])
            same = [axis for axis in range(3) if axis != differing]
            assert (places[:, same] == places[0, same]).all()
    ends = [[group[0], group[-1]] for group in grid.channel_groups(every)]
    assert grid.channel_groups((0, pipeline - 1)) == ends
    for sharded in (False, True):
        assert [sorted(summed.ranks) for summed in grid.tied_groups((0, pipeline - 1), sharded)] == ends


@given(st.integers(2, 5), st.integers(1, 3))
def test_two_stages_send_each_other_every_kind_of_message_one_way_in_a_group_of_its_own(
    stages: int, chunks: int
) -> None:
    """Nothing else keeps messages apart; nccl would let those of a group hold each other up."""
    groups = Groups(**{field.name: field.name for field in fields(Groups)})  # type: ignore[arg-type]
    ways: dict[tuple[object, frozenset[int]], set[tuple[str, int, int]]] = {}
    for stage in range(stages):
        place = Place(stage, 0, stage, stage, 0, 0)
        for kind, ((peer,),) in channels(Layout.grid(1, 1, stages), place, chunks, groups).items():
            what, sends = kind.value.split("-")[0], kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
            way = (what, stage, peer.rank) if sends else (what, peer.rank, stage)
            ways.setdefault((peer.group, frozenset((stage, peer.rank))), set()).add(way)
    assert all(len(way) == 1 for way in ways.values())
    assert len(ways) == 2 * (stages if chunks > 1 else stages - 1)


def test_flat_weights_are_views_and_buckets_cover_them_once(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, "parallel.data=1", "parallel.pipeline=1", "parallel.partition=3").plan
    stage = stage_of(plan, 0, TensorGroup())
    before = {name: p.detach().clone() for name, p in stage.parameters_by_name()}
    flat = FlatWeights(stage.parameters_by_name(), torch.float32, torch.device("cpu"))
    for name in before:
        assert torch.equal(flat.view(name, flat.weight), before[name])
    shared = FlatWeights(stage.parameters_by_name(), torch.float32, torch.device("cpu"), shares=(1,) * 1009, rank=3)
    assert shared.slices == flat.slices
    assert torch.equal(shared.weight[: flat.weight.numel()], flat.weight)
    assert shared.weight.numel() % 1009 == 0
    assert not shared.weight[flat.weight.numel() :].any()
    shared.weight.zero_()
    assert all(not p.any() for p in stage.parameters())
    for size in (1, 1000, 10**9):
        stage = stage_of(plan, 0, TensorGroup())
        flat = FlatWeights(stage.parameters_by_name(), torch.float32, torch.device("cpu"), bucket_bytes=size)
        found = flat.buckets
        assert [name for _, names in found for name in names] == list(flat.slices)
        assert found[0][0].start == 0
        assert found[-1][0].stop == flat.weight.numel()
        assert all(a.stop == b.start for (a, _), (b, _) in pairwise(found))


def test_weights_begin_as_gpt2s_whatever_the_cut(tmp_path: Path, corpus: Path) -> None:
    """Normal with 0.02, output projections with 0.02 / sqrt(2 layers), no bias; the tied embeddings are equal."""
    sizes = ("model.hidden=64", "parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2")
    plan = make_run(tmp_path / "run", corpus, *sizes).plan
    first, last = (dict(stage_of(plan, stage, TensorGroup()).parameters_by_name()) for stage in range(2))
    for name, parameter in (first | last).items():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all()
        else:
            std = 0.02 / math.sqrt(2 * 3) if "_out." in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
    assert torch.equal(first["embedding.word"], last["head.word"])


def test_a_log_line_reads_as_megatrons(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, "train.iterations=50").plan
    line = iteration_line(
        plan,
        {
            "iteration": 30,
            "consumed_samples": 1920,
            "elapsed_ms": 1423.8,
            "learning_rate": 7.031e-7,
            "loss": 10.17721,
            "loss_scale": 262144.0,
            "grad_norm": 16.666,
            "skipped": 0,
            "nan": 0,
        },
        8,
    )
    seed = (
        " iteration       30/      50 | consumed samples:         1920 | elapsed time per iteration (ms): 1423.8 | "
        "learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | loss scale: 262144.0 | "
        "grad norm: 16.666 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert line == seed.replace("size:    64", "size:     8")


def test_a_recorder_without_a_buffer_records_nothing() -> None:
    recorder = Recorder(None)
    with recorder.span("optimizer"):
        pass
    recorder.clock(1, 2, 3)
    recorder.close()


def test_the_documented_event_names_are_the_recorded_ones() -> None:
    text = Path("docs/formats.md").read_text()
    documented = re.search(r"^Names: `([^`]+)`", text, re.M | re.S)
    assert documented is not None
    assert set(documented[1].split()) | set(NO_EVENTS) == set(NAMES)


def test_the_loss_scale_falls_as_in_the_published_run() -> None:
    scaler = LossScaler.of("fp16")
    for _ in range(15):
        scaler.update(finite=False)
    assert scaler.scale == 262144.0
    for _ in range(100):
        scaler.update(finite=False)
    assert scaler.scale == 1.0


def test_the_loss_scale_grows_after_a_thousand_good_iterations_and_regains_its_patience() -> None:
    scaler = LossScaler.of("fp16")
    scaler.scale, scaler.patience = 1024.0, 0
    for _ in range(1000):
        assert scaler.scale == 1024.0
        scaler.update(finite=True)
    assert scaler.scale == 2048.0
    scaler.update(finite=False)
    assert scaler.scale == 2048.0
    scaler.update(finite=False)
    assert scaler.scale == 1024.0


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_loss_scale_from_a_checkpoint_goes_on_as_if_never_saved(before: list[bool], after: list[bool]) -> None:
    scaler, loaded = (LossScaler(scale=2.0**10, dynamic=True, window=3) for _ in range(2))
    for finite in before:
        scaler.update(finite)
    loaded.load(json.loads(json.dumps(scaler.state())))
    for finite in after:
        scaler.update(finite)
        loaded.update(finite)
        assert loaded.scale == scaler.scale


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_there_is_no_loss_scale(precision: str) -> None:
    scaler = LossScaler.of(precision)
    scaler.update(finite=False)
    assert scaler.scale == 1.0


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([("a", "torch 2.1"), ("b", "torch 2.1")], ""),
        ([("a", "torch 2.1"), ("b", "torch 2.2"), ("a", "torch 2.1")], "torch 2.1 on a; torch 2.2 on b"),
    ],
    ids=["same", "different"],
)
def test_hosts_with_another_torch_are_named(found: list[tuple[str, str]], message: str) -> None:
    assert message in difference(found)
    assert bool(message) == bool(difference(found))


def test_model_operations_are_the_multiplications_that_torch_counts(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, "parallel.data=1", "parallel.pipeline=1").plan
    tokens = torch.zeros(2, plan.model.sequence_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        stage_of(plan, 0, TensorGroup())({"tokens": tokens})["logits"].sum().backward()
    assert flops_per_sample(plan.model) * len(tokens) == counted.get_total_flops()


def test_each_rank_tells_its_memory_and_the_first_of_a_stage_traces_an_iteration(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, "parallel.data=2", "parallel.pipeline=1", "profile.trace_iteration=3")
    assert run.go() == 0, run.stderr()
    for rank in range(2):
        content = json.loads((run.run.path / "memory" / f"rank-{rank:05d}.json").read_text())
        assert content["iteration"] == 4
        assert 50 < content["mib"]["max_resident"] < 2000
        assert content["course"]["iterations"] == [1, 2, 3, 4]
        assert all(50 < mib <= content["mib"]["max_resident"] + 16 for mib in content["course"]["mib"])
        assert (
            f"[Rank {rank}] (after 1 iterations) memory (MB) | max resident: "
            in run.run.node_out("local-0").read_text()
        )
    (trace,) = run.run.traces.iterdir()
    assert trace.name == "rank-00000.iteration-3.json.gz"
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
