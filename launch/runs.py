"""`tdpp runs`: every run, a line each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from conf.rundir import RunDir
from launch.arguments import add_runs_dir
from launch.observe import Observation, observe
from launch.status import as_json
from launch.table import print_table
from launch.verdict import decide, median_ms

COLUMNS = ("run", "verdict", "iteration", "loss", "ms/iteration")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tdpp runs", description="List the runs, oldest first, with their verdicts.")
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list, an object for each run as in 'tdpp status'")
    arguments = parser.parse_args(argv)
    runs = list(RunDir.all(arguments.runs_dir))
    if arguments.json:
        seen = [(run, observe(run)) for run in runs]
        print(json.dumps([as_json(run, observation, decide(observation), ()) for run, observation in seen]))
    else:
        print_table(COLUMNS, [run_row(run.name, observe(run)) for run in runs])
    return 0


def run_row(name: str, seen: Observation) -> list[str]:
    """The cells of `COLUMNS` for a run."""
    last = seen.log[-1] if seen.log else None
    return [
        name,
        str(decide(seen).state),
        f"{last.iteration if last else 0}/{seen.iterations}",
        f"{last.loss:.4f}" if last and last.loss is not None else "-",
        f"{median_ms(seen):.1f}" if last else "-",
    ]
