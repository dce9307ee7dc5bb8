"""The GPUs of a machine, by NVML and by nvidia-smi, also when they do not tell, are divided, or are lost."""

from __future__ import annotations

import inspect
import runpy
import socket
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuProcess, GpuSample
from launch.errors import LaunchError
from launch.machine.gpus import open_gpus, visible
from launch.machine.nvidia_smi import GPU_FIELDS, NvidiaSmi
from launch.machine.nvml import UNTOLD, Nvml
from tests.support import ROOT
from tests.support.launch.machines import FAKE_NVML, Machine, nvml_gpu, smi_gpu, uuid

A10 = GpuSample(
    index=0,
    uuid=uuid(0),
    name="NVIDIA A10",
    utilisation=93,
    memory_used_mib=11468,
    memory_total_mib=23028,
    power_w=148,
    power_limit_w=150,
    temperature_c=61,
    processes=(),
)
SECOND = replace(A10, index=1, uuid=uuid(1))
MUTE = GpuSample.lost(index=0, uuid=uuid(0), name="NVIDIA A10", fault="")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_both_ways_tell_the_same(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0, processes=[[71, 11449 << 20], [72, None]]), nvml_gpu(1))
    machine.nvidia_smi(smi_gpu(0), smi_gpu(1), apps=[(uuid(0), 71, 11449), (uuid(0), 72, "[N/A]")])
    processes = (GpuProcess(pid=71, memory_mib=11449, ours=None), GpuProcess(pid=72, memory_mib=None, ours=None))
    assert Nvml().read() == NvidiaSmi().read() == (replace(A10, processes=processes), SECOND)


def test_nvml_is_preferred(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0))
    machine.nvidia_smi(smi_gpu(0, name="NVIDIA A100"))
    assert open_gpus().read() == (A10,)


@pytest.mark.parametrize("nvml", ["absent", "without driver", "without GPUs"])
def test_nvidia_smi_steps_in(machine: Machine, nvml: str) -> None:
    if nvml != "absent":
        machine.nvml(no_driver=nvml == "without driver")
    machine.nvidia_smi(smi_gpu(0))
    assert open_gpus().read() == (A10,)


@pytest.mark.parametrize(
    ("smi", "told"),
    [
        (None, "nvidia-smi (it is not on PATH)"),
        (
            {"no_driver": True},
            "nvidia-smi (NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. ",
        ),
        ({}, "nvidia-smi (No devices were found)"),
    ],
    ids=["no nvidia-smi", "no driver", "no device"],
)
def test_a_machine_without_gpu_says_so_with_the_reasons(
    machine: Machine, smi: dict[str, bool] | None, told: str
) -> None:
    if smi is not None:
        machine.nvidia_smi(**smi)
    with pytest.raises(LaunchError) as raised:
        open_gpus()
    before = f"no GPU on {socket.gethostname()}: neither NVML (Python has no module pynvml; it is in the package"
    assert str(raised.value).startswith(before)
    assert told in str(raised.value)


def test_an_nvidia_smi_that_cannot_be_run_is_told(machine: Machine) -> None:
    (machine.folder / "bin" / "nvidia-smi").touch(mode=0o644)
    with pytest.raises(LaunchError, match="it cannot be started: Permission denied"):
        NvidiaSmi()


def test_the_drivers_own_reason_is_told(machine: Machine) -> None:
    machine.nvml(no_driver=True)
    with pytest.raises(LaunchError, match=r"neither NVML \(Driver Not Loaded\) nor nvidia-smi"):
        open_gpus()


def test_what_nvidia_smi_does_not_tell_is_not_zero(machine: Machine) -> None:
    texts = ["[N/A]", "[Not Supported]", "[Insufficient Permissions]", "[Unknown Error]", "[N/A]", "[N/A]"]
    machine.nvidia_smi(smi_gpu(0, **dict(zip(GPU_FIELDS[3:], texts, strict=True))))
    assert NvidiaSmi().read() == (replace(MUTE, processes=(), fault=None),)


def test_what_nvml_does_not_tell_is_not_zero(machine: Machine) -> None:
    machine.nvml({"uuid": uuid(0), "name": "NVIDIA A10"})
    assert Nvml().read() == (replace(MUTE, fault=None),)


def test_a_driver_without_the_newer_functions_is_asked_with_the_older(machine: Machine) -> None:
    newer = dict.fromkeys(["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"], 13)
    machine.nvml(nvml_gpu(0, processes=[[71, None]], errors=newer))
    assert Nvml().read() == (replace(A10, processes=(GpuProcess(pid=71, memory_mib=None, ours=None),)),)


def test_a_word_where_a_number_belongs_is_told(machine: Machine) -> None:
    machine.nvidia_smi(smi_gpu(0, **{"power.draw": "plenty"}))
    with pytest.raises(LaunchError, match="it said 'plenty' where a number belongs"):
        NvidiaSmi()


def test_a_gpu_that_is_lost_keeps_its_place_by_nvml(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0), nvml_gpu(1))
    source = Nvml()
    machine.nvml(nvml_gpu(0, error=15), nvml_gpu(1))
    assert source.read() == (replace(MUTE, fault="GPU is lost"), SECOND)
    machine.nvml(nvml_gpu(0), nvml_gpu(1))
    assert source.read() == (A10, SECOND)


def test_gpus_of_other_jobs_are_not_counted_but_lost_ones_are(machine: Machine) -> None:
    """As CUDA counts in a job that may open only its own: CUDA_VISIBLE_DEVICES=0 is the first of these."""
    machine.nvml(nvml_gpu(0, error=4), nvml_gpu(1), nvml_gpu(2, error=15), nvml_gpu(3))
    assert [(gpu.index, gpu.uuid) for gpu in Nvml().read()] == [(0, uuid(1)), (2, uuid(3))]


