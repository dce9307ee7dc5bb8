"""What a run folder holds beside events: plan, metrics, configuration, provenance, nodes, errors.

Reading is here; nothing here draws a conclusion. Whatever is not there (yet) becomes a note, for a report is
also made of runs that are under way or failed. Only `plan.json` is required.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pandas as pd

from conf.errors import ConfigError, RunFolderError
from conf.run_folder.json_values import Count, Rule, Unix, typed
from conf.run_folder.log_lines import LogText
from conf.run_folder.run_files import opened, read_text
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from megatron_ext.contract.errors import RankFailure
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault
from megatron_ext.contract.plan_parts import Place
from reports.errors import ReportError
from reports.readers.hardware import ProfileFile, profile_files
from reports.readers.json_lines import Decision, Regrouping, decisions, expert_loads, metrics_frame, metrics_lines
from reports.readers.upstream_log import UpstreamLog

UNKNOWN = "unknown"
"""What a log does not tell."""
MOST_METRICS_BYTES = 1 << 30
"""The largest metrics.jsonl: some 3 million logged iterations."""
T = TypeVar("T")
Bytes = Annotated[float, Rule("0 or more", lambda value: 0 <= value < math.inf)]
Mib = Annotated[float, Rule("from 0 to 1e12 MiB", lambda value: 0 <= value <= 1e12)]


def rank_label(rank: Place) -> str:
    """What pages call a rank."""
    tensor = f" · tp {rank.tp}" if rank.tp else ""
    return f"rank {rank.rank} · stage {rank.stage} · dp {rank.dp}{tensor}"


def stage_contents(plan: Plan, stage: int) -> str:
    """What a stage holds: the counted blocks of each of its chunks, the embedding, the head.

    Blocks of one row of layers are counted; where a model has several rows, or a module's blocks are known, they are
    named.
    """
    kinds = dict(plan.model.all_kinds())
    first = " + embedding" if stage == 0 and "embedding" in kinds else ""
    last = " + head" if stage == plan.pipeline - 1 and "head" in kinds else ""
    parts = range(stage, len(plan.partition), plan.pipeline)
    named = plan.blocks is not None or len(plan.model.stacks()) > 1
    held = [plan.named(part) or "none" if named else str(plan.partition[part]) for part in parts]
    return f"{', '.join(held) or 'unknown'}{first}{last}"


@dataclass(frozen=True)
class Record:
    """One run, as far as it is on disk."""

    name: str
    diff: Path
    """What differed from the commit when the run was submitted."""
    plan: Plan
    """One that was read from a log (`reports/readers/megatron_log.py`) may lack ranks, nodes, the partition and sizes
    of the model, and has 0 for numbers that are not known."""
    metrics: pd.DataFrame
    """Lines of `metrics.jsonl`, or of Megatron-LM's log, a row each by iteration; of an iteration that was run twice,
    the later line. Columns are the keys that any line has, and a figure that a line lacks is missing."""
    upstream: UpstreamLog | None
    """What Megatron-LM's logs say, in a run of it."""
    config: str
    experiment: Experiment | None
    """What `config` says; None, with a note, where this version of tdpp cannot read it."""
    overrides: tuple[str, ...]
    provenance: Mapping[str, Any]
    node_states: Mapping[str, Mapping[str, Any]]
    failures: tuple[RankFailure, ...]
    memory: Mapping[int, Mapping[str, float]]
    """MiB by rank that reported it and by kind, as in `memory/rank-*.json`."""
    notes: tuple[str, ...]
    """What is missing, one sentence each."""
    memory_course: Mapping[int, pd.Series] = field(default_factory=dict)
    """MiB over iterations, by rank that noted it."""
    machines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each node is made of, by its name, where it was noted."""
    profiles: Sequence[ProfileFile] = ()
    """What profilers left in its folder."""
    traffic: Mapping[int, Traffic] = field(default_factory=dict)
    """What each rank that counted it sent."""
    decisions: tuple[Decision, ...] = ()
    """About the batch, of a run whose batch or shares adapt."""
    expert_loads: Mapping[int, Sequence[Sequence[float]]] = field(default_factory=dict)
    """[layers][experts] by iteration: tokens over the mean of the layer, of a model that counts them."""
    regroupings: tuple[Regrouping, ...] = ()
    """The starts of an elastic run with other plans."""
    log: Path | None = None
    """Where it was read from, if not from a run folder: then there is no configuration, provenance or state."""

    @property
    def reached(self) -> int:
        """The last iteration that is logged; 0 before the first."""
        return int(self.metrics["iteration"].max()) if len(self.metrics) else 0

    @property
    def micro_batch_numbers(self) -> int:
        """How many numbers micro-batches have at most, also after a decision."""
        shares = [one.shares for one in self.decisions]
        shares += [of for one in self.regroupings for of in (one.shares_before, one.shares)]
        return max([self.plan.micro_batch_numbers, *(max(counts, default=0) for counts in shares)])

    def known(self, key: str) -> pd.Series:
        """The figures of a metric, by iteration, where it was logged."""
        metrics = self.metrics.set_index("iteration")
        return metrics[key].dropna() if key in metrics else pd.Series(dtype="float64")

    def lines(self) -> list[dict[str, Any]]:
        """`metrics` as the lines that it was read from."""
        rows = self.metrics.to_dict("records")
        return [{str(name): value for name, value in row.items() if not pd.isna(value)} for row in rows]

    @property
    def kind(self) -> str:
        """What the pages show, for their heads."""
        return "tdpp run" if self.log is None else "log of Megatron-LM"


def read(run: RunDir) -> Record:
    """Reads a run folder.

    Raises:
        ReportError: there is no `plan.json`.
        RunFolderError: `plan.json` is not a plan.
    """
    if not run.plan.exists():
        raise ReportError(
            f"{run.path} has no plan.json: its launch is still under way, or was interrupted before it wrote one"
        )
    notes: list[str] = []
    plan = _with_names(run, run.read_plan(), notes)
    config = _text(run.config, notes)
    # There is no such file before the first decision, as in runs that make none.
    decided = decisions(_lines(run.decisions, MOST_METRICS_BYTES, notes), notes) if run.decisions.exists() else ()
    experts = _lines(run.experts, MOST_METRICS_BYTES, notes) if run.experts.exists() else ()
    memory = _by_rank(run, plan.ranks, run.rank_memory, _Memory, notes)
    return Record(
        name=run.name,
        diff=run.diff,
        plan=plan,
        metrics=metrics_frame(metrics_lines(_lines(run.metrics, MOST_METRICS_BYTES, notes), run.metrics.name, notes)),
        upstream=None,
        config=config,
        experiment=_experiment(run, plan, notes) if config else None,
        overrides=tuple(line for line in _text(run.overrides, notes).splitlines() if line),
        provenance=_provenance(run, notes),
        node_states={
            node.name: _json(run, run.node_state(node.name), notes) for node in (plan.nodes[rank] for rank in plan.used)
        },
        failures=tuple(_failures(run, plan, notes)),
        machines=_machines(run, plan, notes),
        memory={rank: one.mib for rank, one in memory.items()},
        memory_course={rank: one.course.series for rank, one in memory.items() if one.course},
        profiles=profile_files(run),
        traffic=_by_rank(run, plan.ranks, run.rank_traffic, Traffic, notes),
        decisions=tuple(one for one in decided if isinstance(one, Decision)),
        expert_loads=expert_loads(experts, run.experts.name, notes),
        regroupings=tuple(one for one in decided if isinstance(one, Regrouping)),
        notes=tuple(notes),
    )


def _with_names(run: RunDir, plan: Plan, notes: list[str]) -> Plan:
    """With the names of a module's blocks, where rank 0 has found them out."""
    if plan.blocks is not None or not plan.model.traits.user_code or not run.blocks.exists():
        return plan
    try:
        return Plan.parse({**plan.as_json(), "blocks": _json(run, run.blocks, notes).get("blocks")}, run.path)
    except PlanFault as fault:
        notes.append(f"{run.blocks.name}: {fault}")
        return plan


