"""The GPUs of this machine, read through NVML, and which of them a run may use.

NVML is the driver's own library; nvidia-ml-py, of pure Python, calls it in this process. The command nvidia-smi prints
what NVML gives it, but starts two processes for a reading (values, processes), 7 ms of CPU time where these do nothing
at all, and knows neither memory nor processes of the parts of a divided GPU (MIG), which
CUDA_VISIBLE_DEVICES may name.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from conf.errors import reworded
from conf.run_folder.gpu_lines import (
    HARDWARE_HEAT,
    HARDWARE_SLOWDOWN,
    POWER_BRAKE,
    POWER_CAP,
    SOFTWARE_HEAT,
    GpuProcess,
    GpuSample,
)
from launch.errors import LaunchError

UNTOLD = (
    "INVALID_ARGUMENT",  # of a MIG device, for what only its GPU has
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "INSUFFICIENT_SIZE",  # more processes came while they were listed
    "FUNCTION_NOT_FOUND",  # of an older driver
    "NO_DATA",
    "ARGUMENT_VERSION_MISMATCH",
)
"""NVML's errors that are no faults of a GPU: it only does not give that value."""


UNKNOWN = "UNKNOWN"
"""NVML's error of a value that it cannot tell, which nvidia-smi prints as [Unknown Error]; where it cannot tell any,
the GPU is at fault."""
CLOCKS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: POWER_CAP,
    0x8: HARDWARE_SLOWDOWN,
    0x10: "sync boost",
    0x20: SOFTWARE_HEAT,
    0x40: HARDWARE_HEAT,
    0x80: POWER_BRAKE,
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
"""Reasons for clocks below their highest, by their bits in nvml.h (nvmlClocksEventReason…, before driver 535
nvmlClocksThrottleReason…). Application clocks are those that somebody has set (`nvidia-smi -ac`)."""
_ADVICE = {
    "DRIVER_NOT_LOADED": "load the kernel module nvidia, or ask your administrator to",
    "LIBRARY_NOT_FOUND": "install NVIDIA's driver, or start the container with it (libnvidia-ml.so.1)",
    "LIB_RM_VERSION_MISMATCH": "the driver was updated while its old kernel module is loaded; restart the node",
    "NO_PERMISSION": "this user may not open /dev/nvidia*; ask for GPUs in the job (gres), or ask your administrator",
}
"""What to do where NVML cannot begin, by its errors."""
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
"""NVML's numbers of kinds of ECC errors: since the driver was loaded, and ever."""

NVLINKS = 18
"""The links of a GPU, at most."""
_SM, _MEMORY = 1, 2
"""NVML's numbers of clocks."""


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """What the driver knows of a GPU, from which its peak rates follow; None for what it does not give."""

    name: str
    memory_mib: int | None = None
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, such as 8, 6."""
    cores: int | None = None
    """For fp32."""
    clock_mhz: int | None = None
    """The highest of the cores."""
    memory_clock_mhz: int | None = None
    memory_bus_bits: int | None = None
    nvlinks: int = 0
    """That are connected."""


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """What the driver knows of a GPU's faults and of who may use it; None for what it does not give."""

    index: int
    name: str
    bus: str | None = None
    """Its place on PCI, such as 3B:00.0 of 0000:3B:00.0."""
    compute_mode: int | None = None
    divided: bool = False
    """Into MIG devices, or ready for them."""
    parts: int = 0
    """MIG devices."""
    uncorrected: int | None = None
    """ECC errors since the driver was loaded."""
    uncorrected_ever: int | None = None
    remap_pending: bool = False
    """Rows of its memory, or pages, are replaced once it is reset."""
    remap_failed: bool = False
    """No spare rows are left."""
    fault: str | None = None
    """Why it cannot be used at all, in the driver's words."""


@dataclass(frozen=True, kw_only=True)
class _Device:
    handle: Any
    index: int
    uuid: str
    name: str


