"""`tdpp launch pipedream=FILE`, a configuration of PipeDream's driver, and `export=DIR` of a search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import compose
from conf.pipedream import placement
from conf.run_folder.rundir import RunDir
from fasop.graphs.graph_text import graph_text, read_graph
from launch import cli
from launch.commands.data import main as data
from launch.commands.launch import main
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support.pipedream import write_driver, write_package
from tests.support.profiled_graphs import chain


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Of a VGG of three convolutions: two on the first stage, which has two replicas."""
    write_package(tmp_path / "models" / "vgg16" / "gpus=3", ("33", "3LLL"))
    content = {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1], "1": [2]}}
    (tmp_path / "conf.json").write_text(json.dumps(content))
    machines = ["localhost:0", "localhost:1", "localhost:2"]
    values = {"module": "models.vgg16.gpus=3", "config_file": "conf.json", "batch_size": 8, "print_frequency": 2}
    return write_driver(tmp_path / "driver_configs" / "small.yml", machines=machines, **values)


def test_a_dry_run_does_not_wait_for_data_that_are_still_to_be_made(
    driver: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(driver.parent)
    assert main([f"pipedream={driver}", "model=vgg-tiny", "dry_run=true"]) == 0
    shown, said = capsys.readouterr()
    assert "partition 2-4, micro-batch 8, global batch 16, 3 ranks on 1 node" in shown
    assert "docker run" in shown and "nvcr.io/nvidia/pytorch:19.05-py3" in shown
    assert "(prepare its data (/mnt/data/imagenet/) with tdpp data images --output data/imagenet)" in said
    assert "data/imagenet.json: cannot be read" in said and "train.epochs=60: shown with" in said
    assert not [*driver.parent.glob("**/*.npy")]


@pytest.mark.slow
def test_it_is_trained_as_it_is(driver: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert data(["images", "--source", "digits", "--output", "data/imagenet"]) == 0
    here = ("cluster=local", "container=none", "model=vgg-tiny")
    assert main([f"pipedream={driver}", *here, "train.iterations=6"]) == 0
    run = RunDir.find(driver.parent / "runs", "small")
    assert judge(run).state is State.succeeded
    plan = run.read_plan()
    assert (plan.partition, plan.replicas, plan.schedule, plan.train.optimizer) == ([2, 4], [2, 1], "pipedream", "sgd")


@pytest.mark.slow
def test_a_division_of_a_model_is_exported_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "images", "--source", "digits", "--output", "data/digits"]) == 0
    given = ["model=vgg-tiny", "data=digits", "parallel.micro_batch_size=2"]
    assert cli.main(["profile", *given[:2], "micro_batches=2", "seconds=0.02", "profile=vgg.yaml"]) == 0
    machine = ["cluster.groups.local.gpus_per_node=4", "parallel.global_batch_size=8", "profile=vgg.yaml"]
    words = [*given, *machine, "parallel.schedule=pipedream", "straight=true"]
    capsys.readouterr()
    assert cli.main(["search", *words, "plan=stages.yaml", "export=exported"]) == 0
    package = Path("exported/models/vgg_tiny/gpus=4")
    said = capsys.readouterr()
    assert f"{package}: stages and ranks" in said.out
    plan = compose([*given, "parallel=stages.yaml", "cluster.groups.local.gpus_per_node=4"])
    files = sorted(file.name for file in package.iterdir())
    count = len(plan.partition.layers)
    wanted = ["__init__.py", "dp_conf.json", "gpus=4.txt", "hybrid_conf.json", "mp_conf.json"]
    assert files == sorted([*wanted, *(f"stage{number}.py" for number in range(count))])
    here = ["cluster=local", "data=digits"]
    made = compose(["pipedream=exported/driver_configs/vgg_tiny_4pipedream.yml", *here])
    assert (made.model.name, made.partition, made.parallel.micro_batch_size) == ("vgg-tiny", plan.partition, 2)
    assert made.parallel.layout == plan.parallel.layout
    made = compose(["pipedream=exported/driver_configs/vgg_tiny_4dp.yml", *here])
    assert (made.parallel.data, made.parallel.pipeline, str(made.executor.kind)) == (4, 1, "local")
    assert {node.stage for node in read_graph(package / "gpus=4.txt").nodes} == set(range(count))
    assert cli.main(["search", *words, "export=exported"]) == 1
    assert "gpus=4 already exists; choose another folder, or delete it" in capsys.readouterr().err


def test_a_division_of_a_graph_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vgg16" / "graph.txt"
    file.parent.mkdir()
    file.write_text(graph_text(chain()))
    words = [f"graph={file}", "levels=4,2", "bandwidths=2e9,1e9", f"export={tmp_path / 'out'}"]
    assert cli.main(["search", *words]) == 0
    assert "no stage modules: PipeDream makes them from gpus=8.txt" in capsys.readouterr().err
    package = tmp_path / "out" / "models" / "vgg16" / "gpus=8"
    hybrid = placement.read(package / "hybrid_conf.json", "file")
    assert sum(hybrid.replicas) == 8
    assert placement.read(package / "dp_conf.json", "file").ranks == (tuple(range(8)),)
    assert placement.read(package / "mp_conf.json", "file").replicas == (1,) * len(hybrid.ranks)
    made = compose([f"pipedream={tmp_path / 'out' / 'driver_configs' / 'vgg16_8pipedream.yml'}"])
    assert made.parallel.layout.replicas == hybrid.replicas
    assert [(host.name, host.ranks) for host in made.executor.reached] == [("host0", 4), ("host1", 4)]
