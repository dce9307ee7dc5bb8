"""What the nodes of a run say: where they run something else than was submitted, and their stderr besides warnings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from conf.run_folder.gpu_lines import GpuReading, GpuSample, entries
from conf.run_folder.judgement import LineGroup
from conf.run_folder.run_files import read_part
from conf.run_folder.rundir import RunDir
from launch.files.run_files import Faults
from launch.node.worker_command import job_info
from launch.observe.look import GPU_TAIL_BYTES
from launch.observe.observation import SeenNode
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


def mismatches(run: RunDir, plan: Plan, nodes: Sequence[SeenNode], faults: Faults) -> list[str]:
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


_WARNING = re.compile(r"\b\w*Warning\b|\bWARNING\b|^\s*warnings\.warn\(|^W\d{4} |^(\[rank\d+\]:)?\[W\d{3}")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
_DIGITS = b"0123456789"
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")
_END_OF_STEP = re.compile(
    r"^srun: (error: \S+: tasks? \S+: |forcing job termination|Job step aborted)|^slurmstepd\S*: error: "
    r"(\*\*\* STEP |spank: required plugin |Failed to invoke spank plugin stack)"
)
"""How Slurm reports that the step in which pyxis runs a worker has ended; why, it says before."""
_SYMPTOM = re.compile(
    r"[Cc]onnection (reset|closed|refused)|[Bb]roken pipe|remote process exit|[Ww]atchdog|communicator was aborted|"
    r"SignalException|SIGTERM"
)
"""How gloo, NCCL and torchrun say that another process went first."""


def grouped_lines(
    stderr: Mapping[str, bytes], causes: Sequence[str] = (), symptoms: Sequence[str] = ()
) -> list[LineGroup]:
    """Groups the lines of each node's stderr. `causes` and `symptoms` are what ranks reported of their ends, by time.

    First come lines that name a cause, last those of ranks that only lost another one; otherwise they are in the order
    of their first appearance, in that of the nodes: let the one that failed first be the first. Left out are warnings,
    the source line Python shows under one, and the indented part of a traceback.
    """
    return sorted(_grouped(stderr, _telling), key=lambda group: _order(group.text, causes, symptoms))


def last_words(text: str) -> str | None:
    """The last line of stderr that says more than that a step of Slurm has ended, or the last one of those."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not _END_OF_STEP.search(line)]
    return next(reversed(telling or lines), None)


def warnings(stderr: Mapping[str, bytes]) -> list[LineGroup]:
    """The warnings in each node's stderr, like ones together, the most frequent first."""
    return sorted(_grouped(stderr, _warning), key=lambda group: -group.count)


def _grouped(stderr: Mapping[str, bytes], chosen: Callable[[bytes], str | None]) -> list[LineGroup]:
    """Lines that differ only in numbers together, in the order of their first appearance; `chosen` gives a line's text,
    or None for one to leave out."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    nodes: dict[str, dict[str, None]] = {}
    for node, content in stderr.items():
        for line, count in _alike(content):
            if (text := chosen(line)) is not None:
                key = _CHANGING.sub("#", text)
                first.setdefault(key, text)
                counts[key] += count
                nodes.setdefault(key, {})[node] = None
    return [LineGroup(first[key], counts[key], tuple(nodes[key])) for key in first]


def _alike(content: bytes) -> list[tuple[bytes, int]]:
    """Counts lines that differ only in digits under the first of them: megabytes of them take milliseconds."""
    lines = content.translate(_LINE_ENDS).split(b"\n")
    shapes = content.translate(_LINE_ENDS, _DIGITS).split(b"\n")
    first = dict(zip(reversed(shapes), reversed(lines), strict=True))
    return [(first[shape], count) for shape, count in Counter(shapes).items()]


def _telling(line: bytes) -> str | None:
    """A line without the blanks around it; None for one to leave out."""
    text = line.decode(errors="replace")
    if not text.strip() or text[0].isspace() or _WARNING.search(text) or "Traceback (most" in text:
        return None
    return text.strip()


def _warning(line: bytes) -> str | None:
    """A warning without the blanks around it, None for any other line; Python's source line under one says nothing."""
    text = line.decode(errors="replace").strip()
    return text if _WARNING.search(text) and not text.startswith("warnings.warn(") else None


def _order(text: str, causes: Sequence[str], symptoms: Sequence[str]) -> tuple[int, int]:
    for number, cause in enumerate(causes):
        if cause and cause in text:
            return 0, number
    if _SYMPTOM.search(text) or _END_OF_STEP.search(text) or any(symptom and symptom in text for symptom in symptoms):
        return 2, 0
    return 1, 0
