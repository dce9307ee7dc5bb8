"""What IIDP's quickstart answers, and each fault of its files."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from fasop.errors import SearchError
from fasop.shares.adaptive_keys import adaptive_words
from fasop.shares.performance import WeightSync, paces, recommended
from fasop.shares.public_files import read_cluster
from fasop.shares.solution import Solution, best
from launch.cli import main
from tests.support.fasop import quickstart

GOLDEN = [
    (256, 32, (1, 0), (1, 0), 0.17108),
    (512, 32, (3, 0), (1, 0), 0.30033),
    (768, 64, (2, 0), (1, 0), 0.38453),
    (1024, 32, (1, 4), (3, 0), 0.52152),
    (2048, 32, (2, 4), (3, 1), 0.97054),
    (4096, 32, (4, 4), (4, 2), 1.81827),
]
"""Of the public solver: global and local batch, workers and accumulation by server, seconds."""


def solved(file: Path, batch: int, **given: int) -> Solution:
    cluster = read_cluster(file)
    return best(cluster, batch, recommended(cluster.buckets_mib), **given)


@pytest.mark.parametrize(("batch", "size", "first", "second", "seconds"), GOLDEN)
def test_the_public_answers(
    tmp_path: Path, batch: int, size: int, first: tuple[int, int], second: tuple[int, int], seconds: float
) -> None:
    found = solved(quickstart.write(tmp_path), batch)
    assert found.local_batch_size == size
    assert [(share.workers, share.accumulation) for share in found.shares] == [first, second]
    assert round(found.seconds, 5) == seconds
    assert found.sync is WeightSync.overlap


@pytest.mark.parametrize(("batch", "public"), [(3968, 1.9464), (2176, 1.016 * 1.10379)])
def test_better_than_the_public_solver_where_it_is_greedy(tmp_path: Path, batch: int, public: float) -> None:
    assert solved(quickstart.write(tmp_path), batch).seconds < public / 1.015


def test_the_line_of_the_public_solver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["search", "iidp=config.json", "parallel.global_batch_size=512"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith(
        "Solution - GBS: 512 | LBS: 32 | weight sync method: overlap | "
        "config: ['node0:4GPU,VSW:3,GA:0', 'node1:4GPU,VSW:1,GA:0']\n"
    )
    assert "parallel.micro_batch_size=32 parallel.global_batch_size=512 parallel.shares=3*4-1*4 " in out.err
    assert "train.overlap_optimizer=true train.clip_grad=0)" in out.err


@pytest.mark.parametrize(("batch", "size", "first", "second", "seconds"), GOLDEN)
@pytest.mark.parametrize("sync", WeightSync)
def test_the_runs_of_a_solution_take_what_is_printed_beside_them(
    tmp_path: Path,
    sync: WeightSync,
    batch: int,
    size: int,
    first: tuple[int, int],
    second: tuple[int, int],
    seconds: float,
) -> None:
    """Workers are streams, which cannot overlap with updates; without streams micro-batches are passes in a row."""
    cluster = read_cluster(quickstart.write(tmp_path))
    solution = best(cluster, batch, sync)
    runs = solution.runs(cluster)
    several = max(share.workers for share in solution.shares) > 1
    assert len(runs) == 1 + several
    for run in runs:
        chosen = compose([*["cluster=local", "executor=local", "container=none", "parallel=single"],
                          *["model=resnet-tiny", "data=digits", "train=demo"], *run.words])  # fmt: skip
        assert chosen.overlaps_optimizer == (chosen.train.overlap_optimizer is True)
        if chosen.parallel.streams is not None:
            assert tuple(chosen.parallel.streams_of) == tuple(
                share.workers for share in solution.shares for _ in "4444"
            )
        taken = []
        counts = chosen.parallel.micro_batches_of[::4]
        for server, count, streams in zip(cluster.servers, counts, chosen.parallel.streams_of[::4], strict=True):
            way = WeightSync.overlap if chosen.overlaps_optimizer else WeightSync.sequential
            pace = paces(cluster, server, chosen.parallel.micro_batch_size, way)[streams - 1]
            taken.append(pace.seconds(count // streams - 1))
        assert run.seconds == pytest.approx(max(taken))
    if several and sync is WeightSync.sequential:
        assert runs[0].seconds == pytest.approx(solution.seconds)
    if not several:
        assert runs[0].seconds == pytest.approx(solution.seconds)


@pytest.mark.parametrize("place", ["vit", "vit/jabas_config", "."])
def test_the_folders_of_jabas_examples_are_found_from_wherever_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Its configurations lie in a folder of their own, and share the profile of links with those of other models."""
    example = tmp_path / "vit"
    paths = {"comm_profile_dir": "../common/comm", "gpu_cluster_info": "../common/cluster.json"}
    quickstart.write(example, **paths)
    for folder, files in (("jabas_config", ["config.json"]), ("../common", ["comm", "cluster.json"])):
        (example / folder).mkdir()
        for file in files:
            (example / file).rename(example / folder / file)
    monkeypatch.chdir(tmp_path / place)
    config = Path(os.path.relpath(example / "jabas_config/config.json"))
    assert main(["search", f"iidp={config}", "parallel.global_batch_size=512"]) == 0
    assert "'node0:4GPU,VSW:3,GA:0', 'node1:4GPU,VSW:1,GA:0'" in capsys.readouterr().out


