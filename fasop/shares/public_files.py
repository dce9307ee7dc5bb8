"""The files of IIDP and JABAS: configuration, cluster, profiles; read once, into typed values.

Their formats are those of github.com/unist-ssl/IIDP and github.com/unist-ssl/JABAS. A server's profile is that of any
server with such GPUs: times belong to GPUs, not to host names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasop.errors import SearchError
from fasop.shares.adaptive_keys import INTERVAL, LOWER, OF_JABAS, RATE
from fasop.shares.json_files import number_in, object_in, shown, there, whole_in
from fasop.shares.public_folders import MEMORY_FILE, read_all_reduces, read_buckets, read_limit, read_step, size_of

FILES = ("memory_profile_dir", "comp_profile_dir", "comm_profile_dir", "bucket_profile_dir", "gpu_cluster_info")
NEEDED = (*FILES, "available_servers")
OPTIONAL = (RATE, INTERVAL, "resource_alloc_unit", "homo_servers", "enable_adjust", "metric")


@dataclass(frozen=True)
class Step:
    """A training step of some virtual workers on one GPU, on average, in seconds."""

    workers: int
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float
    """Of the weights, to the workers but the first."""
    statistics_s: float = 0.0
    """Batch norm's, summed over GPUs, for each worker."""


@dataclass(frozen=True)
class MeasuredGpu:
    """What a GPU takes with one local batch size."""

    gpu: str
    local_batch_size: int
    most_workers: int
    """That its memory has room for."""
    steps: tuple[Step, ...]
    """By number of workers, upwards; the first one has one."""


@dataclass(frozen=True)
class Server:
    """Bandwidths are in bytes a second."""

    name: str
    gpu: str
    gpus: int
    bandwidth_within: float
    bandwidth_between: float


@dataclass(frozen=True)
class Cluster:
    """What a configuration of IIDP or JABAS describes."""

    servers: tuple[Server, ...]
    """Those that are to be used, in the configuration's order."""
    measured: Mapping[int, Mapping[str, MeasuredGpu]]
    """By local batch size, then by GPU; only sizes that were measured on the GPUs of every server."""
    buckets_mib: tuple[float, ...]
    """Of gradients, in the order of the backward pass."""
    all_reduces_within: tuple[tuple[float, float], ...]
    """Theoretical and measured milliseconds."""
    all_reduces_between: tuple[tuple[float, float], ...]
    unit: int | None
    """GPUs that work alike, where the configuration says so."""
    smallest_batch: int | None
    """The global batch that JABAS begins with."""


def read_cluster(file: Path) -> Cluster:
    """What a configuration and the files that it names say.

    Paths in it are relative to the working directory, as for IIDP, or else to the configuration's folder or the one
    above.

    Raises:
        SearchError: a file or folder is missing, or something in it breaks a rule; it is named.
    """
    content = object_in(file)
    _check_keys(file, content)
    paths = {key: _found(file, key, content[key]) for key in FILES}
    servers = _servers(file, content["available_servers"], paths["gpu_cluster_info"])
    unit = None
    if "resource_alloc_unit" in content:
        text = str(content["resource_alloc_unit"]).lower().strip()
        unit = whole_in(file, "resource_alloc_unit", text.removesuffix("gpu"))
    within, between = (_all_reduces(paths["comm_profile_dir"], name) for name in ("intra", "inter"))
    return Cluster(
        servers=servers,
        measured=_measured(paths["comp_profile_dir"], paths["memory_profile_dir"], {server.gpu for server in servers}),
        buckets_mib=_buckets(paths["bucket_profile_dir"]),
        all_reduces_within=within,
        all_reduces_between=between,
        unit=unit,
        smallest_batch=(whole_in(file, LOWER, content[LOWER]) if LOWER in content else None),
    )


def read_adaptation(file: Path) -> dict[str, str | float | int]:
    """What a configuration of JABAS says of the batch, by key of `adapt`; nothing, of one of IIDP.

    Raises:
        SearchError: it cannot be read, or a value breaks a rule.
    """
    content = object_in(file)
    _check_keys(file, content)
    if OF_JABAS[0] not in content or str(content.get("enable_adjust", "true")).lower() == "false":
        return {}
    lower, upper = (whole_in(file, key, content[key]) for key in OF_JABAS[:2])
    return {
        "rule": "similarity",
        "lower": lower,
        "upper": upper,
        "target": number_in(file, OF_JABAS[2], content[OF_JABAS[2]], above=0),
        "rate": number_in(file, OPTIONAL[0], content.get(OPTIONAL[0], 0.1), above=0),
        "every": whole_in(file, OPTIONAL[1], content.get(OPTIONAL[1], 100)),
    }


def _check_keys(file: Path, content: Mapping[str, Any]) -> None:
    known = (*NEEDED, *OF_JABAS, *OPTIONAL)
    if missing := [key for key in NEEDED if key not in content]:
        raise SearchError(f"{file}: {missing[0]} is missing; a configuration has {', '.join(NEEDED)}")
    if unknown := [key for key in content if key not in known]:
        raise SearchError(f"{file}: {unknown[0]} is not a configuration key; there are {', '.join(known)}")
    if len(some := [key for key in OF_JABAS if key in content]) not in (0, len(OF_JABAS)):
        lacking = next(key for key in OF_JABAS if key not in some)
        raise SearchError(f"{file}: {lacking} is missing; JABAS takes {', '.join(OF_JABAS)} together")


