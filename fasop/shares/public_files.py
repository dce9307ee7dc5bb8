"""The files of IIDP and JABAS: configuration, cluster, profiles; read once, into typed values.

Their formats are those of github.com/unist-ssl/IIDP and github.com/unist-ssl/JABAS. A server has the profile of the
host with its name and GPU, or else that of the first host with the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fasop.errors import SearchError
from fasop.shares.adaptive_keys import INTERVAL, LOWER, OF_JABAS, RATE
from fasop.shares.json_files import number_in, object_in, shown, there, whole_in
from fasop.shares.public_folders import MEMORY_FILE, read_all_reduces, read_buckets, read_limit, read_step, size_of

FILES = ("memory_profile_dir", "comp_profile_dir", "comm_profile_dir", "bucket_profile_dir", "gpu_cluster_info")
NEEDED = (*FILES, "available_servers")
OPTIONAL = (RATE, INTERVAL, "resource_alloc_unit", "homo_servers", "enable_adjust", "metric")

FIRST = ""
"""No host's name: stands for the first host with a GPU."""
T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of some virtual workers on one GPU, on average, in seconds."""

    workers: int
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float
    """Seconds that copying the weights to the workers but the first takes."""
    statistics_s: float = 0.0
    """Batch norm's, summed over GPUs, for each worker."""


@dataclass(frozen=True)
class MeasuredGpu:
    """What a GPU takes with one local batch size."""

    gpu: str
    local_batch_size: int
    most_workers: int
    """That its memory has room for."""
    steps: tuple[MeasuredStep, ...]
    """Steps for each number of workers, upwards; the first one has one."""


@dataclass(frozen=True)
class Server:
    """Bandwidths are in bytes a second."""

    name: str
    gpu: str
    gpus: int
    bandwidth_within: float
    bandwidth_between: float
    measured_as: str
    """Its key in `Cluster.measured`: its GPU, unless the server was measured itself and takes other times."""


@dataclass(frozen=True)
class Cluster:
    """What a configuration of IIDP or JABAS describes."""

    servers: tuple[Server, ...]
    """Those that are to be used, in the configuration's order."""
    measured: Mapping[int, Mapping[str, MeasuredGpu]]
    """GPUs as measured, by local batch size, then by `Server.measured_as`; only sizes that were measured on the GPUs of
    every server."""
    buckets_mib: tuple[float, ...]
    """Buckets of gradients, in the order of the backward pass."""
    all_reduces_within: tuple[tuple[float, float], ...]
    """Theoretical and measured milliseconds; none where they were not measured."""
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
    needed = "intra" if len(servers) == 1 else "inter"
    within, between = (
        _all_reduces(paths["comm_profile_dir"], name, needed=name == needed) for name in ("intra", "inter")
    )
    servers, measured = _measured(paths["comp_profile_dir"], paths["memory_profile_dir"], servers)
    return Cluster(
        servers=servers,
        measured=measured,
        buckets_mib=read_buckets(_only(paths["bucket_profile_dir"], "*.json", "of bucket sizes"))[1],
        all_reduces_within=within,
        all_reduces_between=between,
        unit=unit,
        smallest_batch=(whole_in(file, LOWER, content[LOWER]) if LOWER in content else None),
    )


def read_adaptation(file: Path) -> dict[str, str | float | int]:
    """What a configuration of JABAS says of the batch, by key of `adapt`; nothing, of one of IIDP. Raises SearchError:
    it cannot be read, or a value breaks a rule."""
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
        raise SearchError(f"{file}: {unknown[0]} is not a configuration key; the known ones are {', '.join(known)}")
    if len(some := [key for key in OF_JABAS if key in content]) not in (0, len(OF_JABAS)):
        lacking = next(key for key in OF_JABAS if key not in some)
        raise SearchError(f"{file}: {lacking} is missing; JABAS needs {', '.join(OF_JABAS)} together")


def _servers(file: Path, names: Any, info_file: Path) -> tuple[Server, ...]:
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise SearchError(f"{file}: available_servers={shown(names)} must be a list of at least one server name")
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SearchError(f"{file}: available_servers has {twice!r} twice")
    known = object_in(info_file)
    servers = []
    for name in names:
        if not isinstance(info := known.get(name), dict):
            raise SearchError(
                f"{info_file}: no server {name!r}, which {file} names; it has {', '.join(known) or 'none'}"
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
                measured_as=gpu,
            )
        )
    return tuple(servers)


