"""`tdpp profile nccl_tests=FILE,… profile=NAME`: what NVIDIA's nccl-tests printed, as measured collectives.

Formats: github.com/NVIDIA/nccl-tests, src/common.cu, src/util.cu (JSON, `-J FILE`) and doc/PERFORMANCE.md. A file may
have the output of several runs, lines of others between its own, and what mpirun and Slurm write before each line.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from conf.compose import compose_unchecked, to_object
from conf.errors import reworded
from conf.schema.experiment import Cluster, Gpu
from conf.visible import plural
from fasop.costs.network.collectives import Exchange
from fasop.costs.profiles.doubts import profile_doubts
from fasop.costs.profiles.files import profile_path, read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import CollectiveTimes, Operation
from launch.errors import LaunchError
from launch.profile.arguments import Arguments, check_name_free
from launch.profile.files import write
from launch.profile.link_fit import rounded
from launch.screen import remark

PROGRAMS = {
    "all_reduce_perf": Operation.all_reduce,
    "all_gather_perf": Operation.all_gather,
    "reduce_scatter_perf": Operation.reduce_scatter,
    "sendrecv_perf": Operation.send_recv,
    "alltoall_perf": Operation.alltoall,
}
OUT_OF_PLACE = ("sendrecv_perf", "alltoall_perf")
"""In place these receive into what they send."""
_PROGRAM = re.compile(r"(\w+?_perf)(?:_mpi)?\b")
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_NOT_WRITTEN = (ValueError, KeyError, IndexError, TypeError, AttributeError)
_BEGIN = re.compile(r"#\s*nThreads?:?\s+\d+\s")
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.*\S)"
)
_LINE = re.compile(
    r"\s(\d+)\s+(\d+)\s+([a-z]\w*)\s+(?:([a-z]\w*)\s+)?(?:(-?\d+)\s+)?(\S+(?:\s+\S+){7}(?:(?:\s+\S+){8})?)"
    r"(?:\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)?\s*$"
)
"""Size, count, type, and where a version has them operation and root; then twice time, algbw, busbw and errors,
with `-I 1` four figures of the iterations, too; with `-S 1` the time of day."""
_OF_CPU = re.compile(r"#\s+size\s+count\s.*\bcputime\b")
NEAR = 0.03
"""How far a ratio of printed bandwidths may be off, which have two decimals."""
CLEAR = 10.0
"""GB/s from which on they do."""


SOURCE = "collectives measured by nccl-tests"


class Place(NamedTuple):
    """Where a rank lay."""

    group: int
    host: str
    gpu: str


@dataclass(kw_only=True)
class Run:
    """What one program printed."""

    program: str | None
    places: dict[int, Place] = field(default_factory=dict)
    times: dict[str | None, defaultdict[int, list[float]]] = field(default_factory=dict)
    """Microseconds by operation of a reduction and bytes: of several cycles or types a size has several."""
    ratios: list[float] = field(default_factory=list)
    """Bus bandwidths, in algorithm bandwidths."""
    wrong: int = 0
    """Results that were not what they had to be."""
    of_cpu: bool = False
    """The times are those of the CPU."""


class Measured(NamedTuple):
    times: CollectiveTimes
    gpu: str
    """The name that the driver gives."""


def main(arguments: Arguments, comment: str) -> int:
    """Adds what files say to the profile of a GPU of the cluster, or to one that is there."""
    if arguments.profile is None:
        raise LaunchError("nccl_tests=…: name the profile with profile=NAME, or its file with profile=FILE.yaml")
    check_name_free(arguments.profile, arguments)
    measured = [one for file in arguments.nccl_tests for one in read(file)]
    device, others = measured[0].gpu, sorted({one.gpu for one in measured} - {measured[0].gpu})
    if others:
        raise LaunchError(
            f"nccl_tests={arguments.nccl_tests[0]}: measured on {device} and on {', '.join(others)}; a profile is of "
            f"one type of GPU: give each type its own files and profile=NAME"
        )
    times = _once(arguments.nccl_tests, [one.times for one in measured])
    gpu, known = _begun_with(arguments, device)
    profile = LayerProfile(gpu=gpu.name, source=SOURCE, collectives=[*times.values()])
    if known is not None:
        kept = [one for one in known.collectives if one.name not in times]
        source = known.source if SOURCE in known.source else f"{known.source}; {SOURCE}"
        profile = replace(known, source=source, collectives=[*kept, *times.values()])
    profile = write(arguments.profile, profile, arguments, comment)
    for one in times.values():
        sizes = sorted(one.us_by_bytes)
        print(f"{one.name}: {plural(len(sizes), 'size')} from {sizes[0]} to {sizes[-1]} bytes")
    remark(*(f"{arguments.profile}: {doubt}" for doubt in profile_doubts(profile)))
    print(f"written: {profile_path(arguments.profile)}; cluster.gpus.<key>.profile={arguments.profile} uses it")
    return 0


def _once(files: Sequence[Path], measured: Iterable[CollectiveTimes]) -> dict[str, CollectiveTimes]:
    """Each collective by its name; a size that several files have gets the median of its times."""
    by_name: dict[str, CollectiveTimes] = {}
    times: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        if by_name.setdefault(one.name, one).sharing != one.sharing:
            raise LaunchError(
                f"nccl_tests={','.join(map(str, files))}: {one.name} was measured with {by_name[one.name].sharing} and "
                f"with {one.sharing} such groups at once (NCCL_TESTS_SPLIT); leave one out: a profile has one of them"
            )
        for size, us in one.us_by_bytes.items():
            times[one.name][size].append(us)
    return {name: replace(one, us_by_bytes=_medians(times[name])) for name, one in by_name.items()}


def _medians(times: dict[int, list[float]]) -> dict[int, float]:
    return {size: rounded(median(every)) for size, every in sorted(times.items())}


def _begun_with(arguments: Arguments, device: str) -> tuple[Gpu, LayerProfile | None]:
    """The cluster's GPU that was measured, and the profile that its collectives are added to: one that is there, or
    the GPU's own."""
    cluster = to_object(compose_unchecked(arguments.overrides), Cluster, "cluster")
    alike = [gpu for gpu in cluster.gpus.values() if gpu.is_called(device)]
    if not alike:
        raise LaunchError(
            f"nccl_tests={arguments.nccl_tests[0]}: measured on {device}, but cluster={cluster.name} has "
            f"{', '.join(gpu.name for gpu in cluster.gpus.values())}; give cluster=NAME of the cluster that has it"
        )
    gpu, name = alike[0], str(arguments.profile)
    if not (arguments.add and profile_path(name).exists()):
        return gpu, None if gpu.profile is None else read_profile(gpu.profile)
    known = read_profile(name)
    if known.gpu != gpu.name:
        raise LaunchError(
            f"nccl_tests={arguments.nccl_tests[0]}: measured on {device}, but profile {name!r} is of {known.gpu}; "
            f"choose another profile=NAME"
        )
    return gpu, known


