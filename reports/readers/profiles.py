"""What profilers left in a run's folder: torch's traces of an iteration, and the reports of NVIDIA's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from conf.run_folder.rundir import RunDir

TRACE = re.compile(r"rank-(\d{5,9})\.iteration-(\d{1,9})\.json\.gz")
OF_NODE = re.compile(r"(.+?)(?:\.iteration-(\d{1,9}))?")
"""The name of a node's report without its ending: with the iteration that it shows, if that is one."""


@dataclass(frozen=True, kw_only=True)
class ProfileFile:
    path: str
    """Within the run's folder."""
    of: str
    """Whose work it shows: a rank or a node."""
    iteration: int | None
    """None: all of them."""
    opener: str
    """The program that shows it."""


def profile_files(run: RunDir) -> list[ProfileFile]:
    """By iteration, those of all iterations first."""
    return sorted(_found(run), key=lambda one: (one.iteration or 0, one.path))


def _found(run: RunDir) -> Iterator[ProfileFile]:
    for path in run.traces.glob("*.json.gz"):
        if named := TRACE.fullmatch(path.name):
            rank, traced = map(int, named.groups())
            where = f"{path.parent.name}/{path.name}"
            yield ProfileFile(path=where, of=f"rank {rank}", iteration=traced, opener="ui.perfetto.dev")
    for folder, ending, opener in ((run.nsys, "nsys-rep", "Nsight Systems"), (run.ncu, "ncu-rep", "Nsight Compute")):
        for path in folder.glob(f"*.{ending}"):
            if named := OF_NODE.fullmatch(path.stem):
                node, iteration = named.groups()
                where, at = f"{folder.name}/{path.name}", int(iteration) if iteration else None
                yield ProfileFile(path=where, of=f"node {node}", iteration=at, opener=opener)
