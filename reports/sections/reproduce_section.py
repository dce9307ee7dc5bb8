"""How to run the same again: commands, versions, the configuration as it was submitted."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from html import escape
from itertools import starmap
from typing import Any

from reports.figures.page import bullets, copyable, leaves, table
from reports.readers.record import Record


def reproduce_section(record: Record) -> str:
    """The section of a run's page, as HTML."""
    provenance = record.provenance
    rows = list(starmap(_row, leaves(provenance)))
    steps = []
    if provenance.get("commit"):
        steps.append(shlex.join(["git", "checkout", str(provenance["commit"])]))
        changed = [str(line) for line in provenance.get("changed") or ()]
        if any(line[:2] != "??" for line in changed):
            steps.append(shlex.join(["git", "apply", str(record.diff)]))
        steps += [
            f"# not in the patch, because git does not track it: {line[3:]}" for line in changed if line[:2] == "??"
        ]
    steps.append(shlex.join(["tdpp", "launch", *record.overrides]))
    known = table(("what", "value"), rows) if rows else '<p class="none">no provenance recorded</p>'
    return (
        f"<section><h2>Reproduce</h2>{copyable(chr(10).join(steps))}"
        f"<details><summary>Software and machines</summary>{known}</details></section>"
    )


def _row(key: str, value: Any) -> tuple[str, str]:
    if isinstance(value, list):
        return key, ", ".join(map(str, value))
    if key == "unix":
        return "time", datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
    return key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def configuration_section(record: Record) -> str:
    """The section of a run's page, as HTML."""
    overrides = bullets(record.overrides) if record.overrides else '<p class="none">no overrides, only defaults</p>'
    return (
        f"<section><h2>Configuration</h2><h3>Overrides as submitted</h3>{overrides}"
        f"<details><summary>config.yaml as submitted</summary><pre>{escape(record.config)}</pre></details></section>"
    )
