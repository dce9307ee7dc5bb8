"""The GPUs of a machine, also when they do not tell, are divided, or are lost."""

from __future__ import annotations

import inspect
import re
import runpy
import socket
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuProcess, GpuSample
from launch.errors import LaunchError
from launch.machine.gpus import UNTOLD, Gpus, visible
from tests.support.launch.machines import FAKE_NVML, Machine, nvml_gpu, uuid

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
MUTE = GpuSample(index=0, uuid=uuid(0), name="NVIDIA A10", fault="")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_reading_has_all_that_the_driver_tells(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0, processes=[[71, 11449 << 20], [72, None]]), nvml_gpu(1, energy=86_121_903_456))
    processes = (GpuProcess(pid=71, memory_mib=11449, ours=None), GpuProcess(pid=72, memory_mib=None, ours=None))
    assert Gpus().read() == (replace(A10, processes=processes), replace(SECOND, energy_j=86_121_903))


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, "the Python module pynvml is missing; install nvidia-ml-py"),
        ({"init_error": 9}, "Driver Not Loaded (load the kernel module nvidia, or ask your administrator to)"),
        ({"init_error": 12}, "NVML Shared Library Not Found (install NVIDIA's driver, or start the container with it"),
        (
            {"init_error": 18},
            "RM has detected an NVML/RM version mismatch. (the driver was updated while its old kernel module is "
            "loaded; restart the node)",
        ),
        ({"init_error": 999}, "Unknown Error"),
        ({}, "the driver lists none"),
    ],
    ids=["no package", "no driver", "no library", "version mismatch", "unknown", "no device"],
)
def test_a_machine_without_gpu_says_why(machine: Machine, nvml: dict[str, int] | None, reason: str) -> None:
    if nvml is not None:
        machine.nvml(**nvml)
    with pytest.raises(LaunchError, match=f"^{re.escape(f'no GPU on {socket.gethostname()}: {reason}')}"):
        Gpus()


def test_a_machine_whose_only_gpu_is_lost_says_which(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0, error=15))
    with pytest.raises(LaunchError, match=r"GPU 0: GPU is lost$"):
        Gpus()


OLDER, NEWER = "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons"


@pytest.mark.parametrize(
    ("reasons", "clocks", "throttled"),
    [
        (0x0, (), ()),
        (0x1, ("idle",), ()),
        (0x4, ("power cap",), ()),
        (0x48, ("hardware slowdown", "heat (hardware)"), ("heat (hardware)", "hardware slowdown")),
        (0x88, ("hardware slowdown", "power brake"), ("power brake", "hardware slowdown")),
        (0x24, ("power cap", "heat (software)"), ("heat (software)",)),
        (0x112, ("application clocks", "sync boost", "display clocks"), ()),
        (1 << 40, ("reason 0x10000000000",), ()),
    ],
    ids=["none", "idle", "power", "heat", "brake", "software heat", "set by people", "of a later driver"],
)
@pytest.mark.parametrize("missing", [None, NEWER], ids=["newer name", "older name"])
def test_a_reading_says_what_holds_clocks_down(
    machine: Machine, reasons: int, clocks: tuple[str, ...], throttled: tuple[str, ...], missing: str | None
) -> None:
    """Bits from nvml.h of driver 570; before 535 only the older name exists, and answers 13 to the newer."""
    machine.nvml(nvml_gpu(0, clock_reasons=reasons, errors={} if missing is None else {missing: 13}))
    (gpu,) = Gpus().read()
    assert (gpu.clocks, gpu.throttled) == (clocks, throttled)


def test_a_package_without_the_newer_name_asks_by_the_older(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nvml(nvml_gpu(0, clock_reasons=0x40))
    monkeypatch.delattr(sys.modules["pynvml"], NEWER)
    assert Gpus().read()[0].clocks == ("heat (hardware)",)


def test_a_value_of_unknown_error_is_missing_and_the_others_are_there(machine: Machine) -> None:
    """nvidia-smi prints [Unknown Error] in its place."""
    machine.nvml(nvml_gpu(0, errors={"nvmlDeviceGetPowerUsage": 999}))
    assert Gpus().read() == (replace(A10, power_w=None),)


def test_a_gpu_that_answers_everything_with_an_unknown_error_is_at_fault(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0), nvml_gpu(1))
    source = Gpus()
    machine.nvml(nvml_gpu(0, error=999), nvml_gpu(1))
    assert source.read() == (replace(MUTE, fault="Unknown Error"), SECOND)


def test_what_a_gpu_does_not_tell_is_not_zero(machine: Machine) -> None:
    machine.nvml({"uuid": uuid(0), "name": "NVIDIA A10"})
    assert Gpus().read() == (replace(MUTE, fault=None),)


def test_a_driver_without_the_newer_functions_is_asked_with_the_older(machine: Machine) -> None:
    newer = dict.fromkeys(["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"], 13)
    machine.nvml(nvml_gpu(0, processes=[[71, None]], errors=newer))
    assert Gpus().read() == (replace(A10, processes=(GpuProcess(pid=71, memory_mib=None, ours=None),)),)


def test_a_gpu_that_is_lost_keeps_its_place(machine: Machine) -> None:
    machine.nvml(nvml_gpu(0), nvml_gpu(1))
    source = Gpus()
    machine.nvml(nvml_gpu(0, error=15), nvml_gpu(1))
    assert source.read() == (replace(MUTE, fault="GPU is lost"), SECOND)
    machine.nvml(nvml_gpu(0), nvml_gpu(1))
    assert source.read() == (A10, SECOND)


def test_gpus_of_other_jobs_are_not_counted_but_lost_ones_are(machine: Machine) -> None:
    """As CUDA counts in a job that may open only its own: CUDA_VISIBLE_DEVICES=0 is the first of these."""
    machine.nvml(nvml_gpu(0, error=4), nvml_gpu(1), nvml_gpu(2, error=15), nvml_gpu(3))
    assert [(gpu.index, gpu.uuid) for gpu in Gpus().read()] == [(0, uuid(1)), (2, uuid(3))]


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
    whole, first, second, other = Gpus().read()
    assert (whole.uuid, whole.utilisation, other) == (uuid(0), None, SECOND)
    assert [(part.index, part.uuid) for part in (first, second)] == [(0, MIG[0]), (0, MIG[1])]
    assert (first.memory_used_mib, first.power_w, first.utilisation) == (1024, None, None)


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