def read(file: Path) -> list[Measured]:
    """All runs in a file. Raises LaunchError: it cannot be read, or has none."""
    with reworded(LaunchError, f"nccl_tests={file} cannot be read: "):
        text = file.read_text(encoding="utf-8", errors="replace")
    if text.lstrip().startswith("{"):
        with reworded(LaunchError, f"nccl_tests={file} is not what nccl-tests writes with -J: ", of=_NOT_WRITTEN):
            found: Iterable[Run] = [_of_json(text)]
    else:
        found = runs_in(text.splitlines(), file.name)
    runs = [run for run in found if run.times]
    if not runs:
        raise LaunchError(
            f"nccl_tests={file}: no line of it has a size, a count, a type and the times of nccl-tests; give the text "
            f"that all_reduce_perf, all_gather_perf, reduce_scatter_perf, sendrecv_perf or alltoall_perf prints, or "
            f"writes with -J"
        )
    return [_measured(file, run) for run in runs]


def _of_json(text: str) -> Run:
    """What a program wrote with `-J`. Of each process it names the first rank alone, whose others are on that host."""
    written = json.loads(text)
    named = _PROGRAM.search(written["args"][0])
    run = Run(program=named and named[1])
    each = written["config"]["nthreads"] * written["config"]["ngpus"]
    for device in written["config"]["devices"]:
        place = Place(device["group"], device["hostname"], device["device_info"])
        run.places.update(dict.fromkeys(range(device["rank"], device["rank"] + each), place))
    for line in written["results"]:
        ways = [line[way] or {} for way in ("out_of_place", "in_place")]
        run.of_cpu |= any("cpu_time" in way for way in ways)
        columns = [
            str(one)
            for way in ways
            for one in (way.get("time", way.get("cpu_time")), way.get("alg_bw"), way.get("bus_bw"), way.get("nwrong"))
        ]
        _add(run, line["size"], line["redop"], columns)
    return run


