"""The job that measures: whatever it finished is kept, and it goes on without sizes that were too large.

Linux kills a process that takes too much memory. Such a size does not fit; another job goes on from what was finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from conf.visible import plural, span
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
from megatron_ext.contract.failure import KILLED
from megatron_ext.contract.worker import PROFILE

Size = Mapping[str, Any]
"""As a rank notes it in `at`."""


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
        going_on = _again(experiment, run, killed)


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


def _again(experiment: Experiment, run: RunDir, killed: Sequence[Size]) -> Experiment:
    """The same job, from what an earlier one finished, and without sizes that were killed."""
    environment = experiment.cluster.environment
    request = {**json.loads(environment[PROFILE]), "earlier": str(run.path.absolute()), "killed": killed}
    changed = {**environment, PROFILE: json.dumps(request, separators=(",", ":"))}
    return replace(experiment, cluster=replace(experiment.cluster, environment=changed))


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
