"""`tdpp search … parallel.schedule=pipedream`: stages of a model, from its profile, as a plan that launch takes."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from conf.compose import compose
from fasop.costs.measured_module import LOSS
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.graphs.division import Level, Options
from fasop.graphs.graph import Operators
from fasop.graphs.graph_text import read_graph
from fasop.graphs.own.cuts import Cuts, Work
from fasop.graphs.own.machines import of_levels
from fasop.graphs.own.recurrence import Recurrence
from fasop.graphs.own.versioned_memory import VersionedMemory
from fasop.simulation.predict import Prediction, predict
from launch.cli import main
from launch.profile import files
from megatron_ext.contract.schedule.stream_check import prove
from megatron_ext.contract.schedule.streams import Stream
from tests.support.fasop.modules import random_profile, words, written
from tests.support.fasop.random_pipelines import all_partitions
from tests.support.profiled_graphs import chain

GPUS, BATCH = 4, 8
LATENCY_S, S_PER_BYTE = 100e-6, 8e-9


def cluster(*more: str) -> list[str]:
    return [
        *(f"cluster.groups.local.gpus_per_node={GPUS}", f"parallel.global_batch_size={BATCH}"),
        *("cluster.groups.local.intra_latency_us=100", "cluster.groups.local.intra_gbit_per_s=1"),
        *("parallel.schedule=pipedream", "parallel.micro_batch_size=1", *more),
    ]


def seconds(profile: LayerProfile, partition: list[int], replicas: list[int]) -> float:
    """Of a micro-batch in the steady state, from the profile's own numbers."""
    module = profile.modules["module"]
    costs = next(one for one in profile.costs if one.micro_batch_size == 1)
    assert costs.sequence is not None
    ends, slowest = [0, *accumulate(partition)], 0.0
    for number, (begin, end) in enumerate(pairwise(ends)):
        own, q = module.blocks[begin:end], replicas[number]
        compute = sum(costs.parts[block.kind].forward + costs.parts[block.kind].backward for block in own)
        if number == len(partition) - 1:
            compute += costs.parts[LOSS].forward + costs.parts[LOSS].backward
        gradients = 4 * sum(block.parameters for block in own)
        summing = 2 * (q - 1) * (LATENCY_S + gradients / q * S_PER_BYTE) if gradients and q > 1 else 0.0
        slowest = max(slowest, (compute * 1e-3 + summing) / q)
        if number:
            sent = 2 * costs.sequence.crossing[begin] * S_PER_BYTE / min(q, replicas[number - 1])
            slowest = max(slowest, sent)
    return slowest


def searched(folder: Path, profile: LayerProfile, *more: str) -> list[dict[str, str]]:
    """The rows of the best stages, and in the folder their plan."""
    given = [*words(folder, *cluster(*more)), f"profile={written(profile, folder)}", f"plan={folder / 'plan.yaml'}"]
    assert main(["search", *given, f"csv={folder / 'stages.csv'}"]) == 0
    with (folder / "stages.csv").open() as file:
        return list(csv.DictReader(file))