def runs_in(lines: Sequence[str], name: str) -> Iterator[Run]:
    """Yields what each program printed; one that no line names is named by the file."""
    of_file = next((program for program in PROGRAMS if program.removesuffix("_perf") in name), None)
    run, program = Run(program=of_file), None
    for line in lines:
        if named := _PROGRAM.search(line):
            program = named[1]
            if not run.times:
                run.program = program
        if _BEGIN.search(line):
            yield run
            run = Run(program=program or of_file)
        elif rank := _RANK.search(line):
            run.places[int(rank[1])] = Place(int(rank[2] or 0), rank[3], rank[4])
        elif _OF_CPU.search(line):
            run.of_cpu = True
        elif "#" not in line and (found := _LINE.search(f" {line}")):
            _add(run, int(found[1]), found[4], found[6].split())
    yield run


def _add(run: Run, size: int, reduction: str | None, columns: Sequence[str]) -> None:
    """Adds a line's time: in place, as training does it, unless that means nothing for the operation."""
    ways = [columns[start : start + 4] for start in (0, len(columns) // 2)]
    times = [(float(way[0]), way) for way in ways if _NUMBER.fullmatch(way[0]) and float(way[0]) > 0]
    if size == 0 or not times:
        return
    us, way = times[0 if run.program in OUT_OF_PLACE else -1]
    run.times.setdefault(reduction, defaultdict(list))[size].append(us)
    run.wrong += sum(int(float(way[3])) for _, way in times if _NUMBER.fullmatch(way[3]))
    if float(way[1]) >= CLEAR:
        run.ratios.append(float(way[2]) / float(way[1]))


def _measured(file: Path, run: Run) -> Measured:
    what = f"nccl_tests={file}"
    if run.program not in PROGRAMS:
        named = f"{run.program} is not one of" if run.program else "neither a line nor the file's name says which of"
        raise LaunchError(
            f"{what}: {named} {', '.join(PROGRAMS)}, by which predictions go; name the file after the program, or "
            f"leave it out"
        )
    operation = PROGRAMS[run.program]
    groups = Counter(place.group for place in run.places.values())
    ranks = max(groups.values(), default=0)
    if ranks < 2:
        raise LaunchError(
            f"{what}: {run.program} has {plural(ranks, 'rank')} in its lines '# Rank 0 …'; give its whole output, of "
            f"two ranks or more"
        )
    if run.of_cpu:
        raise LaunchError(
            f"{what}: {run.program} -C 1 reports the CPU's time (cputime), not the collective's; measure without -C"
        )
    if run.wrong:
        raise LaunchError(f"{what}: {run.program} reports {run.wrong} wrong values (#wrong); measure again")
    steps, share = Exchange(operation, ranks, 1.0).steps  # bus bandwidth is that of a ring's links
    bus = steps * share
    off = [ratio for ratio in run.ratios if abs(ratio / bus - 1) > NEAR]
    if off:
        raise LaunchError(
            f"{what}: bus bandwidth is {off[0]:.3g} times algorithm bandwidth, but {bus:.3g} times "
            f"with {run.program} of {ranks} ranks; is it another program's output, or are lines of ranks missing?"
        )
    gpus = sorted({place.gpu for place in run.places.values()})
    if len(gpus) > 1:
        raise LaunchError(
            f"{what}: ranks of {run.program} are on {' and on '.join(gpus)}; a profile is of one type: measure on "
            f"nodes of one type, and describe links between types with cluster.links ('tdpp profile links=FILE.yaml')"
        )
    hosts = {(place.group, place.host) for place in run.places.values()}
    nodes = max(Counter(group for group, _ in hosts).values())
    sharing = max(Counter(host for _, host in hosts).values()) if nodes > 1 else 1
    times = _medians(run.times.get("sum") or next(iter(run.times.values())))  # gradients are summed
    return Measured(
        times=CollectiveTimes(operation=operation, ranks=ranks, nodes=nodes, sharing=sharing, us_by_bytes=times),
        gpu=gpus[0],
    )
