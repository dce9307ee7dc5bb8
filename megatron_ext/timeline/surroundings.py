"""What a node of a run is made of: machine, kernel, driver, GPUs and the versions of all packages, where the ranks run
(in a container those inside it)."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Dict, List, Optional

import torch

from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan

GPU_S = 1.5
"""A driver that answers later is not waited for."""
OF_A_GPU = (
    *("name", "uuid", "driver_version", "vbios_version", "ecc.mode.current", "clocks.max.sm", "clocks.max.memory"),
    *("clocks.applications.graphics", "power.limit", "persistence_mode", "mig.mode.current"),
)
"""What nvidia-smi is asked for."""


def note_surroundings(plan: Plan, node_rank: int) -> Thread:
    """Writes `nodes/<node>.machine.json`, beside the ranks' start, which waits for nothing of it."""
    path = plan.files.node_machine(plan.nodes[node_rank].name)
    thread = Thread(target=_write, args=(path, plan.device == "cuda"), daemon=True)
    thread.start()
    return thread


def _write(path: Path, has_gpus: bool) -> None:
    with suppress(OSError):  # the disk is full: that ends no run
        write_json(path, surroundings(has_gpus))


def surroundings(has_gpus: bool) -> Dict[str, Any]:
    """Looks at this machine. What cannot be known is null."""
    gpus = _gpus() if has_gpus else []
    return {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": _nccl() if has_gpus else None,
        "driver": gpus[0]["driver_version"] if gpus else None,
        "gpus": gpus,
        "packages": packages(sys.path),
    }


def packages(folders: List[str]) -> Dict[str, str]:
    """The installed packages and their versions, by the names of their folders: to read their files takes a second."""
    found: Dict[str, str] = {}
    for folder in folders:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                match = re.fullmatch(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info", entry.name)
                if match:
                    found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    return dict(sorted(found.items()))


def _cpu() -> Optional[str]:
    with suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else platform.machine()
    return None


def _memory_gib() -> Optional[float]:
    with suppress(OSError, ValueError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def _nccl() -> Optional[str]:
    with suppress(Exception):  # this torch may have none
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return None


def _gpus() -> List[Dict[str, str]]:
    """All GPUs that the driver shows, as nvidia-smi prints them; none where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(OF_A_GPU)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=GPU_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.decode(errors="replace").splitlines()]
    return [dict(zip(OF_A_GPU, row)) for row in rows if len(row) == len(OF_A_GPU)]
