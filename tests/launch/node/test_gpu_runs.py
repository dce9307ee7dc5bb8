"""Real runs whose GPUs are doubles: the agent samples them while the ranks run, and is not held up by them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuReading, GpuTrouble, entries
from conf.run_folder.rundir import RunDir
from launch.control.stop import stop
from launch.judge.state import State
from launch.judge.verdict import decide, judge
from launch.machine import processes
from launch.observe.look import observe
from tests.support.launch import live
from tests.support.launch.live import FOREVER, ranks, token, wait_for, wait_until_running
from tests.support.launch.machines import Machine, nvml_gpu

ON_GPUS = ("+gpu@cluster.gpus.a10=a10", "cluster.groups.local.gpu=a10", "profile.gpu_interval_s=1")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def over(run: RunDir) -> bool:
    return observe(run).over


def test_the_gpus_of_a_run_are_sampled_until_it_ends(machine: Machine, runs: Path) -> None:
    machine.nvml(*(nvml_gpu(index) for index in range(4)))
    run = live.start(runs, *ON_GPUS, *FOREVER)
    wait_until_running(run)
    pids = ranks(run)
    machine.nvml(*(nvml_gpu(rank, processes=[[pid, 11 << 30]]) for rank, pid in pids.items()))
    wait_for(lambda: "GPUs of local-0: 4 of 4 busy, 93 % mean, fullest 11.2/22.5 GiB" in judge(run).evidence)
    last = entries(run.node_gpu("local-0").read_text())[-1]
    assert isinstance(last, GpuReading)
    assert [[(p.pid, p.ours) for p in gpu.processes or ()] for gpu in last.gpus] == [
        [(pids[r], True)] for r in range(4)
    ]
    stop(run)
    assert processes.find(token(run)) == set()
    text = run.node_gpu("local-0").read_text()
    assert text.endswith("\n")
    time.sleep(1.5)
    assert run.node_gpu("local-0").read_text() == text


def test_a_driver_that_hangs_does_not_hold_a_run_up(machine: Machine, runs: Path) -> None:
    machine.nvml(hangs=True)
    begun = time.monotonic()
    run = live.start(runs, *ON_GPUS)
    wait_for(lambda: over(run))
    assert judge(run).state == State.succeeded
    wait_for(lambda: processes.find(token(run)) == set())
    assert time.monotonic() - begun < 150
    assert not run.node_gpu("local-0").exists()


def test_a_stop_does_not_wait_for_a_driver_that_hangs(machine: Machine, runs: Path) -> None:
    machine.nvml(hangs=True)
    run = live.start(runs, *ON_GPUS, *FOREVER)
    wait_until_running(run)
    begun = time.monotonic()
    stop(run)
    assert time.monotonic() - begun < 50
    assert processes.find(token(run)) == set()


def test_no_gpu_is_said_plainly_and_ends_nothing(machine: Machine, runs: Path) -> None:
    run = live.start(runs, *ON_GPUS, "+cluster.environment.ITERATION_S=0.5")
    wait_for(lambda: over(run))
    (trouble,) = entries(run.node_gpu("local-0").read_text())
    assert isinstance(trouble, GpuTrouble)
    assert trouble.text.startswith("no GPU on ")
    assert judge(run).state == State.succeeded
    assert run.node_err("local-0").read_text() == ""


@pytest.mark.parametrize("overrides", [(), (*ON_GPUS, "profile.gpu_interval_s=0")], ids=["on CPUs", "switched off"])
def test_no_gpu_is_sampled(machine: Machine, runs: Path, overrides: tuple[str, ...]) -> None:
    machine.nvml(nvml_gpu(0))
    run = live.start(runs, *overrides)
    wait_for(lambda: over(run))
    assert not run.node_gpu("local-0").exists()
    assert decide(observe(run)).state == State.succeeded
