"""A double of nvidia-ml-py's module at the border to the driver: the functions that launch/machine/gpus.py calls.

What it tells is a JSON file named by NVML_STATE, read again at each call: `gpus`, each with what NVML tells of it, and
`errors` by function; a GPU's `parts` are its MIG devices. A value that is missing is not supported.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_NO_DATA = 21
NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
NVML_ERROR_UNKNOWN = 999
NVML_TEMPERATURE_GPU = 0
nvmlMemory_v2 = 0x02000028

_TEXTS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}
_Handle = tuple[int, int | None]
"""The index of a GPU, and the slot of a MIG device in it."""


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _TEXTS.get(self.value, f"NVML Error with code {self.value}")


def _state() -> dict[str, Any]:
    state: dict[str, Any] = json.loads(Path(os.environ["NVML_STATE"]).read_text())
    if state.get("hangs"):
        time.sleep(10_000)
    return state


def _told(handle: _Handle, key: str, function: str) -> Any:
    index, slot = handle
    gpu = _state()["gpus"][index]
    if "error" in gpu:
        raise NVMLError(gpu["error"])
    device = gpu if slot is None else gpu["parts"][slot]
    if function in device.get("errors", {}):
        raise NVMLError(device["errors"][function])
    if key not in device:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return device[key]


def nvmlInit() -> None:
    if "init_error" in _state():
        raise NVMLError(_state()["init_error"])


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    if "error" in _state()["gpus"][index]:
        raise NVMLError(_state()["gpus"][index]["error"])
    return index, None


def nvmlDeviceGetUUID(handle: _Handle) -> str:
    return _told(handle, "uuid", "nvmlDeviceGetUUID")


def nvmlDeviceGetName(handle: _Handle) -> str:
    return _told(handle, "name", "nvmlDeviceGetName")


def nvmlDeviceGetMigMode(device: _Handle) -> list[int]:
    return [_told(device, "mig", "nvmlDeviceGetMigMode")] * 2


def nvmlDeviceGetMaxMigDeviceCount(device: _Handle) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(device: _Handle, index: int) -> _Handle:
    if index >= len(_told(device, "parts", "nvmlDeviceGetMigDeviceHandleByIndex")):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return device[0], index


def nvmlDeviceGetUtilizationRates(handle: _Handle) -> SimpleNamespace:
    return SimpleNamespace(gpu=_told(handle, "utilisation", "nvmlDeviceGetUtilizationRates"), memory=1)


def nvmlDeviceGetMemoryInfo(handle: _Handle, version: int | None = None) -> SimpleNamespace:
    used, total = _told(handle, "memory", f"nvmlDeviceGetMemoryInfo{'_v2' if version else ''}")
    return SimpleNamespace(used=used, total=total)


def nvmlDeviceGetPowerUsage(handle: _Handle) -> int:
    return _told(handle, "power", "nvmlDeviceGetPowerUsage")


def nvmlDeviceGetTotalEnergyConsumption(handle: _Handle) -> int:
    return _told(handle, "energy", "nvmlDeviceGetTotalEnergyConsumption")


def nvmlDeviceGetEnforcedPowerLimit(handle: _Handle) -> int:
    return _told(handle, "limit", "nvmlDeviceGetEnforcedPowerLimit")


def nvmlDeviceGetCudaComputeCapability(handle: _Handle) -> list[int]:
    return _told(handle, "capability", "nvmlDeviceGetCudaComputeCapability")


def nvmlDeviceGetNumGpuCores(device: _Handle) -> int:
    return _told(device, "cores", "nvmlDeviceGetNumGpuCores")


def nvmlDeviceGetMaxClockInfo(handle: _Handle, type: int) -> int:
    return _told(handle, "clocks", "nvmlDeviceGetMaxClockInfo")[str(type)]


def nvmlDeviceGetMemoryBusWidth(device: _Handle) -> int:
    return _told(device, "bus", "nvmlDeviceGetMemoryBusWidth")


def nvmlDeviceGetNvLinkState(device: _Handle, link: int) -> int:
    return int(link < _told(device, "nvlinks", "nvmlDeviceGetNvLinkState"))


def nvmlDeviceGetTemperature(handle: _Handle, sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return _told(handle, "temperature", "nvmlDeviceGetTemperature")


def nvmlDeviceGetComputeRunningProcesses_v3(handle: _Handle) -> list[SimpleNamespace]:
    found = _told(handle, "processes", "nvmlDeviceGetComputeRunningProcesses_v3")
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in found]


def nvmlDeviceGetComputeRunningProcesses_v2(handle: _Handle) -> list[SimpleNamespace]:
    found = _told(handle, "processes", "nvmlDeviceGetComputeRunningProcesses_v2")
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in found]


def nvmlDeviceGetCurrentClocksEventReasons(handle: _Handle) -> int:
    return _told(handle, "clock_reasons", "nvmlDeviceGetCurrentClocksEventReasons")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: _Handle) -> int:
    return _told(handle, "clock_reasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


def nvmlDeviceGetPciInfo(handle: _Handle) -> SimpleNamespace:
    return SimpleNamespace(busId=_told(handle, "bus_id", "nvmlDeviceGetPciInfo"))


def nvmlDeviceGetComputeMode(handle: _Handle) -> int:
    return _told(handle, "compute_mode", "nvmlDeviceGetComputeMode")


def nvmlDeviceGetTotalEccErrors(handle: _Handle, errorType: int, counterType: int) -> int:
    assert errorType == 1
    return _told(handle, "uncorrected", "nvmlDeviceGetTotalEccErrors")[counterType]


def nvmlDeviceGetRemappedRows(device: _Handle) -> list[int]:
    return _told(device, "remapped", "nvmlDeviceGetRemappedRows")


def nvmlDeviceGetRetiredPagesPendingStatus(device: _Handle) -> int:
    return _told(device, "pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus")
