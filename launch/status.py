"""`tdpp status`: the verdict on a run, then what it rests on."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.rundir import RunDir
from launch.arguments import add_run, chosen_run
from launch.complaints import Complaint, complaints
from launch.observe import Observation, observe
from launch.verdict import Verdict, decide, median_ms

STDERR_BYTES = 256 * 1024
"""Of each node's stderr, its end."""
SHOWN = 5
WIDTH = 160
"""Of a line of stderr that is shown."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tdpp status", description="Judge a run; the exit code tells the verdict.")
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    arguments = parser.parse_args(argv)
    run = chosen_run(arguments)
    seen = observe(run)
    verdict = decide(seen)
    found = complaints({node.name: _tail(run.node_err(node.name)) for node in seen.nodes})
    if arguments.json:
        print(json.dumps(as_json(run, seen, verdict, found)))
    else:
        print(as_text(run, verdict, found))
    return verdict.exit_code


def as_text(run: RunDir, verdict: Verdict, found: Sequence[Complaint]) -> str:
    lines = [f"{run.name}: {verdict.state}, {verdict.reason}", *(f"  {line}" for line in verdict.evidence)]
    if found:
        lines.append("  stderr, warnings left out:")
        lines += [f"    {c.count} x {_shortened(c.text)} ({', '.join(c.nodes)})" for c in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"    and {len(found) - SHOWN} other lines: tdpp logs --err {run.name}")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def as_json(run: RunDir, seen: Observation, verdict: Verdict, found: Sequence[Complaint]) -> dict[str, Any]:
    last = seen.log[-1] if seen.log else None
    return {
        "run": run.name,
        "path": str(run.path),
        "state": verdict.state,
        "rule": verdict.rule,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "evidence": list(verdict.evidence),
        "iteration": last.iteration if last else 0,
        "iterations": seen.iterations,
        "loss": last.loss if last and last.loss is not None and math.isfinite(last.loss) else None,  # JSON has no NaN
        "ms_per_iteration": median_ms(seen) if last else None,
        "nodes": [asdict(node) for node in seen.nodes],
        "gpus": {node.node: asdict(node.entries[-1]) for node in seen.gpus if node.entries},
        "errors": [asdict(error) for error in seen.errors],
        "stderr": [asdict(complaint) for complaint in found],
    }


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
