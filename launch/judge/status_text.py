"""What was found of a run: as plain lines, as JSON, and as the cells of tables of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from conf.run_folder.judgement import LineGroup
from conf.run_folder.rundir import RunDir
from conf.visible import loss_text, plural, shortened, span
from launch.judge.evidence import Evidence, short_plan
from launch.judge.findings import STDERR_BYTES, Findings
from launch.judge.progress import costs, outlook, samples_per_s, time_of
from launch.judge.verdict import Verdict, decide
from launch.machine.job_states import compressed
from launch.observe.observation import Observation, RunKind
from launch.screen import some

SHOWN = 5
"""Groups of lines of stderr; the first ones."""
STDERR_NOTE = f"the last {STDERR_BYTES // 1024} KiB of each node, without warnings"


def as_text(found: Findings) -> str:
    run, verdict = found.run, found.verdict
    lines = [f"{run.name}: {verdict.state}, {verdict.reason}", *(f"  {fact}" for fact in evidence(found))]
    if found.culprit is not None and found.culprit.said:
        lines.append(f"  log of node {found.culprit.node}: {found.culprit.said[0].path}")
    if found.stderr:
        lines.append(f"  stderr ({STDERR_NOTE}):")
        lines += [f"    {line}" for line in group_lines(found.stderr[:SHOWN])]
    if len(found.stderr) > SHOWN:
        lines.append(f"    and {plural(len(found.stderr) - SHOWN, 'other line')}: tdpp logs --err {run.name}")
    if found.agents:
        lines.append("  output of agents that are gone, or of their job:")
        lines += [f"    {line}" for line in group_lines(found.agents[-SHOWN:])]
    return "\n".join(lines)


def evidence(found: Findings) -> list[Evidence]:
    """What the verdict rests on, where nodes run something else than was submitted, and what of the run's
    files is damaged."""
    mismatches = [Evidence("mismatch", line) for line in found.mismatches]
    faults = [Evidence("fault", text) for text in found.faults if text != found.verdict.reason]
    return [*found.verdict.facts, *mismatches, *faults]


def group_lines(found: Sequence[LineGroup]) -> list[str]:
    """Whole, for the remedy of an error stands at its end."""
    return [f"{group.count} x {shortened(group.text)} ({some(group.nodes, SHOWN)})" for group in found]


def judged_as_json(run: RunDir, verdict: Verdict) -> dict[str, Any]:
    """All that there is to say of a run without a plan."""
    return {
        "run": run.name,
        "path": str(run.path),
        "state": verdict.state,
        "rule": verdict.rule,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "evidence": list(verdict.evidence),
    }


def as_json(found: Findings) -> dict[str, Any]:
    seen = found.seen
    last = seen.log[-1] if seen.log else None
    expected, cost, time = outlook(seen, found.verdict.state), costs(seen, found.verdict.state), time_of(seen)
    return judged_as_json(found.run, found.verdict) | {
        "kind": seen.kind,
        "launched_unix": seen.launched_unix,
        "took_s": seen.took_s,
        "plan": short_plan(seen.plan),
        "iteration": last.iteration if last else 0,
        "iterations": seen.iterations,
        "consumed_samples": last.consumed_samples if last else 0,
        "samples": seen.plan.train.samples,
        "epochs": seen.plan.train.epochs,
        "samples_per_s": samples_per_s(seen),
        "left_s": expected.left_s,
        "starts_unix": expected.starts_unix,
        "ends_unix": expected.ends_unix,
        "jobs": list(seen.job_ids),
        "saved": seen.saved,
        "dollars": None if cost is None else cost.dollars,
        "dollars_at_end": None if cost is None else cost.at_end,
        "max_cost": seen.plan.train.max_cost,
        "loss": last.loss if last and last.loss is not None and math.isfinite(last.loss) else None,  # JSON has no NaN
        "ms_per_iteration": time.ms if time and not time.per_sample else None,
        "ms_per_sample": time.ms if time and time.per_sample else None,
        "nodes": [asdict(node) for node in seen.nodes],
        "gpus": {node.node: asdict(node.entries[-1]) for node in seen.gpus if node.entries},
        "culprit": _culprit(found),
        "errors": [asdict(error) for error in seen.errors],
        "mismatches": list(found.mismatches),
        "faults": list(found.faults),
        "stderr": [asdict(group) for group in found.stderr],
        "agents": [asdict(group) for group in found.agents],
    }


def _culprit(found: Findings) -> dict[str, Any] | None:
    if found.culprit is None:
        return None
    logs = {str(said.path): list(said.lines) for said in found.culprit.said}
    return {"node": found.culprit.node, "ranks": list(found.culprit.ranks), "what": found.culprit.what, "logs": logs}


COLUMNS = ("run", "verdict", "iteration", "loss", "ms/iteration")
"""The columns of every table of runs."""
MORE_COLUMNS = ("kind", "age", "took", "left", "plan", "hosts")
"""The further columns of `tdpp runs`."""


def run_row(name: str, seen: Observation) -> list[str]:
    """The cells of `COLUMNS` for a run."""
    last = seen.log[-1] if seen.log else None
    return [
        name,
        str(decide(seen).state),
        _progress(seen),
        loss_text(last.loss) if last and last.loss is not None else "-",
        f"{time.cell} {time.spread.doubt(time.text)}" if last and (time := time_of(seen)) else "-",
    ]


def _progress(seen: Observation) -> str:
    """The last iteration of all; where the batch adapts they are not known, but its samples are."""
    last = seen.log[-1] if seen.log else None
    samples = seen.plan.train.samples
    if not seen.adapts or seen.goal is not None or samples is None:
        return f"{last.iteration if last else 0}/{seen.iterations}"
    if last is None:
        return "0"
    return f"{last.iteration} ({(last.consumed_samples or 0) / samples:.0%} of samples)"


def more_cells(seen: Observation) -> list[str]:
    """The cells of `MORE_COLUMNS` for a run."""
    took = seen.took_s
    return [
        str(seen.kind),
        span(round(max(0.0, seen.now_unix - seen.launched_unix))),
        "-" if took is None else span(took),
        outlook(seen, decide(seen).state).cell,
        short_plan(seen.plan),
        compressed(node.host for node in seen.nodes if node.host and seen.kind is not RunKind.rehearsal) or "-",
    ]
