"""nodes/<node>.gpu grows with readings while a node's ranks run, and nobody waits for the driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuEntry, GpuProcess, GpuReading, GpuTrouble, entries, entry_text, read_energy
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.machine import gpu_sampler, processes
from launch.machine.gpu_sampler import append, gpu_sampling, sample
from launch.machine.gpus import Gpus
from megatron_ext.contract.worker import TOKEN
from tests.support.launch.live import ROOT, wait_for
from tests.support.launch.machines import FAKE_NVML, Machine, nvml_gpu, uuid

HOST = socket.gethostname()
READING = entries(
    "2026-11-21T12:00:00+00:00 n0: 1 GPU, reading 1, every 10 s\n[0] A | 1'C, 2 % | 3 / 4 MB | 5 / 6 W | - | GPU-0\n"
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the ranks are given. After the test no process of the run lives, or the test has failed."""
    token = f"token-{os.getpid()}-{tmp_path.name}"
    yield {TOKEN: token}
    left = processes.wait_until_gone(token, 30)
    processes.kill(token)
    assert not left


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.nodes.mkdir(parents=True)
    return run


def told(run: RunDir) -> tuple[GpuEntry, ...]:
    path = run.node_gpu("a-0")
    return entries(path.read_text()) if path.exists() else ()


def test_a_machine_without_gpu_says_so_once(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    with gpu_sampling(run, "a-0", 1, environment):
        wait_for(lambda: told(run))
        time.sleep(1.5)
    (trouble,) = told(run)
    assert isinstance(trouble, GpuTrouble)
    assert trouble.text.startswith(f"no GPU on {HOST}: ")
    assert run.node_err("a-0").read_text() == ""


def test_readings_tell_whose_processes_are_on_the_gpus(
    machine: Machine, run: RunDir, environment: dict[str, str]
) -> None:
    ours = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | environment)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pids = [ours.pid, os.getpid(), gone.pid]
    machine.nvml(nvml_gpu(0, processes=[[pid, 1 << 20] for pid in pids]), nvml_gpu(1))
    with gpu_sampling(run, "a-0", 1, environment):
        wait_for(lambda: len(told(run)) >= 2)
    ours.communicate(b"\n")
    first, second = told(run)[:2]
    assert isinstance(first, GpuReading)
    assert isinstance(second, GpuReading)
    assert (first.host, first.number, first.interval_s, second.number) == (HOST, 1, 1, 2)
    assert [gpu.uuid for gpu in first.gpus] == [uuid(0), uuid(1)]
    assert first.gpus[0].processes == tuple(
        GpuProcess(pid=pid, memory_mib=1, ours=mine) for pid, mine in zip(pids, [True, False, None], strict=True)
    )


