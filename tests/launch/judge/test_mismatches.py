"""Nodes that run something else than was submitted, or on other GPUs, are named; others are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuReading, GpuSample, entry_text
from conf.run_folder.rundir import RunDir
from launch.files.run_files import Faults
from launch.judge.findings import findings
from launch.judge.node_reports import is_a, mismatches
from launch.judge.status_text import as_json, as_text
from launch.node.worker_command import job_info
from launch.observe.look import observe
from tests.launch.judge.test_gpu_health import WORK
from tests.support.launch.run_folders import NOW, Case

NODES = ("local-0", "local-1")


def made(path: Path, gpu: str = "CPU") -> RunDir:
    """A run of two nodes that do as they were told."""
    run = Case(last=20).make(path / "run")
    plan = run.read_json(run.plan)
    nodes = [node | {"gpu": gpu} for node in plan["nodes"]]
    plan |= {"nodes": nodes, "device": "cpu" if gpu == "CPU" else "cuda"}
    run.write_json(run.plan, plan)
    for rank, node in enumerate(NODES):
        run.node_out(node).write_text(
            "a container's greeting\n" + job_info(run.read_plan(), "tiny", rank) + "training\n"
        )
    return run


def told(run: RunDir) -> list[str]:
    seen = observe(run, NOW)
    return mismatches(run, seen.plan, seen.nodes, Faults())


def test_a_run_that_is_as_submitted_has_none(tmp_path: Path) -> None:
    assert told(made(tmp_path)) == []


def test_a_node_that_has_told_nothing_yet_has_none(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.node_out("local-0").unlink()
    run.node_out("local-1").write_text("a container's greeting\n")
    assert told(run) == []


def test_a_node_that_says_something_else_is_named_with_both(tmp_path: Path) -> None:
    run = made(tmp_path)
    text = run.node_out("local-1").read_text()
    run.node_out("local-1").write_text(text.replace("PARTITION: 1-3", "PARTITION: 2-2"))
    assert told(run) == ["node local-1: printed PARTITION 2-2, but 1-3 was submitted"]


def test_nodes_that_differ_alike_share_a_line(tmp_path: Path) -> None:
    run = made(tmp_path)
    for node in NODES:
        lines = run.node_out(node).read_text().splitlines(keepends=True)
        run.node_out(node).write_text("".join(line for line in lines if "WORLD_SIZE" not in line))
    assert told(run) == ["nodes local-0, local-1: printed WORLD_SIZE not at all, but 4 was submitted"]


def test_only_what_the_newest_start_says_counts(tmp_path: Path) -> None:
    run = made(tmp_path)
    now = run.node_out("local-0").read_text()
    before = now.replace("GLOBAL_BATCH_SIZE: ", "GLOBAL_BATCH_SIZE: 9")
    run.node_out("local-0").write_text(before + now)
    assert len(told(run)) == 1
    state = run.read_json(run.node_state("local-0"))
    run.write_json(run.node_state("local-0"), state | {"out_begin": len(before)})
    assert told(run) == []


def with_gpus(path: Path, planned: str, *names: str) -> RunDir:
    run = made(path, planned)
    gpus = tuple(replace(WORK, index=index, name=name) for index, name in enumerate(names))
    for node in NODES:
        reading = GpuReading(unix=int(NOW), host="there", number=1, interval_s=10, gpus=gpus)
        run.node_gpu(node).write_text(entry_text(reading))
    return run


def test_gpus_of_another_kind_than_planned_are_told(tmp_path: Path) -> None:
    run = with_gpus(tmp_path, "A10", "NVIDIA A10", "NVIDIA A100-SXM4-40GB")
    assert told(run) == ["nodes local-0, local-1: has the GPU NVIDIA A100-SXM4-40GB, but A10 was planned"]
    found = findings(run, observe(run, NOW))
    line = "mismatch: nodes local-0, local-1: has the GPU NVIDIA A100-SXM4-40GB, but A10 was planned"
    assert f"\n  {line}" in as_text(found)
    assert as_json(found)["mismatches"] == [line.removeprefix("mismatch: ")]


def test_gpus_that_the_plan_does_not_use_may_be_any(tmp_path: Path) -> None:
    assert told(with_gpus(tmp_path, "A10", "NVIDIA A10", "NVIDIA A10", "NVIDIA T4")) == []


@pytest.mark.parametrize(
    ("planned", "name", "gib", "is_one"),
    [
        ("A10", "NVIDIA A10", 22.5, True),
        ("A10", "NVIDIA A100-SXM4-40GB", 40, False),
        ("A100-40GB", "NVIDIA A10", 22.5, False),
        ("A100-40GB", "NVIDIA A100-PCIE-40GB", 39.6, True),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB", 80, False),
        ("A100-80GB", "NVIDIA A100 80GB PCIe", 80, True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5, False),
        ("H100-80GB", "NVIDIA H100 PCIe", 79.6, True),
        ("H100-80GB", "NVIDIA H100 PCIe", None, True),
        ("RTX3090", "NVIDIA GeForce RTX 3090", 24, True),
        ("RTX3090", "NVIDIA GeForce RTX 3090 Ti", 24, True),
        ("V100", "Tesla V100-SXM2-16GB", 16, True),
    ],
)
def test_a_planned_gpu_is_told_by_the_drivers_name(planned: str, name: str, gib: float | None, is_one: bool) -> None:
    total = None if gib is None else round(gib * 1024)
    sample: GpuSample = replace(WORK, name=name, memory_total_mib=total)
    assert is_a(planned, sample) is is_one
