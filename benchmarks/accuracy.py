"""python -m benchmarks.accuracy: iterations predicted before they run, beside what they then took; docs/accuracy.md.

No time of these runs goes into any prediction. `--only WORDS` runs those with the words in their name, and writes
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks import sleeping
from benchmarks.accuracy_cases import (
    ALONE,
    ENGINE,
    MODULES,
    OF_SAMPLES,
    PROFILED,
    PUBLISHED,
    REAL,
    REHEARSALS,
    Case,
    Ends,
    Published,
    given_profile,
    stood_for,
)
from benchmarks.sleeping import Pass
from conf.run_folder.rundir import RunDir
from fasop.costs.profiles.profile import Cost, LayerProfile
from fasop.costs.sizes import layer_parameters
from fasop.simulation.predict import Prediction, predict, predict_plan
from fasop.tables.accuracy import MeasuredStage
from reports.facts.measured import measure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
MEAN, WORST = 0.05, 0.10
"""Errors that the runs of the engine are to keep."""
ROUNDS = 3
"""Of profiles and runs of users' modules, in turn: the speed of a machine with other work changes within minutes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    sizes: str
    """Stages x replicas x tensor size."""
    partition: str
    nodes: str
    predicted_s: float
    measured_s: float
    load: float = 0.0
    """Processes that wanted a core, on average over about the minute before the end."""
    passes_error: float | None = None
    """For a run of a user's module: the same as `error`, of the passes of a micro-batch through all stages alone."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def engine(case: Case) -> Outcome:
    """A run of the engine whose layers sleep for as long as the prediction's profile says."""
    prediction = predict_plan(stood_for(case, ends=ends()))
    with tempfile.TemporaryDirectory() as folder:
        return outcome(case, prediction, sleeping.run(Path(folder), case.experiment, _slept(case)))


@cache
def ends() -> Ends:
    """What a rank does besides layers that sleep: from two runs of one rank."""
    return _profiled(ALONE, _slept)[1]


def computing(profile: LayerProfile) -> Callable[[Case], Outcome]:
    """How to run the engine as it is, on the CPU, predicted from a profile of this machine."""

    def run(case: Case) -> Outcome:
        prediction = predict_plan(stood_for(case, profile))
        with tempfile.TemporaryDirectory() as folder:
            return outcome(case, prediction, sleeping.run(Path(folder), case.experiment, None))

    return run


def profiled(alone: Sequence[Case]) -> LayerProfile:
    """What a layer takes on a core of this machine, and what the rest of the model does: from two runs of one rank."""
    layer, rest = _profiled(alone, lambda _: None)
    return given_profile(alone[0].experiment, "local", layer, rest)


def _profiled(alone: Sequence[Case], passes: Callable[[Case], Sequence[Pass] | None]) -> tuple[Cost, Ends]:
    """A layer's milliseconds, and the rest: what takes the same with few and with many layers.

    Raises:
        SystemExit: the runs tell nothing, for others wanted the cores, too.
    """
    times = []
    for case in alone:
        with tempfile.TemporaryDirectory() as folder:
            times.append(measure(sleeping.run(Path(folder), case.experiment, passes(case))).stages[0])
    layers = [case.experiment.model.layers for case in alone]
    each = [_slope(layers, [part(of) for of in times]) for part in PARTS]
    rest = [part(times[0]) - layers[0] * one for part, one in zip(PARTS, each, strict=True)]
    if min(*each, *rest[:2]) <= 0:
        raise SystemExit(
            f"this machine is too busy to be profiled (load {os.getloadavg()[0]:.1f}): try when it is quiet"
        )
    layer, outside = (Cost(forward=of[0] * 1e3, backward=of[1] * 1e3) for of in (each, rest))
    return layer, Ends(pass_ms=outside, optimizer_ns=each[2] * 1e9 / layer_parameters(alone[0].experiment.model, 1))


PARTS: tuple[Callable[[MeasuredStage], float], ...] = (
    lambda stage: stage.forward[0],
    lambda stage: stage.backward[0],
    lambda stage: stage.optimizer,
)


