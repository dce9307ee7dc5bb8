"""Where a report comes from: a run folder, or a log of Megatron-LM."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from conf.errors import RunFolderError, TdppError
from conf.run_folder import run_folders
from conf.run_folder.json_values import typed
from conf.run_folder.run_files import parse_json, read_text
from conf.run_folder.rundir import RunDir
from fasop.search.findings.other_plans import FoundPlan
from fasop.simulation.predict import Prediction, predict
from reports.errors import NeitherError, ReportError, unwritable
from reports.readers import events, megatron_log, record
from reports.readers.events import Timeline
from reports.readers.gpus import GpuReport, read_files, read_gpus
from reports.readers.megatron_log import Sizes
from reports.readers.record import Record


@dataclass(frozen=True, kw_only=True)
class Found:
    """All that pages are made of."""

    record: Record
    timeline: Timeline
    prediction: Prediction | None = None
    gpus: GpuReport | None = None
    busy: Mapping[str, float] = field(default_factory=dict)
    """The part of an iteration in which ranks compute, by type of GPU."""
    searched: Sequence[FoundPlan] | None = None
    """Plans of a search for its GPUs, if there was one."""

    @property
    def over(self) -> bool:
        """Whether the last iteration is logged: of a log nothing else tells that no more will come."""
        return self.record.reached >= self.record.plan.train.iterations


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run or a log, and the folder that its pages go to."""

    run: RunDir | None
    """None for a log."""
    log: Path
    """The run's folder, or the log."""
    sizes: Sizes
    report: Path

    @classmethod
    def find(cls, runs: Path, wanted: str | None, sizes: Sizes) -> Source:
        """A log of these `sizes`, if there is one of that name, or a run.

        Raises:
            RunFolderError: no run has that name.
            NeitherError: the folder has neither.
            ReportError: the file or folder is not there; there are sizes for a run, which knows its own.
        """
        log = Path(wanted or "")
        if wanted is not None and run_folders.run_around(log) is None and megatron_log.is_log(log):
            report = log / "report" if log.is_dir() else log.with_suffix(".report")
            return cls(run=None, log=log, sizes=sizes, report=report)
        try:
            run = RunDir.find(runs, wanted)
        except RunFolderError as error:
            raise _neither(wanted, error) from error
        if wanted is not None and Path(os.path.realpath(wanted)) == run.runs:
            inside = sorted({run.path.parent.name for run in RunDir.all(Path(wanted))})
            raise NeitherError(f"{wanted} is the folder of all runs; give one of its names: {', '.join(inside)}")
        if sizes != Sizes():
            raise ReportError(f"{run.name} is a run and knows its sizes; leave out --tensor, --data and --pipeline")
        return cls(run=run, log=run.path, sizes=sizes, report=run.report)

    def make_folder(self) -> None:
        """Makes the folder for the pages. One in a run is made and used by the run's owner alone, and is not a link.

        Raises:
            ReportError: it is in another user's run, or leads elsewhere.
            OSError: it cannot be made.
        """
        if self.run is not None and self.report == self.run.report:
            if self.run.path.stat().st_uid != os.geteuid():
                raise ReportError(
                    f"{self.run.path} belongs to {run_folders.owner(self.run.path)}; write the report elsewhere with "
                    "--output FOLDER"
                )
            if self.report.is_symlink():
                raise ReportError(
                    f"{self.report} is a link to {self.report.readlink()}; remove it, or write the report there with "
                    f"--output {self.report.readlink()}"
                )
        self.report.mkdir(parents=True, exist_ok=True)

    def read(self) -> Found:
        """All that is known at this moment. Raises ReportError: the run has no usable plan, or it is not a log."""
        if self.run is None:
            known, timeline = megatron_log.read(self.log, self.sizes)
            readings = self.log.glob("*.gpu") if self.log.is_dir() else [self.log.with_suffix(".gpu")]
            gpus = read_files({path.stem: path for path in sorted(readings)})
            named = dict(zip(gpus.uses["node"], gpus.uses["name"], strict=True)) if gpus else {}
            nodes = [replace(node, gpu=named.get(node.name, node.gpu)) for node in known.plan.nodes]
            return Found(record=replace(known, plan=replace(known.plan, nodes=nodes)), timeline=timeline, gpus=gpus)
        known = record.read(self.run)
        prediction, why = expected(self.run, known)
        plans, damaged = kept(self.report, known)
        paths = {rank.rank: self.run.rank_events(rank.rank) for rank in known.plan.ranks}
        return Found(
            record=replace(known, notes=(*known.notes, *why, *damaged)),
            timeline=events.read_run(paths if known.plan.timeline else {}),
            prediction=prediction,
            gpus=read_gpus(self.run, known),
            searched=plans,
        )

    def search(self) -> None:
        """Searches plans for the run's GPUs and keeps them with its pages, unless they are there. Raises TdppError: it
        is a log, its plan changed on the way, or there is no plan."""
        if self.run is None:
            raise ReportError(f"--search takes runs of tdpp, but {self.log} is a log of Megatron-LM; leave it out")
        known = record.read(self.run)
        if kept(self.report, known)[0] is not None:
            return
        plans = search(self.run, known)
        try:
            self.make_folder()
            keep(self.report, known, plans)
        except OSError as error:
            raise unwritable(self.report, error) from error


def all_of(wanted: str) -> list[str]:
    """The runs in a folder of runs, such as `runs/tiny`, oldest first; else what was given."""
    folder = Path(wanted)
    inside = [] if RunDir.is_one(folder) else run_folders.entries(folder)
    return [str(path) for path in sorted(inside) if RunDir.is_one(path)] or [wanted]


def placed(sources: Sequence[Source], folder: Path) -> list[Source]:
    """The same with their pages in one folder; of several, each in a folder of its own there."""
    if len(sources) == 1:
        return [replace(sources[0], report=folder)]
    taken = set[str]()
    found = []
    for source in sources:
        name = source.log.stem if source.run is None else source.run.name
        free = next(one for number in itertools.count() if (one := f"{name}.{number}" if number else name) not in taken)
        taken.add(free)
        found.append(replace(source, report=folder / free))
    return found


def _neither(wanted: str | None, error: RunFolderError) -> TdppError:
    """What to say of what is neither a run nor a log: where to look, for a path; which runs exist, for a name."""
    path = Path(wanted or "")
    if wanted is not None and path.is_dir():
        return NeitherError(f"{wanted} has no plan.json of a run, no runs, and no .out files of a job's nodes")
    if wanted is not None and not path.exists() and (len(path.parts) > 1 or path.suffix):
        return ReportError(f"{wanted} does not exist, and {error}")
    return error


def expected(run: RunDir, record: Record) -> tuple[Prediction | None, tuple[str, ...]]:
    """The prediction, or none and why, as notes for the page."""
    experiment = record.experiment
    if experiment is None:
        return None, ()  # the record has a note on it
    try:
        schedule = run.read_json(run.schedule) if record.plan.schedule_file else None
        prediction = predict(experiment, schedule)
    except TdppError as error:
        return None, (f"no prediction: {error}",)
    if len(prediction.stages) != len(record.plan.stages):
        return None, ("no prediction: config.yaml has another number of stages than plan.json",)
    return prediction, ()


FILE = "search.json"
"""In the folder of the pages."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    config: str
    """SHA-256 of the configuration that was searched."""
    plans: tuple[FoundPlan, ...]


def search(run: RunDir, record: Record) -> tuple[FoundPlan, ...]:
    """The best plans for a run's GPUs, as `fasop.search.findings.other_plans` finds them. Raises TdppError: no plan can
    be found for it, or it had several plans."""
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
