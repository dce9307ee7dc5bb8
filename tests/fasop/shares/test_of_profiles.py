"""Shares of a run whose GPUs have profiles that were imported from IIDP: none take less by their model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conf.compose import compose, compose_unchecked
from conf.errors import TdppError
from conf.schema.experiment import Experiment
from fasop.costs.network.links import Link
from fasop.errors import SearchError
from fasop.search.shares.micro_batch_memory import that_fit
from fasop.shares.of_profiles import SYNC, measured_cluster
from fasop.shares.performance import paces
from fasop.shares.public_files import Cluster
from launch.commands.launching.resolve_auto import resolve_auto
from launch.commands.profile import main as profile
from tests.fasop.search.shares.test_batch_division import compositions
from tests.support.cases import drawn
from tests.support.fasop import quickstart

CLUSTER = """
name: unlike
gpus:
  v: {name: V, memory_gib: 16, fp32_tflops: 15, fp16_tflops: 100, bf16_tflops: 15, memory_gb_per_s: 900,
      profile: ./q_tesla_v100_pcie_16gb.yaml}
  p: {name: P, memory_gib: 16, fp32_tflops: 9, fp16_tflops: 18, bf16_tflops: 9, memory_gb_per_s: 700,
      profile: ./q_tesla_p100_pcie_16gb.yaml}
groups:
  fast: {gpu: v, count: 1, gpus_per_node: 2, intra_gbit_per_s: 126, intra_latency_us: 5, inter_gbit_per_s: 100,
         inter_latency_us: 20}
  slow: {gpu: p, count: 1, gpus_per_node: 2, intra_gbit_per_s: 126, intra_latency_us: 5, inter_gbit_per_s: 100,
         inter_latency_us: 20}
