"""What `tdpp launch` prints at its end, and the exit code that goes with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.judge.runs_table import COLUMNS, run_row
from launch.judge.verdict import decide, judge
from launch.observe.look import observe_all
from launch.screen.table import print_table
from launch.sweep.combinations import Outcome

SKIPPED = "skipped: exists already"


def report_single(outcomes: Sequence[Outcome]) -> int:
    """The verdict of the run. Without outcome Hydra itself has answered, for example to --cfg.

    Raises:
        TdppError: the run could not be started.
    """
    code = 0
    for outcome in outcomes:
        if outcome.dry_run is not None:
            print(outcome.dry_run, flush=True)
        if outcome.error is not None:
            raise outcome.error
        if outcome.run is not None:
            verdict = judge(outcome.run)
            skipped = f" ({SKIPPED})" if outcome.skipped else ""
            print(f"{outcome.run.name}: {verdict.state}, {verdict.reason}{skipped}")
            code = verdict.exit_code
    return code


def report_sweep(outcomes: Sequence[Outcome], combinations: int, metric: str | None = None) -> int:
    """A table of the runs, then each combination that could not be tried; 0 only if none failed in any way."""
    rows, wrong = [], False
    seen_of = iter(observe_all(outcome.run for outcome in outcomes if outcome.run is not None))
    named = list(zip(outcomes, differing([outcome.overrides for outcome in outcomes]), strict=True))
    for outcome, overrides in named:
        if outcome.dry_run is not None:
            print(f"# {overrides}\n{outcome.dry_run}\n")
        if outcome.run is not None:
            seen = next(seen_of)
            name, verdict, *rest = run_row(outcome.run.name, seen)
            skipped = " (skipped)" if outcome.skipped else ""
            value = "-" if outcome.value is None else f"{outcome.value:.6g}"
            rows.append([name, overrides, verdict + skipped, *rest, *([value] if metric else [])])
            wrong = wrong or decide(seen).exit_code != 0
    if rows:
        print_table([COLUMNS[0], "overrides", *COLUMNS[1:], *([metric] if metric else [])], rows)
    sys.stdout.flush()
    for outcome, overrides in named:
        if outcome.error is not None:
            text = str(outcome.error)
            says_it = text.startswith((f"{overrides} ", f"{overrides}:"))
            print(f"tdpp: error: {text if says_it else f'{overrides}: {text}'}", file=sys.stderr)
            wrong = True
    if missing := combinations - len(outcomes):
        print(f"{missing} of {combinations} combinations were not started", file=sys.stderr)
    return int(wrong)


def differing(combinations: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each that not all have; all of them where none differs."""
    common = set.intersection(*map(set, combinations)) if combinations else set()
    return [" ".join([override for override in given if override not in common] or given) for given in combinations]
