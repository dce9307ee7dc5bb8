"""The GPUs of this machine, and which of them a run may use.

They are read through NVML (launch/machine/nvml.py), or else through nvidia-smi (launch/machine/nvidia_smi.py).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from conf.run_folder.gpu_lines import GpuSample
from launch.errors import LaunchError
from launch.machine.nvidia_smi import NvidiaSmi
from launch.machine.nvml import Nvml


class GpuSource(Protocol):
    """Tells of the same GPUs each time, also of one that was lost meanwhile."""

    def read(self) -> tuple[GpuSample, ...]:
        """Every GPU of this machine now; whose processes are on it, is not known here (`ours` is None).

        Raises:
            LaunchError: the driver does not answer as it should.
        """


def open_gpus() -> GpuSource:
    """Whatever tells of this machine's GPUs.

    Raises:
        LaunchError: nothing does, so that there is no GPU which could be used.
    """
    try:
        return Nvml()
    except LaunchError as error:
        nvml = error
    try:
        return NvidiaSmi()
    except LaunchError as error:
        raise LaunchError(
            f"no GPU on {socket.gethostname()}: neither NVML ({nvml}) nor nvidia-smi ({error}) tells of one"
        ) from error


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
