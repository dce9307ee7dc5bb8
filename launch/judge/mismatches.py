"""Where nodes run something else than was submitted, or on other GPUs: what they say is held against the plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conf.run_folder.gpu_lines import GpuReading, GpuSample, entries
from conf.run_folder.run_files import read_part
from conf.run_folder.rundir import RunDir
from launch.files.run_files import Faults
from launch.node.worker_command import job_info
from launch.observe.look import GPU_TAIL_BYTES
from launch.observe.observation import Node
from launch.screen import some
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import NODE_RANK

_HEAD_BYTES = 64 * 1024
"""How much of a start's part of nodes/<node>.out is read: a container may print before the job's own lines."""
_MEMORY = re.compile(r"(\d+)GB$", re.IGNORECASE)
_MEMORY_TOLERANCE = 0.1
"""Between the GB in a GPU's name and what its driver reports."""
_NAMED = 3
"""So many nodes are named; of more, their number is given."""


def mismatches(run: RunDir, plan: Plan, nodes: Sequence[Node], faults: Faults) -> list[str]:
    """A sentence for each difference between a node and the plan, nodes that differ alike together."""
    found: dict[str, list[str]] = {}
    rank_of = {name: rank for rank, name in enumerate(plan.node_names)}
    for node in nodes:
        rank = rank_of[node.name]
        for difference in (
            *other_job(plan, rank, _head(run.node_out(node.name), node.out_begin, faults)),
            *(_other_gpus(run, plan, rank, faults) if plan.device == "cuda" else ()),
        ):
            found.setdefault(difference, []).append(node.name)
    return [f"{_names(names)}: {difference}" for difference, names in found.items()]


def other_job(plan: Plan, node_rank: int, log: str) -> Iterator[str]:
    """How the job's lines at the beginning of a node's log differ from the plan; nothing while there are none."""
    printed = _job_lines(log)
    if not printed:
        return
    submitted = _job_lines(job_info(plan, printed.get("MODEL", ""), node_rank))  # the plan does not name its model
    for key, value in submitted.items():
        if printed.get(key) != value:
            yield f"printed {key} {printed.get(key, 'not at all')}, but {value} was submitted"


def _job_lines(text: str) -> dict[str, str]:
    """The first block of `launch.node.worker_command.job_info` in a text; empty without one."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(": ")
        if pairs and not (colon and key.isupper()):
            break
        if pairs or key == NODE_RANK:
            pairs[key] = value
    return pairs


def _other_gpus(run: RunDir, plan: Plan, node_rank: int, faults: Faults) -> Iterator[str]:
    node = plan.nodes[node_rank]
    end = faults.tail(run.node_gpu(node.name), GPU_TAIL_BYTES).decode(errors="replace")
    readings = [entry for entry in entries(end, 1) if isinstance(entry, GpuReading)]
    if readings:
        yield from other_gpus(node.gpu, readings[-1].gpus[: len(node.ranks)])


def other_gpus(planned: str, gpus: Iterable[GpuSample]) -> Iterator[str]:
    """Names of GPUs that are not the planned kind, such as `A10` or `A100-40GB` (conf/gpu)."""
    for name in dict.fromkeys(gpu.name for gpu in gpus if not is_a(planned, gpu)):
        yield f"has the GPU {name}, but {planned} was planned"


def is_a(planned: str, gpu: GpuSample) -> bool:
    """Whether the words of the planned name are in the driver's, such as RTX3090 in `NVIDIA GeForce RTX 3090`.

    Memory is compared as the driver reports it: not every name has it.
    """
    memory = _MEMORY.search(planned)
    kind = "".join(_words(planned[: memory.start()] if memory else planned))
    words = _words(gpu.name)
    joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    if kind not in joined:
        return False
    if memory is None or gpu.memory_total_mib is None:
        return True
    return abs(gpu.memory_total_mib / 1024 / int(memory[1]) - 1) <= _MEMORY_TOLERANCE


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _head(path: Path, begin: int, faults: Faults) -> str:
    try:
        return faults.tried(lambda: read_part(path, begin, _HEAD_BYTES).decode(errors="replace"), "")
    except FileNotFoundError:
        return ""


def _names(nodes: Sequence[str]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {some(nodes, _NAMED)}"
