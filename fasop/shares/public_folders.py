"""The folders that the profilers of IIDP and JABAS fill: memory limits, steps, buckets, all-reduces; read and written.

Their formats are those of github.com/unist-ssl/IIDP and github.com/unist-ssl/JABAS: a folder for each local batch size,
in it one for each host, in it JSON files; times in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fasop.errors import SearchError
from fasop.shares.json_files import number_in, object_in, shown, text_in, there, whole_in
from fasop.shares.public_servers import PublicServer, configuration, read_servers, server_of

MEMORY_FILE = "max_memory_profile_info.json"
STEP_END, BUCKET_END = "_comp_profile.json", "_bucket_size_profile.json"
ALL_REDUCES = {"intra_comm_profile_data.txt": "within", "inter_comm_profile_data.txt": "between"}
FOLDERS = {
    "memory_profile_dir": "mem_profile_data",
    "comp_profile_dir": "comp_profile_data",
    "bucket_profile_dir": "bucket_profile_data",
    "comm_profile_dir": "comm_profile_data",
}
"""The folder of each key of a configuration."""
TIMES = {"data_time": "data", "fwd_time": "forward", "bwd_time": "backward", "update_time": "update"}
TIMES |= {"copy_time": "copy"}
OPTIONAL_TIMES = {"total_time": "total", "bn_sync_time": "statistics"}
MOST_NAMED = 5
"""Conflicts in a message."""


@dataclass(frozen=True)
class PublicStep:
    """Milliseconds of a step, by the names of `fasop.costs.profiles.steps.StepTimes`."""

    model: str
    gpu: str
    times: Mapping[str, float]


@dataclass(frozen=True)
class PublicLimit:
    """What a GPU's memory has room for."""

    gpu: str
    memory_bytes: int
    most_workers: int


Points = tuple[tuple[float, float], ...]
"""All-reduces: milliseconds at full bandwidth, and as measured."""


@dataclass
class PublicFolders:
    """All that some folders hold."""

    steps: dict[tuple[str, int, str, int], PublicStep] = field(default_factory=dict)
    """Steps by model, local batch size, host and workers."""
    limits: dict[tuple[int, str], PublicLimit] = field(default_factory=dict)
    """Limits by local batch size and host."""
    buckets: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """MiB, by model, in the order of the backward pass."""
    all_reduces: dict[str, Points] = field(default_factory=dict)
    """`within` a server and `between` servers."""
    servers: dict[str, PublicServer] = field(default_factory=dict)
    """Servers by name."""


def read_folders(roots: Sequence[Path]) -> PublicFolders:
    """Everything in and below these folders, together. Raises SearchError: a folder is none or has no profiles, a file
    breaks a rule, or two of them say different things of the same; each is named."""
    found = PublicFolders()
    origin: dict[tuple[object, ...], tuple[Path, Any]] = {}
    conflicts: list[str] = []
    for root in roots:
        if not root.is_dir():
            raise SearchError(f"import={root}: no such folder; give one that profilers of IIDP or JABAS have filled")
        files = 0
        for kind, key, value, file in _every(root):
            files += kind != "servers"
            before = origin.setdefault((kind, key), (file, value))
            if before[1] != value:
                conflicts.append(f"{before[0]} and {file}")
            getattr(found, kind)[key] = value
        if not files:
            raise SearchError(
                f"import={root}: no profile of IIDP or JABAS in it: no {MEMORY_FILE}, *{STEP_END}, "
                f"*{BUCKET_END} or {' or '.join(ALL_REDUCES)}"
            )
    if conflicts:
        more = f" and {len(conflicts) - MOST_NAMED} more" if len(conflicts) > MOST_NAMED else ""
        raise SearchError(
            f"files of the same profile differ: {'; '.join(conflicts[:MOST_NAMED])}{more}; keep one of each"
        )
    return found


def _every(root: Path) -> Iterator[tuple[str, Any, Any, Path]]:
    """The field of `PublicFolders`, the key in it and what is there."""
    for file in sorted(path for path in root.rglob("*") if not path.is_dir()):
        if file.name == MEMORY_FILE:
            yield "limits", (_size(file), file.parent.name), read_limit(file), file
        elif file.name.endswith(STEP_END):
            workers, step = read_step(file, _size(file))
            yield "steps", (step.model, _size(file), file.parent.name, workers), step, file
        elif file.name.endswith(BUCKET_END):
            yield "buckets", *read_buckets(file), file
        elif file.name in ALL_REDUCES:
            yield "all_reduces", ALL_REDUCES[file.name], read_all_reduces(file), file
        elif file.suffix == ".json":
            for name, server in read_servers(file).items():
                yield "servers", name, server, file


def _size(file: Path) -> int:
    return size_of(file.parent.parent)


def size_of(folder: Path) -> int:
    """The local batch size that names a folder."""
    if not (folder.name.isascii() and folder.name.isdecimal() and int(folder.name) > 0):
        raise SearchError(f"{folder}: must be named after a local batch size, as in {folder.parent / '32'}")
    return int(folder.name)


def read_limit(file: Path) -> PublicLimit:
    content = object_in(file)
    return PublicLimit(
        gpu=_gpu(file, content),
        memory_bytes=whole_in(file, "total_memory", there(file, content, "total_memory")),
        most_workers=whole_in(file, "max_num_models", there(file, content, "max_num_models")),
    )


