"""What a search found for the GPUs of a run, kept beside its pages, for a search takes seconds."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.errors import RunFolderError
from conf.run_folder.json_values import typed
from conf.run_folder.run_files import parse_json, read_text
from conf.run_folder.rundir import RunDir
from fasop.search.findings.found_plan import FoundPlan
from reports.errors import ReportError
from reports.readers.record import Record

FILE = "search.json"
"""In the folder of the pages."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    config: str
    """SHA-256 of the configuration that was searched."""
    plans: tuple[FoundPlan, ...]


def search(run: RunDir, record: Record) -> tuple[FoundPlan, ...]:
    """The best plans for a run's GPUs, as `fasop.search.findings.other_plans` finds them.

    Raises:
        TdppError: no plan can be found for it, or it had several plans.
    """
    from fasop.search.findings.other_plans import other_plans  # few ask for it, and it is slow to import

    if record.experiment is None:
        raise ReportError(f"{record.name}: this version of tdpp cannot read its config.yaml, so it cannot search plans")
    if record.decisions or record.regroupings:
        raise ReportError(
            f"{record.name}: its batch, shares or nodes changed during the run, but a search needs one plan"
        )
    schedule = run.read_json(run.schedule) if record.plan.schedule_file else None
    return tuple(other_plans(record.experiment, schedule))


def keep(folder: Path, record: Record, plans: tuple[FoundPlan, ...]) -> None:
    """Raises OSError where it cannot be written."""
    RunDir(folder).write_json(folder / FILE, asdict(_Kept(config=_digest(record), plans=plans)))


def kept(folder: Path, record: Record) -> tuple[tuple[FoundPlan, ...] | None, tuple[str, ...]]:
    """What was kept for this configuration, or None; and notes for the page."""
    path = folder / FILE
    try:
        found = typed(_Kept, parse_json(read_text(path), str(path)), str(path))
    except FileNotFoundError:
        return None, ()
    except (RunFolderError, OSError) as error:
        return None, (f"no plan from a search: {error}; 'tdpp report --search' writes the file again",)
    return (found.plans if found.config == _digest(record) else None), ()


def _digest(record: Record) -> str:
    return hashlib.sha256(record.config.encode()).hexdigest()
