"""Which folders below a runs folder are runs, and which of them a user means: the one place that knows.

It knows folders only; `RunDir` says what is in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from conf.errors import RunFolderError
from conf.run_folder import run_files
from conf.visible import nearest

BY_JOB = "by_job"
"""In a runs folder: links to the runs by the ids of their jobs."""
LATEST = "latest"
_STAMP = "%Y%m%d-%H%M%S"
_LATER_S = 26 * 3600
"""Between two clocks that show the same time: more than any two places on Earth."""
_COMPARED = 500
"""The latest runs, of which a message names those whose names are most like an unknown one."""


RUNS_DIR = "TDPP_RUNS_DIR"
"""The variable with the folder of all runs, where none is given; so it stands in the schema, too."""
RUNS = Path("runs")
"""That folder, if nobody says otherwise."""


def usual_runs_dir() -> Path:
    """Where runs are if no command line says otherwise."""
    return Path(os.environ.get(RUNS_DIR, RUNS))


def is_run(path: Path) -> bool:
    """Whether a folder has what every run has: its launch came as far as its plan."""
    try:
        return (path / "config.yaml").is_file() and (path / "plan.json").is_file()
    except PermissionError:
        return False


def is_begun(path: Path) -> bool:
    """Whether a folder was made for a run but is none: not yet, not any more, or it never became one."""
    try:
        return (path / "nodes").is_dir() and not is_run(path)
    except PermissionError:
        return False


def run_around(path: Path) -> Path | None:
    """The run that a path leads into."""
    return next((folder for folder in Path(os.path.realpath(path)).parents if is_run(folder)), None)


def is_closed(path: Path) -> bool:
    """Whether it is a folder that this user may not read."""
    try:
        os.scandir(path).close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def folders(runs: Path) -> Iterator[Path]:
    """Where runs may be; what else is there, too."""
    return (path for name in entries(runs) if name.name != BY_JOB for path in entries(name))


def closed_in(runs: Path) -> list[Path]:
    """Folders of runs, or of a name, that this user may not read."""
    names = [path for path in entries(runs) if path.name != BY_JOB]
    return [path for path in names if is_closed(path)] + [path for path in folders(runs) if is_closed(path)]


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it is none, is gone by now, or may not be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def stamp(made: datetime) -> str:
    """How a folder's name says when it was made: `20260131-120000Z`, in UTC, whatever clock its user looks at."""
    return made.astimezone(UTC).strftime(f"{_STAMP}Z")


def made_unix(path: Path) -> float | None:
    """When a run's folder was made, by its name; None of a folder of another name.

    Without the Z, as earlier versions made them, a name has the local time of whoever launched; provenance.json then
    says the instant.
    """
    day, _, rest = path.name.partition("-")
    written = f"{day}-{rest.partition('-')[0]}"
    try:
        named = datetime.strptime(written.removesuffix("Z"), _STAMP)
        unix = (named.replace(tzinfo=UTC) if written.endswith("Z") else named).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    if not written.endswith("Z"):
        with suppress(OSError, RunFolderError, TypeError, KeyError, ValueError):
            file = path / "provenance.json"
            recorded = float(run_files.parse_json(run_files.read_text(file), str(file))["unix"])
            return recorded if abs(recorded - unix) < _LATER_S else unix
    return unix


def by_time(paths: Iterable[Path]) -> list[Path]:
    """Oldest first, without those that are deleted meanwhile; before them folders whose names have no time."""
    found = []
    for path in paths:
        with suppress(OSError):
            # The time in a name has seconds; within one, whichever was planned first.
            plan = path / "plan.json"
            changed = (plan if plan.exists() else path).stat().st_mtime_ns
            found.append((made_unix(path) or 0.0, changed, path))
    return [path for _, _, path in sorted(found)]


def find(runs: Path, wanted: str | None) -> Path:
    """The absolute path of the run that is meant by

    - its folder, or a path in it;
    - a folder of runs, such as `runs/tiny`: the latest of them;
    - `tiny`, the latest run of that name, `tiny/20260131-120000-0123abcd`, or that time and hash alone;
    - the id of one of its jobs;
    - None or `latest`: the latest of all.

    A folder that is still being launched, or whose launch was cut off, is found like a run.

    Raises:
        RunFolderError: there is none, a name fits several, or it may not be read.
    """
    if wanted is not None and (path := _at(Path(wanted))) is not None:
        return path
    if wanted is not None and wanted.startswith("runs_dir="):
        raise RunFolderError(f"{wanted}: not a run; write --runs-dir {wanted.partition('=')[2] or 'FOLDER'}")
    # squeue shows the components of a heterogeneous job as 4711+0 and 4711+1.
    job = re.sub(r"^(\d+)\+\d+$", r"\1", wanted or "")
    if job and _is_either(runs / BY_JOB / job):
        return (runs / BY_JOB / job).resolve()
    known = [path.absolute() for path in by_time(path for path in folders(runs) if _is_either(path))]
    if not known:
        raise RunFolderError(
            f"no runs in {runs.absolute()}; start one with 'tdpp launch', or name the folder "
            f"that has yours in --runs-dir or TDPP_RUNS_DIR"
        )
    exact = [path for path in known if wanted in (path.name, _name(path))]
    if len(exact) > 1:
        raise RunFolderError(f"{wanted!r} matches several runs: {', '.join(map(_name, exact))}; give one of them")
    found = exact or [path for path in known if path.parent.name == wanted]
    if not found and job.isdecimal():  # its launch may have been cut off before it made the link
        found = [path for path in known if job in _jobs(path)]
    if not found and wanted in (None, LATEST):
        found = known
    if not found:
        near = nearest(wanted or "", map(_name, reversed(known[-_COMPARED:])))
        raise RunFolderError(
            f"no run {wanted!r} in {runs.absolute()}; {near}give a run's folder, its name, its job id, or 'latest'"
        )
    return found[-1]


def _at(path: Path) -> Path | None:
    """The run at a path, around it or, the latest, in it."""
    try:
        resolved = path.resolve(strict=True)
    except PermissionError as error:
        raise RunFolderError(f"{path}: not accessible ({error.strerror}: {error.filename})") from error
    except (OSError, RuntimeError, ValueError):  # it is not a path, but a name; or a link to itself, or holds a byte 0
        return None
    if _is_either(resolved):
        return resolved
    if (run := run_around(resolved)) is not None:
        return run
    if is_closed(resolved):
        raise RunFolderError(f"{path}: you may not read this folder; it belongs to {owner(resolved)}")
    inside = [one for one in (*entries(resolved), *folders(resolved)) if _is_either(one)]
    return by_time(inside)[-1] if inside else None


def _is_either(path: Path) -> bool:
    return is_run(path) or is_begun(path)


def _jobs(path: Path) -> list[str]:
    """Ids of the run's jobs; a damaged file has none."""
    try:
        jobs = path / "jobs.json"
        return [job["id"] for job in run_files.parse_json(run_files.read_text(jobs), str(jobs))["jobs"]]
    except (FileNotFoundError, RunFolderError, TypeError, KeyError):
        return []


def owner(path: Path) -> str:
    """The name of the user whom a folder belongs to."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