def test_a_configuration_of_jabas_with_numbers_as_text(tmp_path: Path) -> None:
    bounds = {"batch_size_lower_bound": "512", "batch_size_upper_bound": "32768", "similarity_target": "0.3"}
    cluster = read_cluster(quickstart.write(tmp_path, **bounds, resource_alloc_unit="2GPU", homo_servers=[]))
    assert (cluster.smallest_batch, cluster.unit) == (512, 2)
    of_pairs = best(cluster, 512, WeightSync.overlap)
    assert [share.gpus for share in of_pairs.shares] == [2, 2, 2, 2]
    assert of_pairs.seconds <= best(cluster, 512, WeightSync.overlap, unit=4).seconds


BOUNDS = {"batch_size_lower_bound": "512", "batch_size_upper_bound": "32768", "similarity_target": "0.3"}


@pytest.mark.parametrize(
    ("keys", "batch", "words"),
    [
        ({}, 512, "adapt.rule=similarity adapt.target=0.3 adapt.upper=32768"),
        ({}, 1024, "adapt.rule=similarity adapt.target=0.3 adapt.lower=512 adapt.upper=32768"),
        (
            {"batch_size_adjust_rate": "0.2", "batch_size_adjust_interval": 50, "metric": "similarity"},
            512, "adapt.rule=similarity adapt.target=0.3 adapt.upper=32768 adapt.rate=0.2 adapt.every=50",
        ),
        ({"enable_adjust": "False"}, 512, ""),
    ],
)  # fmt: skip
def test_a_configuration_of_jabas_is_launched_with_the_words_that_its_search_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, object], batch: int, words: str
) -> None:
    file = quickstart.write(tmp_path, **BOUNDS, **keys)
    assert adaptive_words(file, batch) == words.split()
    assert main(["search", f"iidp={file}", f"parallel.global_batch_size={batch}"]) == 0
    printed = capsys.readouterr().err
    assert ("adapt." in printed) == bool(words)
    assert words in printed
    shares = printed.partition("in a run: ")[2].partition(")")[0]
    model = "cluster=local model=resnet-tiny data=digits executor=local container=none parallel=single train=demo"
    run = compose([*model.split(), *shares.split(), *words.split(), "train.iterations=null", "train.samples=99999"])
    assert run.adapt.bounds(batch) == ((512, 32768) if words else (batch, batch))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"metric": "gns"}, "metric=gns must be similarity"),
        ({"enable_adjust": 2}, "enable_adjust=2 must be true or false"),
        ({"similarity_target": 1}, "config.json: adapt.target=1.0 must be"),
        ({"batch_size_lower_bound": 1024}, "parallel.global_batch_size=512, the first batch of a run, must lie be"),
    ],
)
def test_what_is_wrong_with_a_configuration_of_jabas_is_named(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(SearchError, match=re.escape(message)):
        adaptive_words(quickstart.write(tmp_path, **(BOUNDS | keys)), 512)


def test_a_server_without_a_profile_of_its_own_takes_that_of_its_gpu(tmp_path: Path) -> None:
    file = quickstart.write(tmp_path, available_servers=["node0", "node2", "node1"])
    shares = solved(file, 1024).shares
    assert [share.server.name for share in shares] == ["node0", "node2", "node1"]
    assert shares[0].micro_batches == shares[1].micro_batches


def test_a_server_that_was_measured_itself_takes_its_own_times(tmp_path: Path) -> None:
    file = quickstart.write(tmp_path, available_servers=["node0", "node2"])  # two of V100
    for name in ("node0", "node2"):
        shutil.copytree(tmp_path / "comp/32/server-V100", tmp_path / "comp/32" / name)
    for step in (tmp_path / "comp/32/node2").iterdir():
        times = json.loads(step.read_text())
        change(step, fwd_time=3 * times["fwd_time"], bwd_time=3 * times["bwd_time"])
    first, second = solved(file, 1024, local_batch_size=32).shares
    assert (first.micro_batches, second.micro_batches) == (6, 2)


def test_one_server_sums_within_itself(tmp_path: Path) -> None:
    config = quickstart.write(tmp_path, available_servers=["node0"])
    (tmp_path / "comm/inter_comm_profile_data.txt").unlink()  # a server alone does not measure it
    one = solved(config, 128, local_batch_size=32)
    cluster = read_cluster(tmp_path / "config.json")
    assert best(cluster, 128, WeightSync.sequential, 32).seconds > one.seconds


@pytest.mark.parametrize(
    ("buckets", "sync"), [([3.0], "overlap"), ([40.0, 1.0], "sequential"), ([25.0] * 9, "overlap")]
)
def test_the_recommended_way_to_hand_out_weights(buckets: list[float], sync: str) -> None:
    assert recommended(buckets) == sync


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in {**content, **values}.items() if value is not None}))


