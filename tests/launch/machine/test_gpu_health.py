"""Faults of GPUs, by what NVML and the kernel's log say of them: each names the GPU and the way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuProcess, GpuSample
from launch.machine.gpu_sampler import KernelLog, faults
from launch.machine.gpus import Gpus
from tests.support.launch.machines import Machine, nvml_gpu, uuid

FINE = {"bus_id": "00000000:3B:00.0", "compute_mode": 0, "uncorrected": [0, 0], "remapped": [0, 0, 0, 0], "mig": 0}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def found(*xids: tuple[str, int], others: bool = False, log_readable: bool = True) -> list[str]:
    source = Gpus()
    process = GpuProcess(pid=7, memory_mib=300, ours=False)
    sample = GpuSample(index=0, uuid=uuid(0), name="", fault="")
    samples = [GpuSample(**{**vars(sample), "processes": (process,)})] if others else []
    return faults(source.health(), samples, xids, log_readable=log_readable)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ()),
        ({"compute_mode": 2}, ("prohibited compute mode", "nvidia-smi -i 0 -c 0, as root")),
        ({"mig": 1, "parts": []}, ("MIG mode but has no MIG device", "nvidia-smi -i 0 -mig 0")),
        ({"uncorrected": [2, 5]}, ("2 uncorrected ECC errors since its driver was loaded, 5 in its life", "reset it")),
        ({"uncorrected": [0, 5]}, ()),
        ({"remapped": [1, 1, 1, 0]}, ("rows of its memory wait to be replaced", "nvidia-smi --gpu-reset -i 0")),
        ({"remapped": [1, 9, 0, 1]}, ("no spare memory rows left", "have it replaced")),
        ({"pages_pending": 1}, ("rows of its memory wait to be replaced",)),
    ],
    ids=["fine", "prohibited", "empty MIG", "ECC", "ECC of before", "remap pending", "remap failed", "pages"],
)
def test_a_fault_says_what_it_is_and_what_to_do(
    machine: Machine, told: dict[str, object], said: tuple[str, ...]
) -> None:
    """Values as NVML of driver 550 gives them by its documentation (nvml.h), not recorded."""
    machine.nvml(nvml_gpu(0, **(FINE | told)), nvml_gpu(1, **FINE))
    sentences = found()
    assert len(sentences) == (1 if said else 0)
    for sentence in sentences:
        assert sentence.startswith("GPU 0 (NVIDIA A10): ")
        assert all(words in sentence for words in said)


def test_what_a_gpu_does_not_give_is_no_fault(machine: Machine) -> None:
    """A GeForce has no ECC; nvidia-smi prints [N/A] or [Not Supported]."""
    machine.nvml(nvml_gpu(0))
    assert found() == []


def test_exclusive_mode_is_a_fault_where_another_process_is_on_the_gpu(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0, **(FINE | {"compute_mode": 3})))
    assert found() == []
    (sentence,) = found(others=True)
    assert "exclusive compute mode" in sentence
    assert "nvidia-smi -i 0 -c 0, as root" in sentence


def test_a_gpu_that_cannot_be_opened_is_named_with_its_number(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0, **FINE), nvml_gpu(1, error=15), nvml_gpu(2, **FINE))
    (sentence,) = found(log_readable=False)
    assert sentence.startswith("GPU 1: it cannot be used: GPU is lost; reset it (nvidia-smi --gpu-reset -i 1, as root)")
    assert sentence.endswith("which this user may not read, says why (sudo dmesg)")


# In the form that the kernel's module writes (NVIDIA's Xid guide, drivers 450 to 570); not recorded.
LOG = """\
4,1201,99120311,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,1202,99120312,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
6,1203,99120400,-;NVRM: Xid (PCI:0000:d8:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault
6,1204,99120500,-;NVRM: Xid (PCI:0000:af:00): 94, Contained: CE User Channel
6,1205,99120600,-;usb 1-1: new high-speed USB device
"""


def test_xids_of_the_hardware_are_said_once_of_their_gpu(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(LOG)
    log = KernelLog(tmp_path / "kmsg")
    xids = log.xids()
    assert xids == [("0000:3b:00", 79)] * 2 + [("0000:d8:00", 31), ("0000:af:00", 94)]
    assert log.readable
    machine.nvml(nvml_gpu(0, **FINE), nvml_gpu(1, **(FINE | {"bus_id": "00000000:D8:00.0"})))
    (sentence,) = found(*xids)
    assert sentence.startswith("GPU 0 (NVIDIA A10): the kernel's log has Xid 79: it has fallen off the bus; reset it")
    with (tmp_path / "kmsg").open("a") as file:
        file.write("4,1206,9,-;NVRM: Xid (PCI:0000:D8:00): 48, pid=1, DBE\n")
    assert log.xids() == [("0000:D8:00", 48)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_a_kernel_log_that_this_user_may_not_read_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch(mode=0)
    log = KernelLog(path)
    assert (log.xids(), log.readable) == ([], False)


def test_a_machine_without_kernel_log_is_no_error(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none")
    assert (log.xids(), log.readable) == ([], False)