def _servers(file: Path, names: Any, info_file: Path) -> tuple[Server, ...]:
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise SearchError(f"{file}: available_servers={shown(names)} must be a list of at least one server's name")
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SearchError(f"{file}: available_servers has {twice!r} twice")
    known = object_in(info_file)
    servers = []
    for name in names:
        if not isinstance(info := known.get(name), dict):
            raise SearchError(
                f"{info_file}: server {name!r} of {file} is not there; it has {', '.join(known) or 'none'}"
            )

        def number(key: str, of: Mapping[str, Any] = info, server: str = name) -> float:
            return number_in(info_file, f"{server}.{key}", there(info_file, of, key, f"{server}."), above=0)

        gpu = there(info_file, info, "type", f"{name}.")
        if not (isinstance(gpu, str) and gpu):
            raise SearchError(f"{info_file}: {name}.type={shown(gpu)} must be the name of its GPUs")
        servers.append(
            Server(
                name=name,
                gpu=gpu,
                gpus=whole_in(info_file, f"{name}.number", there(info_file, info, "number", f"{name}.")),
                bandwidth_within=number("intra_network_bandwidth"),
                bandwidth_between=number("inter_network_bandwidth"),
            )
        )
    return tuple(servers)


def _measured(times: Path, memory: Path, gpus: set[str]) -> dict[int, dict[str, MeasuredGpu]]:
    """By local batch size and GPU."""
    limits = {size: _most_workers(folder) for size, folder in _by_size(memory)}
    found: dict[int, dict[str, MeasuredGpu]] = {}
    for size, folder in _by_size(times):
        steps: dict[str, tuple[Step, ...]] = {}
        for server in _folders(folder):
            gpu, of_server = _steps(server, size)
            steps.setdefault(gpu, of_server)
        if gpus <= steps.keys() & limits.get(size, {}).keys():
            found[size] = {gpu: MeasuredGpu(gpu, size, limits[size][gpu], steps[gpu]) for gpu in sorted(gpus)}
    if not found:
        raise SearchError(
            f"{times}, {memory}: there is no local batch size with times and a memory limit of every GPU "
            f"({', '.join(sorted(gpus))}); measure one on all servers"
        )
    return found


def _by_size(folder: Path) -> list[tuple[int, Path]]:
    found = [(size_of(each), each) for each in _folders(folder)]
    if not found:
        raise SearchError(f"{folder}: has no folder named by a local batch size, such as {folder / '32'}")
    return sorted(found)


def _most_workers(folder: Path) -> dict[str, int]:
    """By GPU."""
    found: dict[str, int] = {}
    for server in _folders(folder):
        limit = read_limit(server / MEMORY_FILE)
        found.setdefault(limit.gpu, limit.most_workers)
    return found


def _steps(folder: Path, size: int) -> tuple[str, tuple[Step, ...]]:
    """The GPU of a server, and its steps by number of workers."""
    steps: dict[int, Step] = {}
    gpus = set[str]()
    for file in sorted(folder.glob("*.json")):
        workers, step = read_step(file, size)
        if workers in steps:
            raise SearchError(f"{file}: num_models={workers} is there twice in {folder}; keep one of the two files")
        gpus.add(step.gpu)
        steps[workers] = step_of(workers, step.times)
    if 1 not in steps:
        raise SearchError(f"{folder}: has no profile of one worker (num_models 1); the others are compared with it")
    if len(gpus) > 1:
        raise SearchError(f"{folder}: gpu_type must be the same in all files, not {' and '.join(sorted(gpus))}")
    return gpus.pop(), tuple(steps[workers] for workers in sorted(steps))


def step_of(workers: int, ms: Mapping[str, float]) -> Step:
    """From milliseconds by the names of `fasop.costs.steps.StepTimes`."""
    return Step(
        workers=workers,
        data_s=ms["data"] / 1000,
        forward_s=ms["forward"] / 1000,
        backward_s=ms["backward"] / 1000,
        update_s=ms["update"] / 1000,
        copy_s=ms["copy"] / 1000,
        statistics_s=ms.get("statistics", 0.0) / 1000,
    )


def _buckets(folder: Path) -> tuple[float, ...]:
    return read_buckets(_only(folder, "*.json", "of bucket sizes"))[1]


def _all_reduces(folder: Path, where: str) -> tuple[tuple[float, float], ...]:
    return read_all_reduces(_only(folder, f"*{where}*", f"with {where!r} in its name"))


def _only(folder: Path, pattern: str, what: str) -> Path:
    files = sorted(file for file in folder.glob(pattern) if file.is_file())
    if len(files) != 1:
        raise SearchError(f"{folder}: must hold one file {what}, not {len(files)}")
    return files[0]


def _found(file: Path, key: str, text: Any) -> Path:
    if not (isinstance(text, str) and text):
        raise SearchError(f"{file}: {key}={shown(text)} must be a path")
    fits: Callable[[Path], bool] = Path.is_file if key == "gpu_cluster_info" else Path.is_dir
    beside = file.absolute().parent
    tried = [Path(text), beside / text, beside.parent / text]
    for path in tried:
        if fits(path):
            return path
    kind = "file" if key == "gpu_cluster_info" else "folder"
    raise SearchError(f"{file}: {key}={text}: there is no such {kind}, neither here nor in {beside} or {beside.parent}")


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