def replica_lists(stages: int, ranks: int) -> list[list[int]]:
    if stages == 1:
        return [[ranks]]
    return [[one, *rest] for one in range(1, ranks) for rest in replica_lists(stages - 1, ranks - one)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_partition_with_any_replicas_is_faster(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of chains, and of graphs whose stages still hold neighbours in the order of the blocks."""
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, tmp_path, int(rng.integers(3, 8)), wires=seed % 2 == 1)
    plan = tmp_path / "plan.yaml"
    given = [*words(tmp_path, *cluster()), f"profile={written(profile, tmp_path)}", f"plan={plan}"]
    assert main(["search", *given, f"graph_output={tmp_path / 'graph.txt'}"]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    found = yaml.safe_load(plan.read_text())
    partition, replicas = ([int(one) for one in str(found[key]).split("-")] for key in ("partition", "replicas"))
    blocks = len(profile.modules["module"].blocks)
    best = math.inf
    for stages in range(1, GPUS + 1):
        for split in all_partitions(blocks, stages).T.tolist():
            if min(split) > 0:
                best = min(best, *(seconds(profile, split, several) for several in replica_lists(stages, GPUS)))
    assert seconds(profile, partition, replicas) == pytest.approx(best)
    assert found["pipeline"] == len(partition) == len(replicas)
    assert found["schedule"] == "pipedream"
    assert f"{best * 1e3:.3f} ms per mini-batch" in told.out
    assert "(proved)" in told.err
    plain = [f"parallel.{key}" for key in ("data=1", "schedule=pipedream")]
    experiment = compose([*words(tmp_path), *cluster(), f"parallel={plan}", *plain, f"model.layers={blocks}"])
    assert experiment.parallel.layout.replicas == tuple(replicas)
    assert experiment.parallel.schedule == "pipedream"
    stages_of_blocks = [node.stage for node in read_graph(tmp_path / "graph.txt").nodes if not node.is_part]
    assert stages_of_blocks == [stage for stage, count in enumerate(partition) for _ in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_of_the_graph_sends_what_crosses_it(seed: int, tmp_path: Path) -> None:
    """Of a block that gives several wires no more than what is used behind the cut, and no more to hold."""
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, tmp_path, 7, wires=True)
    plan = [f"parallel.{key}" for key in ("data=1", "pipeline=1", "partition=null", "micro_batch_size=1")]
    experiment = compose([*words(tmp_path), *plan, "parallel.global_batch_size=1", "model.layers=7"])
    (gpu,) = experiment.cluster.gpus
    file = tmp_path / "graph.txt"
    files.write_graphs(file, experiment, {gpu: read_profile(str(written(profile, tmp_path)))})
    graph = read_graph(file)
    work = Work(Operators(graph), Operators(graph).compute_s[:, np.newaxis], limited=True)
    assert [len([one for one in group if not Operators(graph).nodes[one].is_part]) for group in work.groups] == [1] * 8
    costs = max(profile.costs, key=lambda one: one.micro_batch_size)
    assert costs.sequence is not None
    prefixes = Cuts(work, [(1 << number) - 1 for number in range(1, 8)])
    assert sorted(prefixes.sent) == sorted(costs.sequence.crossing[1:8])
    assert prefixes.sent[-1] == costs.sequence.crossing[7]


def launched(tmp_path: Path, plan: Path, *more: str) -> Prediction:
    return predict(compose([*words(tmp_path), f"parallel={plan}", "parallel.data=1", *more]))


def in_torch(run: Prediction) -> list[float]:
    """Bytes of each stage without what a GPU has anyway."""
    without = [replace(stage.memory, context=None, communicators=None) for stage in run.stages]
    return [memory.of(sum(stage.layers)) for memory, stage in zip(without, run.stages, strict=True)]


@pytest.mark.parametrize(
    ("seed", "recompute"), [(0, "none"), (1, "none"), (2, "none"), (3, "full"), (5, "full")], ids=str
)
def test_memory_is_what_a_launch_of_the_plan_is_predicted_to_take(
    seed: int, recompute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of replicas, of blocks whose buffers have one copy, and where blocks are computed again."""
    rng = np.random.default_rng(seed)
    blocks = int(rng.integers(3, 8))
    profile = random_profile(rng, tmp_path, blocks, wires=seed % 2 == 1)
    every = profile.modules["module"].blocks
    every[1] = replace(every[1], fixed_bytes=10**6)
    found = searched(tmp_path, profile, f"parallel.recompute={recompute}")
    sizes = [*cluster()[:2], f"model.layers={blocks}"]
    run = launched(tmp_path, tmp_path / "plan.yaml", f"cluster.gpus.cpu.profile={tmp_path / 'profile.yaml'}", *sizes)
    assert [float(row["memory_bytes"]) for row in found] == pytest.approx(in_torch(run), rel=1e-9)


@pytest.mark.parametrize("model", ["gnmt-tiny", "tiny"])
def test_memory_of_a_family_is_what_a_launch_of_the_plan_is_predicted_to_take(model: str, tmp_path: Path) -> None:
    plan, rows = tmp_path / "plan.yaml", tmp_path / "stages.csv"
    given = [f"model={model}", "cluster=a10x8", "cluster.groups.gpu2.count=1", "train.precision=bf16"]
    given += ["model.untie_embeddings_and_output_weights=true"]
    search = [*given, "parallel.schedule=pipedream", f"plan={plan}", f"csv={rows}", "parallel.micro_batch_size=2"]
    assert main(["search", *search, "parallel.global_batch_size=8", "straight=true"]) == 0
    run = predict(compose([*given, f"parallel={plan}", "parallel.data=1"]))
    with rows.open() as file:
        found = [float(row["memory_bytes"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(in_torch(run), rel=1e-9)


def test_versions_are_those_that_the_schedule_proves() -> None:
    """Of all layouts of up to seven ranks."""
    work = Work(Operators(chain()), Operators(chain()).compute_s[:, np.newaxis], limited=False)
    for ranks in range(1, 8):
        recurrence = Recurrence(
            work, of_levels([Level(machines=ranks, bytes_per_s=1e9)], None), Options(), VersionedMemory()
        )
        for stages in range(1, ranks + 1):
            for replicas in replica_lists(stages, ranks):
                stream = Stream(tuple(replicas))
                begins = [0, *accumulate(replicas)]
                ours = [recurrence.versions(begin, each) for begin, each in zip(begins, replicas, strict=False)]
                assert tuple(ours) == prove(stream, 6 * ranks * stream.period).versions


def test_every_stage_has_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the head takes longer than all layers."""
    plan = tmp_path / "plan.yaml"
    words_ = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "model=tiny", "train.precision=bf16", f"plan={plan}"]
    words_ += ["model.untie_embeddings_and_output_weights=true", "model.vocab_size=50000", "straight=true"]
    assert main(["search", *words_, "parallel.schedule=pipedream", "model.layers=6"]) == 0, capsys.readouterr().err
    layers = [int(one) for one in yaml.safe_load(plan.read_text())["partition"].split("-")]
    assert (len(layers), sum(layers), min(layers)) == (4, 6, 1)


def test_what_has_no_stages_without_a_flush(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "cluster=a10x8", "model=xl", "parallel.schedule=pipedream"]) != 0
    assert "blocks of model=xl share parameters" in capsys.readouterr().err
    profile = random_profile(np.random.default_rng(1), tmp_path, 3)
    given = [*words(tmp_path, *cluster("parallel.micro_batch_size=1,2")), f"profile={written(profile, tmp_path)}"]
    assert main(["search", *given]) != 0
    assert "so its size changes the training; give one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("parallel.tensor=2", "parallel.tensor=2: a search for stages without a flush needs tensor=1; leave it out"),
        ("parallel.sharded_optimizer=true", "sharded_optimizer=true: a search for stages without a flush needs"),
        (
            "parallel.pipeline=2",
            "parallel.pipeline=2: the search itself finds the stages and their replicas; leave it out",
        ),
        ("parallel.recompute=none,full", "parallel.recompute=none,full: give one value"),
        ("parallel.semantics=vertical", "a search covers schedules with a flush, and semantics=stashing"),
    ],
)
def test_what_is_not_searched_of_stages_without_a_flush(
    word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = random_profile(np.random.default_rng(1), tmp_path, 3)
    assert main(["search", *words(tmp_path, *cluster(word)), f"profile={written(profile, tmp_path)}"]) != 0
    assert message in capsys.readouterr().err