def _slope(layers: Sequence[int], seconds: Sequence[float]) -> float:
    return (seconds[1] - seconds[0]) / (layers[1] - layers[0])


def _slept(case: Case) -> list[Pass]:
    """What the layers of each virtual stage are to sleep."""
    times = predict_plan(stood_for(case)).durations.times
    return [
        Pass(forward=of.forward[chunk], backward=of.backward[chunk])
        for chunk in range(len(times[0].forward))
        for of in times
    ]


def launched(case: Case) -> Outcome:
    """A rehearsal with the clock `anchored`, or a run, launched as a user would launch it."""
    prediction = predict(case.experiment)
    with tempfile.TemporaryDirectory() as folder:
        tdpp(case.name, "launch", *case.overrides, f"runs_dir={folder}")
        return outcome(case, prediction, RunDir.find(Path(folder), None))


def trained(case: Case) -> Outcome:
    """A run that is not rehearsed, launched as a user would; what its passes took tells computing from waiting."""
    prediction = predict(case.experiment)
    with tempfile.TemporaryDirectory() as folder:
        tdpp(case.name, "launch", *case.overrides, f"runs_dir={folder}")
        run = RunDir.find(Path(folder), None)
        expected = sum(sum(of.forward) + sum(of.backward) for of in prediction.durations.times)
        taken = sum(sum(stage.forward) + sum(stage.backward) for stage in measure(run).stages)
        return replace(outcome(case, prediction, run), passes_error=expected / taken - 1)


