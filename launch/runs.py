"""`tdpp runs`: every run, a line each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence

from conf.errors import RunFolderError
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
    seen = list(_observed(RunDir.all(arguments.runs_dir)))
    if arguments.json:
        print(json.dumps([as_json(run, observation, decide(observation), ()) for run, observation in seen]))
    else:
        print_table(COLUMNS, [run_row(run.name, observation) for run, observation in seen])
    return 0


def _observed(runs: Iterable[RunDir]) -> Iterator[tuple[RunDir, Observation]]:
    """What can be seen of each run that is not deleted meanwhile."""
    for run in runs:
        try:
            observation = observe(run)
        except (FileNotFoundError, RunFolderError):
            if RunDir.is_one(run.path):
                raise
            continue
        yield run, observation


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
