"""The commands that follow on a run: how it goes on, and how it is launched with other values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from conf.reading.words import with_values
from reports.readers.judgement import Findings
from reports.readers.record import Record


class NextStep(NamedTuple):
    """What to type, and what comes of it."""

    command: str
    means: str


def launch_with(overrides: Sequence[str], changes: Mapping[str, str]) -> str:
    """`tdpp launch` with these overrides, of which `changes` take the place of those for the same keys."""
    return shlex.join(["tdpp", "launch", *with_values(overrides, changes)])


def ways_on(record: Record, findings: Findings) -> list[NextStep]:
    """Returns the ways on from a failed run, the most likely first; none where it goes on or was read from a log."""
    verdict, plan, path = findings.verdict, record.plan, record.diff.parent
    if record.log is not None or verdict.state in ("succeeded", "running", "starting"):
        return []
    resume = shlex.join(["tdpp", "launch", f"resume={path}"])
    saved = (path / "checkpoints/latest").exists()
    if not findings.over:
        again = resume if plan.resumable else launch_with(record.overrides, {})
        means = "Stop it and resume from its newest checkpoint" if saved else "Stop it and start it again"
        return [NextStep(f"{shlex.join(['tdpp', 'stop', str(path)])} && {again}", means)]
    weights = {"train.load": str(path)} if saved else {}
    from_weights = " from its saved weights" if saved else ""
    if findings.verdict.state == "not finite" or any(one.type == "NotFinite" for one in record.failures):
        lower = weights | {"train.lr": f"{plan.train.lr / 2:.6g}"}
        return [
            NextStep(launch_with(record.overrides, lower), f"Start a new run{from_weights} with half the learning rate")
        ]
    steps = []
    if (fewer := plan.micro_batch_size // 2) and _out_of_memory(record, findings) and plan.adapt is None:
        smaller = weights | {"parallel.micro_batch_size": str(fewer)}
        means = f"Start a new run{from_weights} with micro-batches of {fewer}, which take less memory"
        steps.append(NextStep(launch_with(record.overrides, smaller), means))
    if plan.resumable:
        means = "Resume from its newest checkpoint" if saved else "Start it again; it saved no checkpoint"
        steps.append(NextStep(resume, means))
    if not plan.resumable or plan.model.traits.user_code:
        means = f"Start a new run{from_weights}"
        means += " once model.code is changed" if plan.resumable else "; this one cannot be resumed"
        steps.append(NextStep(launch_with(record.overrides, weights), means))
    return steps


def _out_of_memory(record: Record, findings: Findings) -> bool:
    causes = (one for one in record.failures if not one.symptom)
    return findings.verdict.rule == "out-of-memory" or any(
        one.type == "OutOfMemoryError" or re.search(r"\bout of memory\b", one.message) for one in causes
    )