def _text(path: Path, notes: list[str]) -> str:
    try:
        return read_text(path, errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is not there")
    except RunFolderError as error:
        notes.append(str(error))
    return ""


def _lines(path: Path, most: int, notes: list[str]) -> Iterator[str]:
    """Yields the lines of a log of at most so many bytes."""
    try:
        with opened(path, most) as file:
            text = LogText(file)
            for line in text:
                yield line.rstrip("\n")
            notes.extend(f"{path.name}: {note}" for note in text.notes)
    except FileNotFoundError:
        notes.append(f"{path.name} is not there")
    except RunFolderError as error:
        notes.append(str(error))


def _experiment(run: RunDir, plan: Plan, notes: list[str]) -> Experiment | None:
    from conf.compose import read_experiment  # Hydra, which reports of logs do without, takes a while

    try:
        experiment = read_experiment(run.config)
    except (ConfigError, RunFolderError) as error:
        why = f"cannot be read: {str(error).splitlines()[0]}"
    else:
        unknown = {node.group for node in plan.planned_nodes} - experiment.cluster.groups.keys()
        if not unknown:
            return experiment
        why = f"has no group {', '.join(sorted(unknown))}, but plan.json has nodes of it"
    notes.append(f"no prediction, prices or peak rates: config.yaml {why}")
    return None


def _json(run: RunDir, path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        value = run.read_json(path)
    except RunFolderError as error:
        notes.append(str(error))
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.relative_to(run.path)} " + ("is not there" if value is None else "is not a JSON object"))
        return {}
    return value


def _failures(run: RunDir, plan: Plan, notes: list[str]) -> list[RankFailure]:
    """Failures, causes before symptoms, then by time; in a rehearsal with the nodes that ranks stand for."""
    read = _by_rank(run, plan.ranks, run.rank_error, RankFailure, notes)
    found = [replace(one, rank=rank, node=plan.node_of(rank)) for rank, one in read.items()]
    return sorted(found, key=lambda failure: (failure.symptom, failure.unix))


def _by_rank(
    run: RunDir, ranks: Sequence[Place], path: Callable[[int], Path], kind: type[T], notes: list[str]
) -> dict[int, T]:
    """Reads a file of each rank, where it is there."""
    read = {rank.rank: _typed(run, path(rank.rank), kind, notes) for rank in ranks}
    return {rank: content for rank, content in read.items() if content is not None}


def _machines(run: RunDir, plan: Plan, notes: list[str]) -> dict[str, Mapping[str, Any]]:
    """Returns what is noted of each node: runs of earlier versions have nothing, and neither have rehearsals."""
    names = [plan.nodes[rank].name for rank in plan.used]
    return {name: _json(run, path, notes) for name in names if (path := run.node_machine(name)).exists()}


def _provenance(run: RunDir, notes: list[str]) -> Mapping[str, Any]:
    """Returns provenance.json as it is, where what is used of it is sound."""
    content = _json(run, run.provenance, notes)
    try:
        typed(_Origin, content, str(run.provenance))
    except RunFolderError as error:
        notes.append(str(error))
        return {}
    return content


def _typed(run: RunDir, path: Path, kind: type[T], notes: list[str]) -> T | None:
    """A JSON file that need not be there."""
    try:
        return run.read(path, kind)
    except RunFolderError as error:
        notes.append(str(error))
        return None


@dataclass(frozen=True, kw_only=True)
class _Course:
    iterations: tuple[Count, ...]
    mib: tuple[Mib, ...]

    def __post_init__(self) -> None:
        """Raises ValueError where they are no pairs in the order of the iterations."""
        if len(self.iterations) != len(self.mib):
            raise ValueError(f"course has {len(self.iterations)} iterations and {len(self.mib)} mib")
        if any(after <= before for before, after in pairwise(self.iterations)):
            raise ValueError("course.iterations must grow")

    @property
    def series(self) -> pd.Series:
        return pd.Series(self.mib, self.iterations, dtype="float64")


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """memory/rank-*.json."""

    mib: dict[str, Mib]
    course: _Course | None = None


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """traffic/rank-*.json: what a rank sent for so many samples, in bytes by kind."""

    samples: int
    bytes: dict[str, Bytes]


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """provenance.json."""

    unix: Unix | None = None
    commit: str | None = None
    changed: tuple[str, ...] | None = None