def test_only_the_gpus_of_the_run_are_read(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    machine.nvml(nvml_gpu(0), nvml_gpu(1), nvml_gpu(2))
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the agent's own, which its ranks do not inherit
    with gpu_sampling(run, "a-0", 1, environment | {"CUDA_VISIBLE_DEVICES": "2,1,9"}):
        wait_for(lambda: len(told(run)) >= 2)
    trouble, reading = told(run)[:2]
    assert isinstance(trouble, GpuTrouble)
    assert trouble.text == f"CUDA_VISIBLE_DEVICES=2,1,9 on {HOST}: 9 is not a GPU of this node"
    assert isinstance(reading, GpuReading)
    assert [gpu.index for gpu in reading.gpus] == [2, 1]


def test_what_gpus_take_is_summed_over_all_starts_and_outlives_the_readings(
    machine: Machine, run: RunDir, environment: dict[str, str]
) -> None:
    machine.nvml(nvml_gpu(0, power=360_000, energy=5_000_000))
    run.node_energy("a-0").write_text("cut o")
    for _ in range(2):
        before = len(told(run))
        with gpu_sampling(run, "a-0", 1, environment):
            wait_for(lambda before=before: len(told(run)) >= before + 3)
        kept = run.node_energy("a-0").read_text()
        run.node_gpu("a-0").replace(run.node_gpu("a-0").with_name("a-0.gpu.1"))
        assert run.node_energy("a-0").read_text() == kept
    one, other = read_energy(run.node_energy("a-0"))
    for energy in (one, other):
        assert (energy.uuid, energy.place) == (uuid(0), 0)
        assert energy.kwh == pytest.approx(energy.hours * 0.36)
        assert energy.hours * 3600 >= 3
        assert (energy.counted_kwh, energy.beside_kwh) == (0, pytest.approx(energy.kwh - 0.36 / 3600))
    assert one.end_unix <= other.begin_unix


def test_hidden_gpus_are_told_and_not_read(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    machine.nvml(nvml_gpu(0))
    with gpu_sampling(run, "a-0", 1, environment | {"CUDA_VISIBLE_DEVICES": ""}):
        wait_for(lambda: told(run))
    assert [entry.text for entry in told(run) if isinstance(entry, GpuTrouble)] == [
        f"CUDA_VISIBLE_DEVICES= on {HOST}: it hides every GPU"
    ]


def test_gpus_that_are_lost_and_come_back_are_told(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    def faults() -> list[str | None]:
        reading = told(run)[-1]
        assert isinstance(reading, GpuReading)
        return [gpu.fault for gpu in reading.gpus]

    machine.nvml(nvml_gpu(0), nvml_gpu(1))
    with gpu_sampling(run, "a-0", 1, environment):
        wait_for(lambda: told(run))
        machine.nvml(nvml_gpu(0), nvml_gpu(1, error=15))
        wait_for(lambda: faults() == [None, "GPU is lost"])
        machine.nvml(nvml_gpu(0, error=9), nvml_gpu(1, error=9))
        wait_for(lambda: faults() == ["Driver Not Loaded"] * 2)
        machine.nvml(nvml_gpu(0), nvml_gpu(1))
        wait_for(lambda: faults() == [None, None])
    assert run.node_err("a-0").read_text() == ""


def test_a_fault_is_written_once_before_the_reading_that_showed_it(
    machine: Machine, run: RunDir, environment: dict[str, str]
) -> None:
    machine.nvml(nvml_gpu(0), nvml_gpu(1, uncorrected=[0, 0]))
    with gpu_sampling(run, "a-0", 1, environment | {"CUDA_VISIBLE_DEVICES": "1"}):
        wait_for(lambda: told(run))
        machine.nvml(nvml_gpu(0, compute_mode=2), nvml_gpu(1, uncorrected=[3, 3]))
        wait_for(lambda: any(isinstance(entry, GpuTrouble) for entry in told(run)))
        before = len(told(run))
        wait_for(lambda: len(told(run)) > before + 1)
    (trouble,) = (entry for entry in told(run) if isinstance(entry, GpuTrouble))
    assert trouble.text.startswith("GPU 1 (NVIDIA A10): 3 uncorrected ECC errors since its driver was loaded")


def test_nobody_waits_for_a_driver_that_hangs(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    machine.nvml(hangs=True)
    begun = time.monotonic()
    with gpu_sampling(run, "a-0", 1, environment):
        assert time.monotonic() - begun < 30
        wait_for(lambda: len(processes.find(environment[TOKEN])) == 1)
        time.sleep(0.5)
        ended = time.monotonic()
    assert time.monotonic() - ended < 30
    assert told(run) == ()


def test_a_driver_that_never_answered_is_told(machine: Machine, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> Gpus:
        wait_for(lambda: told(run))
        raise LaunchError("no GPU after all")

    monkeypatch.setattr(gpu_sampler, "LATE_S", 0.1)
    monkeypatch.setattr(gpu_sampler, "Gpus", slow)
    sample(run, "a-0", 1, None, "token")
    assert [entry.text for entry in told(run) if isinstance(entry, GpuTrouble)] == [
        f"{HOST}: the GPU driver has not answered for 0.1 s",
        "no GPU after all",
    ]


def test_it_ends_with_its_parent_however_that_ends(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    machine.nvml(hangs=True)
    code = (
        "import sys, time; from pathlib import Path; from conf.run_folder.rundir import RunDir\n"
        "from launch.machine.gpu_sampler import gpu_sampling\n"
        f"with gpu_sampling(RunDir(Path({str(run.path)!r})), 'a-0', 1, {environment!r}):\n    time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": f"{FAKE_NVML}:{ROOT}"})
    wait_for(lambda: len(processes.find(environment[TOKEN])) == 1)
    parent.kill()
    parent.wait()
    assert processes.wait_until_gone(environment[TOKEN], 3) == set()


def test_the_announcement_of_a_time_limit_does_not_end_it(
    machine: Machine, run: RunDir, environment: dict[str, str]
) -> None:
    machine.nvml(nvml_gpu(0))
    with gpu_sampling(run, "a-0", 1, environment):
        wait_for(lambda: processes.find(environment[TOKEN]))
        processes.send(processes.find(environment[TOKEN]), signal.SIGUSR2)
        wait_for(lambda: len(told(run)) >= 2)


def test_it_goes_on_when_the_disk_is_full(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    machine.nvml(nvml_gpu(0))
    run.node_gpu("a-0").symlink_to("/dev/full")
    with gpu_sampling(run, "a-0", 1, environment):
        time.sleep(1.5)
        run.node_gpu("a-0").unlink()
        wait_for(lambda: told(run))
    reading = told(run)[0]
    assert isinstance(reading, GpuReading)
    assert reading.number > 1


def test_every_0_seconds_is_not_at_all(machine: Machine, run: RunDir, environment: dict[str, str]) -> None:
    with gpu_sampling(run, "a-0", 0, environment):
        assert processes.find(environment[TOKEN]) == set()
    assert list(run.nodes.iterdir()) == []


def test_an_entry_begins_a_line_whatever_was_left_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a.gpu"
    path.write_text("2026-11-21T12:0")
    append(path, READING[0])
    append(path, READING[0])
    assert path.read_text() == "2026-11-21T12:0\n" + 2 * entry_text(READING[0])


def test_a_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gpu"
    size = len(entry_text(READING[0]))
    monkeypatch.setattr(gpu_sampler, "MAX_BYTES", 10 * size)
    for _ in range(50):
        append(path, READING[0])
    assert {file.name for file in tmp_path.iterdir()} == {"a.gpu", "a.gpu.1"}
    assert path.with_name("a.gpu.1").stat().st_size == 11 * size
    assert len(entries(path.read_text())) == 50 % 11