"""
SIZES = (32, 64, 96, 128, 160)


@pytest.fixture(autouse=True)
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    quickstart.write(tmp_path / "theirs")
    Path("unlike.yaml").write_text(CLUSTER)
    assert profile(["import=theirs", "profile=./q.yaml"]) == 0


def chosen(*more: str) -> tuple[Experiment, str]:
    words = ["cluster=unlike.yaml", "model=resnet50", "parallel=single", "parallel.data=4", "executor=slurm"]
    experiment, said = resolve_auto(compose_unchecked([*words, "container=none", *more]))
    assert said is not None
    return experiment, said


def measured(experiment: Experiment) -> Cluster:
    """Reading the profiles takes longer than all divisions of a batch."""
    cluster = measured_cluster(experiment)
    assert cluster is not None
    return cluster


def seconds(cluster: Cluster, size: int, counts: tuple[int, ...]) -> float:
    servers = [server for server in cluster.servers for _ in range(server.gpus)]
    return max(
        paces(cluster, server, size, SYNC)[0].seconds(count - 1) for server, count in zip(servers, counts, strict=True)
    )


@pytest.mark.parametrize("batch", drawn([256, 384, 480, 640], 0, always=[256, 480]))
def test_no_division_of_the_batch_takes_less(batch: int) -> None:
    both = ("parallel.shares=auto", "parallel.micro_batch_size=auto", f"parallel.global_batch_size={batch}")
    experiment, said = chosen(*both)
    cluster = measured(experiment)
    found = seconds(cluster, experiment.parallel.micro_batch_size, experiment.parallel.micro_batches_of)
    least = min(
        seconds(cluster, size, counts)
        for size in SIZES
        if batch % size == 0
        for counts in compositions(batch // size, 4)
    )
    assert found == pytest.approx(least)
    assert f"{least * 1e3:.1f} ms per iteration" in said
    assert said.endswith("times are those of IIDP's performance model")


def test_streams_are_chosen_with_the_shares() -> None:
    """Of as many workers as were measured, of which each replica's divide its micro-batches."""
    words = ("parallel.shares=auto", "parallel.micro_batch_size=auto", "parallel.streams=auto")
    experiment, _ = chosen(*words, "parallel.global_batch_size=512")
    cluster = measured_cluster(experiment, in_streams=True)
    assert cluster is not None
    servers = [server for server in cluster.servers for _ in range(server.gpus)]

    def ways(size: int) -> list[list[float]]:
        """By replica, seconds of 0, 1, … micro-batches with the streams that take least."""
        by_streams = [list(enumerate(paces(cluster, server, size, SYNC), 1)) for server in servers]
        return [
            [min((pace.seconds(n // v - 1) for v, pace in of if n and n % v == 0), default=0.0) for n in range(17)]
            for of in by_streams
        ]

    of_size = {size: ways(size) for size in SIZES if 512 % size == 0}
    least = min(
        max(of[count] for of, count in zip(of_size[size], counts, strict=True))
        for size in of_size
        for counts in compositions(512 // size, 4)
    )
    parallel = experiment.parallel
    found = [
        paces(cluster, server, parallel.micro_batch_size, SYNC)[streams - 1].seconds(count // streams - 1)
        for server, count, streams in zip(servers, parallel.micro_batches_of, parallel.streams_of, strict=True)
    ]
    assert max(found) == pytest.approx(least)
    assert max(parallel.streams_of) > 1


def test_given_streams_are_those_of_the_times() -> None:
    """By t(v, a) with v as given; a replica's micro-batches are a multiple of them."""
    streams = (4, 1, 2, 1)
    words = ("parallel.shares=auto", "parallel.micro_batch_size=32", "parallel.global_batch_size=512")
    experiment, said = chosen(*words, "parallel.streams=4-1-2-1")
    cluster = measured_cluster(experiment, in_streams=True)
    assert cluster is not None
    servers = [server for server in cluster.servers for _ in range(server.gpus)]
    of = [paces(cluster, server, 32, SYNC)[count - 1] for server, count in zip(servers, streams, strict=True)]

    def longest(counts: tuple[int, ...]) -> float:
        ways = zip(of, counts, streams, strict=True)
        return max(pace.seconds(count // v - 1) if count % v == 0 else math.inf for pace, count, v in ways)

    least = min(map(longest, compositions(16, 4)))
    assert longest(experiment.parallel.micro_batches_of) == pytest.approx(least)
    assert f"{least * 1e3:.1f} ms per iteration" in said
    with pytest.raises(TdppError, match="no shares of which"):
        chosen(*words[:2], "parallel.global_batch_size=1024", "parallel.streams=8")


def test_the_faster_gpus_take_more() -> None:
    experiment, _ = chosen("parallel.shares=auto", "parallel.micro_batch_size=32", "parallel.global_batch_size=512")
    assert experiment.parallel.shares == "5*2-3*2"
    assert experiment.parallel.micro_batch_size == 32


def test_sizes_of_given_shares() -> None:
    experiment, said = chosen(
        *("parallel.shares=2*2-1*2", "parallel.micro_batch_size=auto", "parallel.global_batch_size=384")
    )
    cluster = measured(experiment)
    ways = {size: seconds(cluster, size, (2 * n, 2 * n, n, n)) for size, n in ((32, 2), (64, 1))}
    assert experiment.parallel.micro_batch_size == min(ways, key=lambda size: ways[size])
    assert "micro-batches of 32, 64 were compared" in said


def test_a_ring_over_the_clusters_links_where_no_all_reduces_were_measured() -> None:
    """2 (n - 1) / n of the bytes at the bandwidth, where they take longer than the backward pass beside them."""
    for file in Path().glob("q_*.yaml"):
        file.write_text(file.read_text().split("all_reduces:")[0])

    words = ("parallel.shares=auto", "parallel.micro_batch_size=32", "parallel.global_batch_size=512")

    def first_s(gbit_per_s: float) -> float:
        links = [f"cluster.groups.{name}.inter_gbit_per_s={gbit_per_s}" for name in ("fast", "slow")]
        cluster = measured(chosen(*words, *links)[0])
        return paces(cluster, cluster.servers[0], 32, SYNC)[0].first_s

    link = Link(latency_s=0.0, s_per_byte=8e-9)
    at_1_gbit_per_s = link.all_reduce(4).takes(sum(quickstart.BUCKETS_MIB) * 2**20)
    assert first_s(0.5) - first_s(1) == pytest.approx(at_1_gbit_per_s)
    assert first_s(1) == pytest.approx(at_1_gbit_per_s, rel=0.1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("parallel.pipeline=2", "parallel.data=2", "parallel.global_batch_size=256"),
         "without times of its parts; use parallel.tensor=1 parallel.pipeline=1"),
        (("parallel.global_batch_size=100",), "parallel.global_batch_size=100 must give each of 4 GPUs a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_solved_is_one_message(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(TdppError) as error:
        chosen("parallel.shares=auto", "parallel.micro_batch_size=auto", *more)
    assert message in str(error.value)


def test_a_batch_that_adapts_keeps_to_the_room_that_was_measured() -> None:
    words = ["cluster=unlike.yaml", "model=resnet50", "parallel=single", "parallel.data=4", "executor=slurm"]
    words += ["container=none", "parallel.micro_batch_size=16", "parallel.global_batch_size=768", "train.samples=99999"]
    experiment = compose([*words, "adapt.rebalance=true"])
    fit = {16: [1, 2, 4], 32: [1, 2, 4], 48: [1, 2], 64: [1, 2], 128: [1]}
    assert that_fit(experiment, [32, 48, 64, 128], [2, 4]) == [fit] * 4
    with pytest.raises(
        SearchError, match="micro-batches of 192 samples do not fit in the memory of any replica, by profile"
    ):
        that_fit(experiment, [192], [])
    with pytest.raises(SearchError, match="no replica has the memory for 8 streams, by profile"):
        that_fit(experiment, [], [8])