class Gpus:
    """Every GPU of this machine, and where a GPU is divided (MIG) its parts too.

    A call may take long, or never return, when the driver is sick; nothing of Python can be done about that.
    """

    def __init__(self) -> None:
        """Raises LaunchError: there is no GPU which could be used."""
        nowhere = f"no GPU on {socket.gethostname()}: "
        try:
            self._lib: Any = import_module("pynvml")
        except ImportError as error:
            raise LaunchError(f"{nowhere}the Python module pynvml is missing; install nvidia-ml-py") from error
        self._untold = {getattr(self._lib, f"NVML_ERROR_{name}") for name in (*UNTOLD, UNKNOWN)}
        self._unusable: dict[int, str] = {}
        try:
            self._lib.nvmlInit()
            self._devices = tuple(self._find())
        except self._lib.NVMLError as error:
            advice = {getattr(self._lib, f"NVML_ERROR_{name}"): text for name, text in _ADVICE.items()}
            way_out = f" ({advice[error.value]})" if error.value in advice else ""
            raise LaunchError(f"{nowhere}{error}{way_out}") from error
        if not self._devices:
            lost = "; ".join(f"GPU {index}: {fault}" for index, fault in self._unusable.items())
            raise LaunchError(f"{nowhere}{lost or 'the driver lists none'}")

    def read(self) -> tuple[GpuSample, ...]:
        """The same GPUs each time, also one that was lost meanwhile; whose processes are on them is not known here."""
        return tuple(self._sample(device) for device in self._devices)

    def health(self) -> tuple[GpuHealth, ...]:
        """Returns the health of every whole GPU, also of one that could not be opened."""
        lost = [GpuHealth(index=index, name="", fault=fault) for index, fault in self._unusable.items()]
        whole = (device for device in self._devices if not device.uuid.startswith("MIG-"))
        return (*map(self._health, whole), *lost)

    def _health(self, device: _Device) -> GpuHealth:
        lib, handle = self._lib, device.handle
        try:
            place = self._ask(lib.nvmlDeviceGetPciInfo, handle)
            modes = self._ask(lib.nvmlDeviceGetMigMode, handle)
            remapped = self._ask(lib.nvmlDeviceGetRemappedRows, handle)
            pages = self._ask(lib.nvmlDeviceGetRetiredPagesPendingStatus, handle)
            return GpuHealth(
                index=device.index,
                name=device.name,
                bus=None if place is None else place.busId,
                compute_mode=self._ask(lib.nvmlDeviceGetComputeMode, handle),
                divided=bool(modes and modes[0]),
                parts=sum(one.index == device.index and one.uuid.startswith("MIG-") for one in self._devices),
                uncorrected=self._ask(lib.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _VOLATILE),
                uncorrected_ever=self._ask(lib.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _AGGREGATE),
                remap_pending=bool(pages or (remapped and remapped[2])),
                remap_failed=bool(remapped and remapped[3]),
            )
        except lib.NVMLError as error:
            return GpuHealth(index=device.index, name=device.name, fault=str(error))

    def figures(self) -> tuple[GpuFigures, ...]:
        """Returns the figures of every GPU that a rank may have for itself: of divided ones (MIG) the parts."""
        divided = {device.index for device in self._devices if device.uuid.startswith("MIG-")}
        alone = (device for device in self._devices if device.index not in divided or device.uuid.startswith("MIG-"))
        return tuple(self._figures(device) for device in alone)

    def _figures(self, device: _Device) -> GpuFigures:
        lib, handle = self._lib, device.handle
        with reworded(LaunchError, f"GPU {device.index} ({device.name}) on {socket.gethostname()}: ", of=lib.NVMLError):
            memory = self._memory(handle)
            capability = self._ask(lib.nvmlDeviceGetCudaComputeCapability, handle)
            return GpuFigures(
                name=device.name,
                memory_mib=None if memory is None else memory.total >> 20,
                capability=None if capability is None else (capability[0], capability[1]),
                cores=self._ask(lib.nvmlDeviceGetNumGpuCores, handle),
                clock_mhz=self._ask(lib.nvmlDeviceGetMaxClockInfo, handle, _SM),
                memory_clock_mhz=self._ask(lib.nvmlDeviceGetMaxClockInfo, handle, _MEMORY),
                memory_bus_bits=self._ask(lib.nvmlDeviceGetMemoryBusWidth, handle),
                nvlinks=sum(1 for link in range(NVLINKS) if self._ask(lib.nvmlDeviceGetNvLinkState, handle, link)),
            )

    def _find(self) -> Iterator[_Device]:
        """What cannot be reached now is left out: nobody can use it."""
        index = 0
        for place in range(self._lib.nvmlDeviceGetCount()):
            try:
                gpu = self._lib.nvmlDeviceGetHandleByIndex(place)
                yield self._device(gpu, index)
                for part in self._parts(gpu):
                    yield self._device(part, index)
            except self._lib.NVMLError as error:
                if error.value == self._lib.NVML_ERROR_NO_PERMISSION:  # another job's, which CUDA does not count here
                    continue
                self._unusable[index] = str(error)
            index += 1

    def _device(self, handle: Any, index: int) -> _Device:
        uuid, name = self._lib.nvmlDeviceGetUUID(handle), self._lib.nvmlDeviceGetName(handle)
        return _Device(handle=handle, index=index, uuid=uuid, name=name)

    def _parts(self, gpu: Any) -> Iterator[Any]:
        """The MIG devices of a GPU; most GPUs cannot have any."""
        try:
            current, _ = self._lib.nvmlDeviceGetMigMode(gpu)
        except self._lib.NVMLError:
            return
        for slot in range(self._lib.nvmlDeviceGetMaxMigDeviceCount(gpu) if current else 0):
            try:
                yield self._lib.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
            except self._lib.NVMLError:  # an empty slot
                continue

    def _sample(self, device: _Device) -> GpuSample:
        lib, handle = self._lib, device.handle
        try:
            utilisation = self._ask(lib.nvmlDeviceGetUtilizationRates, handle)
            memory = self._memory(handle)
            power = self._ask(lib.nvmlDeviceGetPowerUsage, handle)
            limit = self._ask(lib.nvmlDeviceGetEnforcedPowerLimit, handle)
            energy = self._ask(lib.nvmlDeviceGetTotalEnergyConsumption, handle)  # millijoules, from Volta on
            temperature = self._ask(lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU)
            processes, clocks = self._processes(handle), self._clocks(handle)
            if all(value is None for value in (utilisation, memory, power, temperature, processes, clocks)):
                lib.nvmlDeviceGetUUID(handle)  # of a GPU that tells nothing: whether it is lost
        except lib.NVMLError as error:
            return GpuSample(index=device.index, uuid=device.uuid, name=device.name, fault=str(error))
        return GpuSample(
            index=device.index,
            uuid=device.uuid,
            name=device.name,
            utilisation=None if utilisation is None else utilisation.gpu,
            memory_used_mib=None if memory is None else memory.used >> 20,
            memory_total_mib=None if memory is None else memory.total >> 20,
            power_w=_watts(power),
            power_limit_w=_watts(limit),
            temperature_c=temperature,
            processes=processes,
            clocks=clocks,
            energy_j=None if energy is None else energy // 1000,
        )

    def _clocks(self, handle: Any) -> tuple[str, ...] | None:
        """Both names of the function ask for the same bits: drivers before 535, and early packages, have the second."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            function = getattr(self._lib, name, None)
            bits = None if function is None else self._ask(function, handle)
            if bits is not None:
                set_ = [1 << place for place in range(64) if bits >> place & 1]
                return tuple(CLOCKS.get(bit, f"reason {bit:#x}") for bit in set_)
        return None

    def _memory(self, handle: Any) -> Any:
        """Leaves out what the driver keeps for itself, as nvidia-smi does; drivers before 510 count that as used."""
        memory = self._ask(self._lib.nvmlDeviceGetMemoryInfo, handle, self._lib.nvmlMemory_v2)
        return self._ask(self._lib.nvmlDeviceGetMemoryInfo, handle) if memory is None else memory

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Drivers before 510 have the second version of this function only."""
        found = self._ask(self._lib.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if found is None:
            found = self._ask(self._lib.nvmlDeviceGetComputeRunningProcesses_v2, handle)
        if found is None:
            return None
        sizes = ((process.pid, process.usedGpuMemory) for process in found)
        return tuple(
            GpuProcess(pid=pid, memory_mib=None if size is None else size >> 20, ours=None) for pid, size in sizes
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers, or None if this GPU does not give it."""
        try:
            return function(*arguments)
        except self._lib.NVMLError as error:
            if error.value in self._untold:
                return None
            raise


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def visible(gpus: Sequence[GpuSample], wanted: str | None) -> tuple[tuple[GpuSample, ...], str | None]:
    """What CUDA_VISIBLE_DEVICES leaves of a machine's GPUs, in its order, and its first word that fits none.

    As CUDA reads it: numbers, or UUIDs, whole or begun, of GPUs and of MIG devices; what follows a word that fits
    none is not seen; None, when it is not set, is every GPU. Numbers count as nvidia-smi does, which is CUDA's order
    too where CUDA_DEVICE_ORDER=PCI_BUS_ID, and anyway on nodes whose GPUs are all alike.
    """
    whole = [gpu for gpu in gpus if not gpu.uuid.startswith("MIG-")]
    if wanted is None:
        return tuple(whole), None
    found: list[GpuSample] = []
    for word in (part.strip() for part in wanted.split(",") if part.strip()):
        if word.isdecimal():
            fitting = [gpu for gpu in whole if gpu.index == int(word)]
        else:
            fitting = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        if len(fitting) != 1:
            return tuple(found), word
        found += fitting
    return tuple(found), None
