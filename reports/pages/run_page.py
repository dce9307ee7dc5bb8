"""The page of one run: the answer first, then the plan, the course, the stages, and how to reproduce it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from html import escape

from conf.run_folder.judgement import Findings
from conf.visible import plural
from fasop.simulation.predict import Prediction
from megatron_ext.contract.plan import Plan
from reports.facts.course import axes, beside, course
from reports.facts.frames import measured
from reports.facts.statistics import Statistics, time_of
from reports.figures.course import SCRIPTS as COURSE
from reports.figures.course import course_charts
from reports.figures.embed import NOTHING, page_with_figures
from reports.figures.page import connecting, data, emulated, missing, table
from reports.path.why import Unexplained, Why
from reports.readers.events import Timeline
from reports.readers.gpus import GpuReport
from reports.readers.record import Record
from reports.readers.upstream_log import UpstreamLog
from reports.sections.adaptive_section import adaptive_section, elastic_section, experts_section, islands_section
from reports.sections.cause_section import cause_section
from reports.sections.expected_section import Took, expected_section, run_before_section
from reports.sections.figures_section import figures_section
from reports.sections.findings_section import failures_section, nodes_section, verdict_section
from reports.sections.gpu_section import gpu_section
from reports.sections.plan_section import configuration_section, plan_section, profiles_section, reproduce_section
from reports.sections.stages_section import memory_section, stages_section, stragglers_section

LIVE = '<aside id="live"><b>Live</b> <span id="live-time"></span> <span id="live-said" role="status"></span></aside>'


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What a served run is compared with."""

    record: Record | None
    """The run before; None where there is none."""
    link: str | None
    """To its page."""


@dataclass(frozen=True, kw_only=True)
class Follows:
    """How a page follows its run."""

    seconds: float
    """Until it asks the server again."""
    unix: float
    """When its parts were made."""


MEMORY = ("rank", "stage", "allocated MiB", "max allocated MiB", "reserved MiB", "max reserved MiB")


def sections(
    record: Record,
    timeline: Timeline,
    figures: Statistics,
    findings: Findings | None = None,
    prediction: Prediction | None = None,
    gpus: GpuReport | None = None,
    why: Why | Unexplained | None = None,
    beside: Beside | None = None,
) -> list[str]:
    """The parts of the page `index.html` of a run, as HTML. What is None has no section."""
    notes = [*record.notes, *timeline.notes]
    over = record.log is not None or (findings is not None and findings.over)
    if record.plan.timeline and not figures.steady.any():
        notes.append(
            f"the events have no complete iteration after the first one{'' if over else ' yet'}, so there is no bubble "
            "and no time per stage"
        )
    failures = failures_section(record, findings, int(figures.iterations[-1]) if len(figures.iterations) else None)
    parts = [
        verdict_section(findings.verdict) if findings else "",
        failures,
        run_before_section(record, prediction, beside.record, beside.link) if beside else "",
        "" if failures else cause_section(why, record.plan, record.overrides),
        figures_section(record, figures),
        missing(notes),
        nodes_section(findings) if findings else "",
        plan_section(record.plan),
        adaptive_section(record),
        elastic_section(record),
        course_section(record, figures, prediction, beside.record if beside else None),
        experts_section(record),
        *_stages(record, timeline, figures, prediction),
        islands_section(record, timeline, figures),
        cause_section(why, record.plan, record.overrides) if failures else "",  # how to be faster is no question before
        stragglers_section(figures, record.plan),
        gpu_section(gpus, record) if gpus else "",
        profiles_section(record),
        *([] if record.log else [reproduce_section(record), configuration_section(record)]),
    ]
    return [part for part in parts if part]


def render(record: Record, parts: Sequence[str], follows: Follows | None = None) -> str:
    """The page, as HTML. One that `follows` its run asks the server for parts that have changed (`static/live.js`)."""
    body = [
        emulated(record.plan.rehearsal),
        f'<header><p class="crumbs">{record.kind}</p><h1>{escape(record.name)}</h1>'
        '<nav><a href="timeline.html">Timeline of all ranks →</a></nav></header>',
        f"<main>{'' if follows is None else LIVE}",
        *(parts if follows is None else [f'<div data-part="{digest(part)}">{part}</div>' for part in parts]),
        "</main>",
    ]
    title, content = f"{record.name} – tdpp", "\n".join(body)
    if follows is None:
        return page_with_figures(title, content, COURSE)
    content += data("live-data", {"seconds": follows.seconds, "unix": follows.unix})
    return connecting(page_with_figures(title, content, (*COURSE, "live.js"), draws=True))


def digest(part: str) -> str:
    """What a part is known by: of two that differ, another one."""
    return hashlib.sha256(part.encode(errors="replace")).hexdigest()[:12]


def _stages(record: Record, timeline: Timeline, figures: Statistics, prediction: Prediction | None) -> list[str]:
    """The sections that go stage by stage."""
    parts = []
    if record.upstream is None or len(timeline.events):
        parts.append(stages_section(record, figures, prediction, timeline.uncertainty_ns))
    if record.upstream is not None:
        parts.append(_upstream(record.upstream, record.plan))
    if prediction is not None and (took := _took(record, figures)) is not None:
        parts.append(expected_section(prediction, measured(figures, record.plan, took.ms) if took.terms else {}, took))
    return parts if prediction is None else [*parts, memory_section(record, prediction)]


def _took(record: Record, figures: Statistics) -> Took | None:
    """An iteration, to compare it with the prediction; None where nothing is known yet."""
    time, batch = time_of(record), record.plan.global_batch_size
    if (time is None or time.alone) and figures.usual_period_ms is not None:
        # The only line of the log has the first iteration in it, which the medians of the terms have not.
        return Took(ms=figures.usual_period_ms, basis=f" by its events ({plural(len(figures.usual), 'steady one')})")
    if time is None:
        return None
    if time.per_sample:
        basis = f" with the first batch ({batch} samples of {time.figure} ms)"
        return Took(ms=time.ms * batch, basis=basis, terms=False)
    return Took(ms=time.ms)


def _upstream(log: UpstreamLog, plan: Plan) -> str:
    """What Megatron-LM itself says of times and memory."""
    stages = {rank.rank: str(rank.stage) for rank in plan.ranks}
    times = [
        (name, "–" if least is None else f"{least:,.2f}", f"{largest:,.2f}")
        for name, (least, largest) in log.timers.items()
    ]
    memory = [
        (str(rank), stages.get(rank, "–"), *(f"{mib:,.1f}" for mib in astuple(mib_of)))
        for rank, mib_of in log.memory.items()
    ]
    return (
        "<section><h2>Times across ranks</h2>"
        + (table(("timer", "min ms", "max ms"), times, kind="numeric") if times else _none("no timers"))
        + '<p class="note">Megatron-LM&apos;s timers; medians of the log lines after the first.</p></section>'
        + "<section><h2>Memory</h2>"
        + (table(MEMORY, memory, kind="numeric") if memory else _none("no memory figures"))
        + "</section>"
    )


def _none(what: str) -> str:
    return f'<p class="none">{what} in the logs</p>'


def course_section(
    record: Record, figures: Statistics, prediction: Prediction | None = None, before: Record | None = None
) -> str:
    """The section of a run's page, as HTML; `before` is a run whose lines are drawn beside its own."""
    charts = course(record, figures, prediction)
    if before is not None:
        charts = beside(charts, before)
    drawn = course_charts(charts, axes(record), axes(before) if before else None) if charts else NOTHING
    return f"<section><h2>Course</h2>{drawn}</section>"
