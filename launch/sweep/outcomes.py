"""What `tdpp launch` prints at its end, its exit code, and the values by which a sweeper chooses what to try next."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence

from conf.run_folder.iteration_time import LineTime, iteration_time
from conf.visible import plural, visible
from launch.control.follow import wait
from launch.control.planning.dry_run import DryRun
from launch.errors import LaunchError
from launch.judge.state import State, next_step, print_next, word_for
from launch.judge.status_text import COLUMNS, run_row
from launch.judge.verdict import decide, judge
from launch.observe.look import observe_all
from launch.screen import print_table
from launch.sweep.start import Outcome
from launch.tracking.run_info import Subject
from launch.tracking.series import MetricsFile, Point, Points

SKIPPED = "skipped: exists already"
MORE = "(--full shows every rank, the commands of every node, and plan.json)"


def report_single(outcomes: Sequence[Outcome], full: bool = False) -> int:
    """The verdict of the run, or its dry run, maybe in full. Without outcome Hydra itself has answered, for example to
    --cfg. Raises TdppError: the run could not be started."""
    code = 0
    for outcome in outcomes:
        if outcome.dry_run is not None:
            print(outcome.dry_run.full() if full else f"{outcome.dry_run.readable()}\n\n{MORE}", flush=True)
        if outcome.error is not None:
            raise outcome.error
        if outcome.run is not None:
            verdict = judge(outcome.run)
            skipped = f" ({SKIPPED})" if outcome.skipped else ""
            print(f"{outcome.run.name}: {verdict.state}, {verdict.reason}{skipped}", flush=True)
            print_next(next_step(verdict.state, word_for(outcome.run)))
            code = verdict.exit_code
    return code


def report_sweep(outcomes: Sequence[Outcome], combinations: int, metric: str | None = None, full: bool = False) -> int:
    """A table of the runs, or their dry runs, then each combination that could not be tried; 0 only if none failed in
    any way."""
    rows, wrong = [], False
    seen_of = iter(observe_all(outcome.run for outcome in outcomes if outcome.run is not None))
    named = list(zip(outcomes, differing([outcome.overrides for outcome in outcomes]), strict=True))
    shown = [(overrides, outcome.dry_run) for outcome, overrides in named if outcome.dry_run is not None]
    if full:
        for overrides, dry_run in shown:
            print(f"# {overrides}\n{dry_run.full()}\n")
    elif shown:
        print("\n".join(differences(shown)))
    for outcome, overrides in named:
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
    failed: dict[str, list[str]] = {}
    for outcome, overrides in named:
        if outcome.error is not None:
            failed.setdefault(str(outcome.error), []).append(overrides)
            wrong = True
    for text, of in failed.items():
        print(f"tdpp: error: {_of_combinations(text, of, combinations)}", file=sys.stderr)
    if rows:
        names = {outcome.run.path.parent for outcome in outcomes if outcome.run is not None}
        print_next(f"tdpp report {' '.join(sorted(map(shlex.quote, map(str, names))))}  # the runs, compared")
    if missing := combinations - len(outcomes):
        print(f"{missing} of {plural(combinations, 'combination')} not started", file=sys.stderr)
    return int(wrong)


def _of_combinations(error: str, of: Sequence[str], combinations: int) -> str:
    """What is wrong with these of a number of combinations."""
    if len(of) > 1:
        which = f"all {len(of)}" if len(of) == combinations else f"{len(of)} of {combinations}"
        return f"{which} combinations, such as {of[0]}: {error}"
    return error if error.startswith((f"{of[0]} ", f"{of[0]}:")) else f"{of[0]}: {error}"


def differing(combinations: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each that not all have; all of them where none differs."""
    common = set.intersection(*map(set, combinations)) if combinations else set()
    return [" ".join([override for override in given if override not in common] or given) for given in combinations]


def differences(shown: Sequence[tuple[str, DryRun]]) -> Iterator[str]:
    """The first combination's dry run, then a line for each other one, and beneath it what it starts otherwise."""
    (overrides, first), *others = shown
    yield f"# {overrides}\n{first.readable()}\n\n{MORE}"
    if others:
        yield f"\n{plural(len(others), 'more combination')}, each with what differs from the first:"
    known = {name: _lines(text) for name, text in first.scripts_and_nodes().items()}
    for overrides, other in others:
        same = other.plan_line == first.plan_line
        yield f"# {overrides}: {'the same plan' if same else other.plan_line}"
        texts = {name: _lines(text) for name, text in other.scripts_and_nodes().items()}
        for name in dict.fromkeys((*known, *texts)):
            ours, theirs = texts.get(name, []), known.get(name, [])
            changed = [f"- {line}" for line in theirs if line not in ours]
            changed += [f"+ {line}" for line in ours if line not in theirs]
            yield from (f"    {name}: {line}" for line in changed)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


_TIME, _RATES = "iteration_ms", "throughput/"


class NoValue(LaunchError):
    """A combination that has no value of the sweep's metric."""


def value_of(outcome: Outcome, metric: str) -> float:
    """Waits until the run is over. Raises NoValue: there is no run, it has not succeeded, or it did not log the
    metric."""
    run = outcome.run
    if run is None:
        raise NoValue(f"a combination has no {metric}, because its run was not started")
    wait(run)
    verdict = judge(run)
    if verdict.state is not State.succeeded:
        raise NoValue(f"{run.name} has no {metric}: {verdict.state}, {verdict.reason}")
    made = Points(Subject.of(run).scale)
    lines, _ = MetricsFile(run.metrics).new_lines()
    points = [made.of(line) for line in lines]
    value = in_points(points, metric)
    if value is None:
        logged = ", ".join(sorted({name for point in points for name in point.values}))
        raise NoValue(f"{run.name} has no {metric}: it logged {logged}")
    print(visible(f"{run.name}: {metric} {value:.6g}"), file=sys.stderr, flush=True)
    return value


def in_points(points: Sequence[Point], metric: str) -> float | None:
    """The last value; of speeds the median, without the first, which warms up, unless it is alone; of `iteration_ms`
    what `tdpp runs` shows, which is per sample where the batch changes."""
    found = [point.values[metric] for point in points if metric in point.values]
    if not found:
        return None
    if metric == _TIME:
        time = iteration_time(_times(points))
        return None if time is None else time.ms
    return statistics.median(found[1:] or found) if metric.startswith(_RATES) else found[-1]


def _times(points: Sequence[Point]) -> Iterator[LineTime]:
    for point in points:
        if _TIME in point.values:
            samples = point.values.get("samples")
            yield LineTime(point.iteration, point.values[_TIME], None if samples is None else int(samples))