CONFIG, CLUSTER = "config.json", "cluster.json"
STEP = "comp/32/server-V100/resnet50_32_2_comp_profile.json"
FAULTS = [
    (CONFIG, {"comp_profile_dir": None}, "config.json: comp_profile_dir is missing"),
    (CONFIG, {"comp_profil_dir": "x"}, "comp_profil_dir is not a configuration key"),
    (CONFIG, {"comp_profile_dir": "there"}, "comp_profile_dir=there: no such folder"),
    (CONFIG, {"gpu_cluster_info": 3}, "gpu_cluster_info=3 must be a path"),
    (CONFIG, {"available_servers": []}, "must be a list of at least one server name"),
    (CONFIG, {"available_servers": ["node0", "node0"]}, "has 'node0' twice"),
    (CONFIG, {"available_servers": ["node7"]}, "no server 'node7', which"),
    (CONFIG, {"similarity_target": 0.3}, "batch_size_lower_bound is missing; JABAS needs"),
    (CONFIG, {"resource_alloc_unit": "some"}, "resource_alloc_unit=some must be a number"),
    (CLUSTER, {"node0": {"type": "x", "number": 0}}, "node0.number=0 must be a whole number, at least 1"),
    (CLUSTER, {"node0": {"type": "x", "number": 4}}, "node0.intra_network_bandwidth is missing"),
    (STEP, {"lbs": 64}, "lbs=64 must be 32"),
    (STEP, {"fwd_time": "fast"}, "fwd_time=fast must be a number, 0 or more"),
    (STEP, {"fwd_time": 1e400}, "fwd_time=Infinity must be a number"),
    (STEP, {"num_models": 1}, "num_models=1 occurs twice"),
    (STEP, {"gpu_type": "P4"}, "gpu_type must be the same in all files"),
    ("bucket/resnet50_bucket_size_profile.json", {"bucket_size_distribution": []}, "must be a list of sizes in MiB"),
    ("mem/32/server-V100/max_memory_profile_info.json", {"max_num_models": 1.5}, "max_num_models=1.5 must be a whole"),
]


@pytest.mark.parametrize(("file", "values", "message"), FAULTS)
def test_each_fault_is_one_message_that_names_the_file(
    tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    config = quickstart.write(tmp_path)
    change(tmp_path / file, **values)
    with pytest.raises(SearchError) as error:
        read_cluster(config)
    assert message in str(error.value)
    assert Path(file).name in str(error.value) or Path(file).parts[0] in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a global batch: add parallel.global_batch_size=512"),
        (["parallel.global_batch_size=500"], "; 384 or 512 would"),
        (["parallel.global_batch_size=100"], "; 256 or 512 would"),
        (["parallel.global_batch_size=512", "parallel.micro_batch_size=31"], "micro_batch_size=31 was not measured"),
        (["parallel.global_batch_size=512", "unit=3"], "a unit of 3 GPUs must divide"),
        (["parallel.global_batch_size=512", "train.overlap_optimizer=yes"], "must be one of auto, true, false"),
        (["parallel.global_batch_size=512", "top=3"], "does not take top=3"),
    ],
)  # fmt: skip
def test_what_a_command_line_cannot_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["search", f"iidp={quickstart.write(tmp_path)}", *words]) != 0
    assert message in capsys.readouterr().err


def test_a_unit_without_the_configuration_of_shares_says_what_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "unit=3"]) != 0
    assert "error: unit=3 belongs to iidp=FILE: only a search of shares takes it" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "[]", '{"similarity_target": 1' + "0" * 5000 + "}"])
def test_a_configuration_that_cannot_be_read_is_named_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "my.json"
    if content is not None:
        file.write_text(content)
    assert main(["search", f"iidp={file}", "parallel.global_batch_size=512"]) != 0
    assert f"error: iidp={file}: " in capsys.readouterr().err


def test_memory_for_more_workers_than_were_timed(tmp_path: Path) -> None:
    config = quickstart.write(tmp_path)
    change(tmp_path / "mem/64/server-V100/max_memory_profile_info.json", max_num_models=3)
    with pytest.raises(SearchError, match="room for 3 workers, but times reach only 2; measure 3 of them"):
        solved(config, 768, local_batch_size=64)