def of_module(model: Sequence[str], cases: Sequence[Case], only: str) -> list[Outcome]:
    """Runs of a user's module: of `ROUNDS` predictions and runs of each case, those with the median error."""
    if not any(only in case.name for case in cases):
        return []
    rounds = [_round_of_module(model, cases, only) for _ in range(ROUNDS)]
    found = [sorted(of_case, key=lambda one: one.error)[ROUNDS // 2] for of_case in zip(*rounds, strict=True)]
    print("\n".join([f"with the median errors: {summary(found)}", *told(found), ""]), flush=True)
    return found


def _round_of_module(model: Sequence[str], cases: Sequence[Case], only: str) -> list[Outcome]:
    """Each run once, predicted from what `tdpp profile` has measured of the module's blocks just before."""
    with tempfile.TemporaryDirectory() as folder:
        profile = f"{folder}/measured.yaml"
        ranks = "cluster.groups.local.gpus_per_node=2"  # all measure at once: as many as the runs have
        asked = (*model, ranks, f"profile={profile}", f"micro_batches={OF_SAMPLES}", f"runs_dir={folder}")
        tdpp(f"the profile of {model[1]}", "profile", *asked)
        known = f"cluster.gpus.cpu.profile={profile}"
        return measured([replace(case, overrides=(*case.overrides, known)) for case in cases], trained, only)


def tdpp(what: str, *words: str) -> None:
    command = [sys.executable, "-m", "launch.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-2000:]}")


def published(known: Published) -> Outcome:
    prediction = predict(known.case.experiment)
    return _compared(known.case, prediction, known.measured_s)


def outcome(case: Case, prediction: Prediction, run: RunDir) -> Outcome:
    """With the median of all iterations but the first, by the clock on the wall."""
    log = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return _compared(case, prediction, statistics.median(line["elapsed_ms"] for line in log[1:]) / 1e3)


def _compared(case: Case, prediction: Prediction, measured_s: float) -> Outcome:
    experiment = case.experiment
    parallel = experiment.parallel
    return Outcome(
        name=case.name,
        sizes=f"{parallel.pipeline} x {parallel.data} x {parallel.tensor}",
        partition=str(experiment.partition),
        nodes=case.nodes or str(experiment.node_order),
        predicted_s=prediction.iteration_s,
        measured_s=measured_s,
        load=os.getloadavg()[0],
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    errors = [abs(one.error) for one in outcomes]
    return f"{len(errors)} runs, mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}"


def told(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines of Markdown."""
    rows = [
        "| run | stages x replicas x tensor | partition | nodes | predicted ms | took ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        times = f"{one.predicted_s * 1e3:.0f} | {one.measured_s * 1e3:.0f} | {one.error:+.1%}"
        rows.append(f"| {one.name} | {one.sizes} | `{one.partition}` | `{one.nodes}` | {times} |")
    return rows


def awake(ends: Ends) -> str:
    """A sentence of the page."""
    passes = f"{ends.pass_ms.forward:.3f} ms forward and {ends.pass_ms.backward:.3f} ms backward"
    return (
        f"Besides sleeping, a rank alone took {passes} for a micro-batch, and {ends.optimizer_ns:.2f} ns for a "
        "parameter in the optimizer."
    )


def written(page: str, parts: Mapping[str, Sequence[Outcome]], ends: Ends) -> str:
    """The page with new tables; what is around them stays.

    A part lies between `<!-- NAME -->` and `<!-- end -->`.

    Raises:
        ValueError: a part is not there.
    """
    for name, outcomes in parts.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not begin or not end:
            raise ValueError(f"the page has no part <!-- {name} --> … <!-- end -->")
        facts = [f"{summary(outcomes)}."]
        if name != "published":
            facts.append(_circumstances(outcomes))
        if name == "engine":
            facts.append(awake(ends))
        lines = [
            *textwrap.wrap(" ".join(facts), 120),
            "",
            *told(outcomes),
            "",
        ]
        page = before + begin + "\n".join(lines) + end + after
    return page


def _circumstances(outcomes: Sequence[Outcome]) -> str:
    loads = [one.load for one in outcomes]
    first = ", before all other processes (SCHED_FIFO)" if os.sched_getscheduler(0) == os.SCHED_FIFO else ""
    return (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load {min(loads):.1f} to {max(loads):.1f} (the "
        f"runs' own included){first}."
    )


def measured(cases: Sequence[Case], run: Callable[[Case], Outcome], only: str) -> list[Outcome]:
    """Runs them one after another, and tells of each."""
    outcomes = []
    for case in cases:
        if only in case.name:
            one = run(case)
            outcomes.append(one)
            times = f"predicted {one.predicted_s * 1e3:.0f} ms, took {one.measured_s * 1e3:.0f} ms, load {one.load:.1f}"
            passes = "" if one.passes_error is None else f", its passes alone {one.passes_error:+.1%}"
            print(f"{one.error:+7.1%}  {one.name}: {times}{passes}", flush=True)
    if outcomes:
        print(f"{summary(outcomes)}\n")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=(__doc__ or "").split(": ", 1)[1]
    )
    parser.add_argument("--only", metavar="WORDS", default="")
    only = parser.parse_args().only
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load > cores / 2:
        print(
            f"load {load:.1f} on {cores} cores: others want them too, and runs will take longer than predicted; wait "
            "until they are done or, as root, come before them: chrt -f 10 python -m benchmarks.accuracy"
        )
    slept = measured(ENGINE, engine, only)
    chosen = any(only in case.name for case in REAL)
    computed = measured(REAL, computing(profiled(PROFILED)), only) if chosen else []
    modules = [one for model, cases in MODULES.items() for one in of_module(model, cases, only)]
    rehearsed = measured(REHEARSALS, launched, only)
    others = [published(known) for known in PUBLISHED]
    if not only:
        PAGE.write_text(
            written(
                PAGE.read_text(),
                {
                    "engine": slept,
                    "computing": computed,
                    "modules": modules,
                    "rehearsed": rehearsed,
                    "published": others,
                },
                ends(),
            )
        )
        print(f"written to {PAGE}")
    errors = [abs(one.error) for one in [*slept, *computed, *modules]]
    return int(bool(errors) and (statistics.mean(errors) > MEAN or max(errors) > WORST))


if __name__ == "__main__":
    sys.exit(main())