def read_step(file: Path, size: int) -> tuple[int, PublicStep]:
    """The number of workers, and what they take."""
    content = object_in(file)
    if (given := whole_in(file, "lbs", there(file, content, "lbs"))) != size:
        raise SearchError(f"{file}: lbs={given} must be {size}, the name of its folder")
    times = {name: number_in(file, key, there(file, content, key)) for key, name in TIMES.items()}
    times |= {name: number_in(file, key, content[key]) for key, name in OPTIONAL_TIMES.items() if key in content}
    if times["forward"] + times["backward"] <= 0:
        raise SearchError(f"{file}: fwd_time and bwd_time are both 0; measure it again")
    step = PublicStep(_model(file, there(file, content, "model")), _gpu(file, content), times)
    return whole_in(file, "num_models", there(file, content, "num_models")), step


def read_buckets(file: Path) -> tuple[str, tuple[float, ...]]:
    """The model and its sizes."""
    content = object_in(file)
    sizes = there(file, content, "bucket_size_distribution")
    if not (isinstance(sizes, list) and sizes):
        raise SearchError(f"{file}: bucket_size_distribution={shown(sizes)} must be a list of sizes in MiB")
    model = _model(file, content.get("model", file.name.removesuffix(BUCKET_END)))
    return model, tuple(number_in(file, "bucket_size_distribution", size, above=0) for size in sizes)


def _gpu(file: Path, content: Mapping[str, Any]) -> str:
    name = str(there(file, content, "gpu_type"))
    if not (name and name.isprintable()):
        raise SearchError(f"{file}: gpu_type={shown(name)!r} must be the name of a GPU")
    return name


def _model(file: Path, name: object) -> str:
    """Part of a file's name, too."""
    if not (isinstance(name, str) and name and "/" not in name and name.isprintable()):
        raise SearchError(f"{file}: model={shown(name)} must be the name of a model, without '/'")
    return name


def read_all_reduces(file: Path) -> Points:
    points = []
    for number, line in enumerate(text_in(file).splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split(",")
        if len(parts) != 2:
            raise SearchError(f"{file}, line {number}: must be theoretical,measured in ms, not {shown(line)}")
        ideal, taken = (number_in(file, f"line {number}", part.strip()) for part in parts)
        points.append((ideal, taken))
    if len({ideal for ideal, _ in points}) < 2:
        raise SearchError(f"{file}: needs at least two lines with different theoretical times to fit a line")
    return tuple(points)


def files_of(public: PublicFolders, root: Path) -> dict[Path, str]:
    """The content of every file, as the public profilers write it."""
    memory, computed, buckets, reduced = (root / name for name in FOLDERS.values())
    found: dict[Path, str] = {}
    for (size, host), limit in public.limits.items():
        found[memory / str(size) / host / MEMORY_FILE] = json.dumps(
            {
                "gpu_type": limit.gpu,
                "total_memory": limit.memory_bytes,
                "lbs": size,
                "max_num_models": limit.most_workers,
            }
        )
    for (model, size, host, workers), step in public.steps.items():
        named = {**TIMES, **OPTIONAL_TIMES}
        times = {key: step.times[name] for key, name in named.items() if name in step.times}
        content = {"model": model, "gpu_type": step.gpu, "lbs": size, "num_models": workers, **times}
        found[computed / str(size) / host / f"{host}_{model}_{size}_{workers}{STEP_END}"] = json.dumps(content)
    for model, sizes in public.buckets.items():
        content = {"model": model, "bucket_size_distribution": [*sizes]}
        found[buckets / f"{model}{BUCKET_END}"] = json.dumps(content)
    for name, where in ALL_REDUCES.items():
        if where in public.all_reduces:
            lines = [f"{ideal!r},{taken!r}\n" for ideal, taken in public.all_reduces[where]]
            found[reduced / name] = "".join(lines)
    if lacking(public) is None:
        servers = {host: server for host, gpu in _hosts(public).items() if (server := _server(public, host, gpu))}
        found |= configuration(root, FOLDERS, servers)
    return found


def lacking(public: PublicFolders) -> str | None:
    """What the public solver needs and nobody measured or wrote, in words; None if it has all."""
    hosts = _hosts(public)
    measured = {(size, host) for _, size, host, _ in public.steps}
    if only := measured ^ public.limits.keys():
        size, host = min(only)
        what = "memory limit" if (size, host) in measured else "steps"
        return f"there are no {what} of host {host} with micro-batches of {size}"
    if not public.buckets:
        return "the gradient buckets were not measured"
    for host, gpu in hosts.items():
        if server_of(public.servers, host, gpu) is None:
            return f"the number of GPUs of host {host} is not known"
        if _server(public, host, gpu) is None:
            return f"the bandwidth of host {host} is not known"
    where = "within" if len(hosts) == 1 else "between"
    if where not in public.all_reduces:
        return f"all-reduces {where} {'a node' if where == 'within' else 'nodes'} were not measured"
    return None


def _hosts(public: PublicFolders) -> dict[str, str]:
    """Those with steps, and their GPUs."""
    return {host: step.gpu for (_, _, host, _), step in public.steps.items()}


def _server(public: PublicFolders, host: str, gpu: str) -> PublicServer | None:
    """With both bandwidths; where one alone is known, as of one GPU a node, it stands for the other."""
    server = server_of(public.servers, host, gpu)
    if server is None or (known := server.between or server.within) is None:
        return None
    return replace(server, within=server.within or known, between=server.between or known)
