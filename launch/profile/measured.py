"""The job that measures, which keeps what it finished and goes on without sizes too large; its times as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from conf.visible import plural, size_text, span
from fasop.costs.profiles.doubts import SMALL
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts
from launch.control.follow import stopped_if_interrupted
from launch.control.short_job import end, wait
from launch.control.stop import stop
from launch.control.submit import submit
from launch.errors import LaunchError
from launch.judge.verdict import decide
from launch.observe.look import observe
from launch.observe.observation import Observation
from launch.profile.arguments import Arguments
from launch.profile.findings import Found, read_finished, read_found
from megatron_ext.contract.errors import KILLED
from megatron_ext.contract.worker import PROFILE

Size = Mapping[str, Any]
"""What was being measured, as a rank notes it in `at`."""


def measured(
    experiment: Experiment, arguments: Arguments, run_min: int, worker: str
) -> tuple[Found, BaseException | None]:
    """What the ranks found, and why that is not all; None if it is.

    Raises:
        LaunchError: nothing was finished.
        KeyboardInterrupt: as before, and the job has been ended.
    """
    killed: list[Size] = []
    going_on = experiment
    while True:
        run = submit(going_on, arguments.overrides, worker)
        seen, failure = _followed(run, arguments, run_min)
        if failure is None:
            return read_found(run, experiment), None
        size = None if seen is None else _killed_with(run, seen)
        if size is None or size in killed:
            found = read_finished(run, experiment)
            if found is None:
                raise failure
            return found, failure
        killed.append(size)
        without = f"{in_words(size)} does not fit into memory: Linux killed a rank; going on without it"
        print(f"{run.name}: {without}", file=sys.stderr, flush=True)
        environment = experiment.cluster.environment
        request = {**json.loads(environment[PROFILE]), "earlier": str(run.path.absolute()), "killed": killed}
        changed = {**environment, PROFILE: json.dumps(request, separators=(",", ":"))}
        going_on = replace(experiment, cluster=replace(experiment.cluster, environment=changed))


def _followed(run: RunDir, arguments: Arguments, run_min: int) -> tuple[Observation | None, BaseException | None]:
    """Waits for the end of a job; what is then seen of it, and why it failed, if it did."""
    try:
        with stopped_if_interrupted(run):
            given_up = wait(run, arguments.wait_min, run_min, "wait_min=N", lambda _: doing(run))
            if given_up is not None:
                stop(run)
            seen = observe(run)
            end(run)
    except KeyboardInterrupt as interrupt:
        return None, interrupt
    if given_up is not None:
        return None, LaunchError(f"{run.path}: {given_up}")
    if any(node.exit_code != 0 for node in seen.nodes):
        return seen, LaunchError(f"{run.path}: {decide(seen).reason}")
    return seen, None


def _killed_with(run: RunDir, seen: Observation) -> Size | None:
    """The size that ranks measured when Linux killed one of them; None if none was, or not because of a size."""
    ranks = [error.rank for error in seen.errors if error.type == KILLED and "SIGKILL" in error.message]
    if not ranks and decide(seen).rule == "out-of-memory":
        ranks = [place.rank for place in seen.plan.ranks]
    sizes = [note["at"] for rank in ranks if (note := run.read_json(run.profile_rank(rank)) or {}).get("at")]
    return max(sizes, key=lambda size: int(size["samples"]), default=None)


def in_words(size: Size) -> str:
    match size["what"]:
        case "room":
            return f"micro-batch {size['micro_batch_size']} of the whole model"
        case "streams":
            return f"{plural(size['streams'], 'stream')} with micro-batch {size['micro_batch_size']}"
    return f"tensor {size['tensor']}, micro-batch {size['micro_batch_size']}"


def doing(run: RunDir) -> str:
    """What is measured now, how far that is, and how long it goes on."""
    progress = run.read_json(run.profile_rank(0)) or {}
    if not progress.get("doing"):
        return "done" if progress.get("done") else "getting ready"
    text = f"measuring {progress['doing']}"
    if progress.get("of"):
        text += f" ({progress['number']} of {progress['of']}, about {span(progress['left_s'])} left)"
    return text


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heading and rows."""


def tables(profile: LayerProfile) -> list[tuple[str, Table]]:
    """Returns the names of the models and their tables."""
    found = []
    if profile.models:
        costs = [one for one in profile.costs if one.model in profile.models]
        found.append((f"model {', '.join(profile.models)}", _by_size(costs)))
    for name, module in profile.modules.items():
        costs = [one for one in profile.costs if one.model == name]
        found.append((f"model {name}, {module.code}", _by_kind(profile, name, costs)))
    return found


def steps_table(profile: LayerProfile) -> Table:
    """Returns the table of measured steps: what several copies on a GPU take together, and gain."""
    columns = ["model", "host", "micro", "precision", "streams", "pass ms", "accumulate ms", "samples/s", "gain"]
    rows = []
    for steps in profile.steps:
        if steps.precision is None:
            continue
        one = steps.times[0].forward + steps.times[0].backward
        for times in steps.times:
            took = times.forward + times.backward
            rate = times.workers * steps.micro_batch_size / took * 1e3
            gain = times.workers * one / took - 1
            rows.append(
                [
                    *(str(steps.model), steps.host, str(steps.micro_batch_size), str(steps.precision)),
                    *(str(times.workers), f"{took:g}", f"{times.copy:g}", f"{rate:,.4g}", f"{gain:+.1%}"),
                ]
            )
    return columns, rows


def _by_size(every: Sequence[ModelCosts]) -> Table:
    kinds = list(dict.fromkeys(kind for costs in every for kind in costs.parts))
    keeping = [kind for kind in kinds if kind not in SMALL]
    sizes = ("tensor", "micro", "precision")
    columns = (*sizes, *(f"{kind} ms" for kind in kinds), *(f"{kind} keeps" for kind in keeping))
    rows = [
        [
            str(costs.tensor),
            str(costs.micro_batch_size),
            str(costs.precision),
            *(_passes(costs.parts.get(kind)) for kind in kinds),
            *(_kept(costs.parts.get(kind)) for kind in keeping),
        ]
        for costs in every
    ]
    return columns, rows


def _by_kind(profile: LayerProfile, name: str, every: Sequence[ModelCosts]) -> Table:
    """The bytes are those of the largest micro-batch, and of the first block of the kind."""
    blocks = profile.modules[name].blocks
    largest = max(costs.micro_batch_size for costs in every)
    keeps = next(costs for costs in every if costs.micro_batch_size == largest)
    columns = ["kind", "blocks", "parameters", *(f"{one.micro_batch_size} x {one.precision} ms" for one in every)]
    rows = []
    for kind in keeps.parts:
        alike = [block for block in blocks if block.kind == kind]
        names = f"{alike[0].name} … ({len(alike)})" if len(alike) > 1 else "".join(block.name for block in alike)
        times = [_passes(costs.parts.get(kind)) for costs in every]
        parameters = str(alike[0].parameters) if alike else "-"
        kib = (keeps.parts[kind].activation_bytes or 0) / 2**10
        rows.append([kind, names or "-", parameters, *times, f"{kib:,.4g}"])
    return [*columns, f"{largest} keeps KiB"], rows


def _passes(cost: Cost | None) -> str:
    return "-" if cost is None else f"{cost.forward:g} + {cost.backward:g}"


def _kept(cost: Cost | None) -> str:
    return "-" if cost is None or cost.activation_bytes is None else size_text(cost.activation_bytes)