GONE = "Unable to determine the device handle for GPU0: 0000:5F:00.0: Unknown Error"


@pytest.mark.parametrize("exit_code", [0, 15])
def test_a_gpu_that_nvidia_smi_lists_no_more_keeps_its_place(machine: Machine, exit_code: int) -> None:
    machine.nvidia_smi(smi_gpu(0), smi_gpu(1))
    source = NvidiaSmi()
    machine.nvidia_smi(smi_gpu(1), complaint=GONE, exit_code=exit_code)
    lost, other = source.read()
    assert (lost.index, lost.uuid, lost.utilisation) == (0, uuid(0), None)
    assert lost.fault is not None
    assert GONE in lost.fault
    assert replace(other, processes=()) == SECOND


def test_a_gpu_that_nvidia_smi_calls_lost_keeps_its_place(machine: Machine) -> None:
    machine.nvidia_smi(smi_gpu(0), smi_gpu(1))
    source = NvidiaSmi()
    machine.nvidia_smi(dict.fromkeys(GPU_FIELDS, "[GPU is lost]") | {"index": 0}, smi_gpu(1))
    assert source.read() == (replace(MUTE, fault="GPU is lost"), SECOND)


def test_a_driver_that_goes_away_is_an_error(machine: Machine) -> None:
    machine.nvidia_smi(smi_gpu(0))
    source = NvidiaSmi()
    machine.nvidia_smi(no_driver=True)
    with pytest.raises(LaunchError, match="couldn't communicate with the NVIDIA driver"):
        source.read()


MIG = ["MIG-aaaa-1", "MIG-bbbb-2"]
PART = {"name": "NVIDIA A100 MIG 3g.20gb", "memory": [1 << 30, 20 << 30], "processes": [[71, None]]}
UNASKED = dict.fromkeys(
    ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit"], 2
)


def divided() -> dict[str, object]:
    whole = nvml_gpu(0, mig=1, parts=[PART | {"uuid": part, "errors": UNASKED} for part in MIG])
    del whole["utilisation"]
    return whole


def test_the_parts_of_a_divided_gpu_tell_what_they_can(machine: Machine) -> None:
    machine.nvml(divided(), nvml_gpu(1))
    whole, first, second, other = Nvml().read()
    assert (whole.uuid, whole.utilisation, other) == (uuid(0), None, SECOND)
    assert [(part.index, part.uuid) for part in (first, second)] == [(0, MIG[0]), (0, MIG[1])]
    assert (first.memory_used_mib, first.power_w, first.utilisation) == (1024, None, None)


def test_nvidia_smi_tells_of_the_whole_of_a_divided_gpu_but_not_who_is_on_it(machine: Machine) -> None:
    machine.nvidia_smi(smi_gpu(0, **{"utilization.gpu": "[N/A]"}), apps=[(MIG[0], 71, "[N/A]")])
    assert NvidiaSmi().read() == (replace(A10, utilisation=None, processes=None),)


GPUS = (A10, replace(A10, uuid=MIG[0]), replace(A10, uuid=MIG[1]), SECOND, replace(A10, index=2, uuid=uuid(2)))


@pytest.mark.parametrize(
    ("wanted", "seen", "unmatched"),
    [
        (None, [uuid(0), uuid(1), uuid(2)], None),
        ("0,1,2", [uuid(0), uuid(1), uuid(2)], None),
        ("2, 0", [uuid(2), uuid(0)], None),
        (uuid(1), [uuid(1)], None),
        (f"{uuid(2)},{uuid(1)[:12]}", [uuid(2), uuid(1)], None),
        (",".join(reversed(MIG)), [MIG[1], MIG[0]], None),
        ("", [], None),
        ("-1", [], "-1"),
        ("NoDevFiles", [], "NoDevFiles"),
        ("1,7,0", [uuid(1)], "7"),
        ("GPU-", [], "GPU-"),
        ("MIG-cccc", [], "MIG-cccc"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_cuda_visible_devices_is_read_as_cuda_does(wanted: str | None, seen: list[str], unmatched: str | None) -> None:
    found, first_unmatched = visible(GPUS, wanted)
    assert [gpu.uuid for gpu in found] == seen
    assert first_unmatched == unmatched


def test_the_double_of_nvidia_smi_is_strict(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.nvidia_smi(smi_gpu(0))
    double = runpy.run_path(str(ROOT / "tests" / "support" / "launch" / "fake_nvidia_smi.py"))["main"]
    assert double(["--query-gpu=index,gpu_name_", "--format=csv"]) == 2
    assert 'Field "gpu_name_" is not a valid field to query.' in capsys.readouterr().out
    assert double(["--query-gpu=index", "--format=json"]) == 2
    capsys.readouterr()
    assert double(["--query-gpu=index,memory.used,power.draw", "--format=csv"]) == 0
    assert capsys.readouterr().out == "index, memory.used [MiB], power.draw [W]\n0, 11468 MiB, 147.61 W\n"


def test_the_double_of_nvml_has_what_the_real_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        metadata.version("nvidia-ml-py")
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-ml-py is not installed")
    import pynvml as real

    fake = runpy.run_path(str(FAKE_NVML / "pynvml.py"))
    for name, value in fake.items():
        if name.startswith("nvmlDevice"):
            assert list(inspect.signature(value).parameters) == list(inspect.signature(getattr(real, name)).parameters)
        elif name.startswith(("NVML_", "nvmlMemory")):
            assert value == getattr(real, name), name
    assert all(hasattr(real, f"NVML_ERROR_{name}") for name in UNTOLD)
    assert str(real.NVMLError(15)) == str(fake["NVMLError"](15))
    assert "pynvml" in sys.modules