def _measured(
    times: Path, memory: Path, servers: Sequence[Server]
) -> tuple[tuple[Server, ...], dict[int, dict[str, MeasuredGpu]]]:
    """The servers with the keys of their measurements, and these by local batch size and key."""
    steps = {size: _with_first(_steps(host, size) for host in _folders(folder)) for size, folder in _by_size(times)}
    limits = {size: _with_first(_limit(host) for host in _folders(folder)) for size, folder in _by_size(memory)}
    gpus = sorted({server.gpu for server in servers})
    needed = {(gpu, FIRST) for gpu in gpus}
    sizes = [size for size, found in steps.items() if needed <= found.keys() & limits.get(size, {}).keys()]
    if not sizes:
        raise SearchError(
            f"{times}, {memory}: no local batch size has times and a memory limit for every GPU ({', '.join(gpus)}); "
            f"measure one on all servers"
        )

    def of_host(gpu: str, host: str) -> list[MeasuredGpu]:
        return [
            MeasuredGpu(gpu, size, _of_host(limits[size], gpu, host), _of_host(steps[size], gpu, host))
            for size in sizes
        ]

    known, named = {gpu: of_host(gpu, FIRST) for gpu in gpus}, list[Server]()
    for server in servers:
        own = of_host(server.gpu, server.name)
        key = next((key for key, other in known.items() if other == own), f"{server.gpu} of {server.name}")
        known[key] = own
        named.append(replace(server, measured_as=key))
    return tuple(named), {size: {key: each[number] for key, each in known.items()} for number, size in enumerate(sizes)}


def _with_first(hosts: Iterable[tuple[str, str, T]]) -> dict[tuple[str, str], T]:
    """What hosts have, by GPU and host; that of the first host with a GPU also by `FIRST`."""
    found: dict[tuple[str, str], T] = {}
    for gpu, host, measured in hosts:
        found[gpu, host] = measured
        found.setdefault((gpu, FIRST), measured)
    return found


def _of_host(found: Mapping[tuple[str, str], T], gpu: str, host: str) -> T:
    return found.get((gpu, host), found[gpu, FIRST])


def _by_size(folder: Path) -> list[tuple[int, Path]]:
    found = [(size_of(each), each) for each in _folders(folder)]
    if not found:
        raise SearchError(f"{folder}: no folder is named after a local batch size, such as {folder / '32'}")
    return sorted(found)


def _limit(folder: Path) -> tuple[str, str, int]:
    """A host's GPU, its name, and how many workers memory has room for."""
    limit = read_limit(folder / MEMORY_FILE)
    return limit.gpu, folder.name, limit.most_workers


def _steps(folder: Path, size: int) -> tuple[str, str, tuple[MeasuredStep, ...]]:
    """A host's GPU, its name, and its steps by number of workers."""
    steps: dict[int, MeasuredStep] = {}
    gpus = set[str]()
    for file in sorted(folder.glob("*.json")):
        workers, step = read_step(file, size)
        if workers in steps:
            raise SearchError(f"{file}: num_models={workers} occurs twice in {folder}; keep one of the two files")
        gpus.add(step.gpu)
        steps[workers] = step_of(workers, step.times)
    if 1 not in steps:
        raise SearchError(f"{folder}: no profile of one worker (num_models 1), to which the others are compared")
    if len(gpus) > 1:
        raise SearchError(f"{folder}: gpu_type must be the same in all files, not {' and '.join(sorted(gpus))}")
    return gpus.pop(), folder.name, tuple(steps[workers] for workers in sorted(steps))


def step_of(workers: int, ms: Mapping[str, float]) -> MeasuredStep:
    """From milliseconds by the names of `fasop.costs.profiles.steps.StepTimes`."""
    return MeasuredStep(
        workers=workers,
        data_s=ms["data"] / 1000,
        forward_s=ms["forward"] / 1000,
        backward_s=ms["backward"] / 1000,
        update_s=ms["update"] / 1000,
        copy_s=ms["copy"] / 1000,
        statistics_s=ms.get("statistics", 0.0) / 1000,
    )


def _all_reduces(folder: Path, where: str, needed: bool) -> tuple[tuple[float, float], ...]:
    if not needed and not any(folder.glob(f"*{where}*")):
        return ()
    return read_all_reduces(_only(folder, f"*{where}*", f"with {where!r} in its name"))


def _only(folder: Path, pattern: str, what: str) -> Path:
    files = sorted(file for file in folder.glob(pattern) if file.is_file())
    if len(files) != 1:
        raise SearchError(f"{folder}: must contain one file {what}, not {len(files)}")
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
    raise SearchError(f"{file}: {key}={text}: no such {kind} here, in {beside} or in {beside.parent}")


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
