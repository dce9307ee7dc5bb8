"""How much memory a rank takes, and whether the kernel killed for want of it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Dict

import torch

from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place

MIB = 2.0**20
VMSTAT = Path("/proc/vmstat")


def report(plan: Plan, place: Place, iteration: int) -> None:
    """Prints a line as Megatron does and rewrites memory/rank-*.json."""
    used = measure(plan.device)
    shown = " | ".join(f"{name.replace('_', ' ')}: {size}" for name, size in used.items())
    print(f"[Rank {place.rank}] (after {iteration} iterations) memory (MB) | {shown}", flush=True)
    path = plan.files.rank_memory(place.rank)
    path.parent.mkdir(exist_ok=True)
    content = {"rank": place.rank, "stage": place.stage, "iteration": iteration, "mib": used}
    write_json(path, content)


def measure(device: str) -> Dict[str, float]:
    """MiB by kind: of the GPU's allocator, or what the process had resident on a CPU."""
    if device == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated() / MIB,
            "max_allocated": torch.cuda.max_memory_allocated() / MIB,
            "reserved": torch.cuda.memory_reserved() / MIB,
            "max_reserved": torch.cuda.max_memory_reserved() / MIB,
        }
    return {"max_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def kernel_kills() -> int:
    """How many processes of this machine, or of its container, the kernel has killed because memory ran out."""
    counts = dict(line.split() for line in VMSTAT.read_text(encoding="ascii").splitlines())
    return int(counts.get("oom_kill", 0))  # not before Linux 4.13
