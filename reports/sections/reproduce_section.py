"""How to run the same again: commands, versions, the configuration as it was submitted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from reports.figures.page import bullets, table
from reports.readers.record import Record


def reproduce_section(record: Record) -> str:
    """The section of a run's page, as HTML."""
    provenance = record.provenance
    rows = list(_flat(provenance))
    steps = []
    if provenance.get("commit"):
        steps.append(shlex.join(["git", "checkout", str(provenance["commit"])]))
        changed = [str(line) for line in provenance.get("changed") or ()]
        if any(line[:2] != "??" for line in changed):
            steps.append(shlex.join(["git", "apply", str(record.diff)]))
        steps += [f"# not in the patch, for git did not track it: {line[3:]}" for line in changed if line[:2] == "??"]
    steps.append(shlex.join(["tdpp", "launch", *record.overrides]))
    known = table(("what", "value"), rows) if rows else '<p class="none">no provenance is known</p>'
    return (
        f'<section><h2>Reproduce</h2><pre class="command">{escape(chr(10).join(steps))}</pre>'
        f"<details><summary>What it ran with</summary>{known}</details></section>"
    )


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested mappings: dotted key and text."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        yield key, ", ".join(map(str, value))
    elif key == "unix":
        yield "time", datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def configuration_section(record: Record) -> str:
    """The section of a run's page, as HTML."""
    overrides = bullets(record.overrides) if record.overrides else '<p class="none">no overrides: the defaults</p>'
    return (
        f"<section><h2>Configuration</h2><h3>Overrides as submitted</h3>{overrides}"
        f"<details><summary>config.yaml as submitted</summary><pre>{escape(record.config)}</pre></details></section>"
    )
