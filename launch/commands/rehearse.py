"""`tdpp rehearse learning`: how well a small model learns under each plan, and how long each takes to be so good."""

from __future__ import annotations

import os
import resource
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.compose import compose_unchecked
from conf.errors import UsageError
from conf.reading.files import check_writable, write_whole
from conf.reading.user_files import config_dirs
from conf.reading.values import NoValue, Reader, name_of, parse_key_values, path, whole
from conf.reading.words import refuse_options
from conf.schema.adapt import Rule
from conf.schema.experiment import Experiment
from conf.visible import size_text
from fasop.errors import SearchError
from launch.commands.launching.preflight import preflight, with_length
from launch.commands.launching.resolve_auto import resolve_auto
from launch.commands.translate import require_torch
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.learning.plans import Compared, compared
from launch.learning.ranking import MOST_SEEDS, Curve, Trained, goal_of, mean_curve, metric_of, ranked
from launch.learning.table import BatchTimes, csv_text, sentences, table
from launch.screen import print_table, remark
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.stream_check import prove

USAGE = f"""usage: tdpp rehearse learning [GROUP=CHOICE ...] [KEY=VALUE[,VALUE...] ...] [small.KEY=VALUE ...]
                              [seeds=N] [profile=NAME] [csv=FILE] [page=FILE]

Trains a small model on this CPU with the delays of a plan: each micro-batch uses the weights that it would use on the
plan's ranks. With several plans it shows which one reaches a quality first, by the time that an iteration of each is
predicted to take on the cluster.

GROUP, KEY and --config-dir DIR are those of 'tdpp launch'. A key may have several values; all combinations are compared
after the same number of samples and with the same seeds. Plans with a flush learn the same, whatever their layout.

  tdpp rehearse learning experiment=vit_digits parallel=data.yaml,3-1.yaml train.eval_interval=50
  tdpp rehearse learning cluster=a10x8 model=xl parallel=best,other small.model=tiny small.train.iterations=500 \\
      small.train.eval_interval=25 small.parallel.global_batch_size=64

  small.KEY=VALUE    a value for the small training alone: experiment, model, train, data and
                     parallel.global_batch_size. The partition is scaled in proportion, and a global batch keeps its
                     number of micro-batches
  train.until=…      the quality to reach, such as 'loss<=2.5' (default: what every plan reaches). Trainings go on to
                     their end
  seeds=N            the number of trainings of each plan, with seeds from train.seed on (3; at most {MOST_SEEDS})
  profile=NAME       use the times that 'tdpp profile' saved under this name
  csv=FILE           write a line for each plan and seed to this file
  page=FILE          write a page: quality against samples, and against predicted time"""
SEEDS = 3


def _seeds(text: str) -> int:
    count = whole(text)
    if count > MOST_SEEDS:
        raise NoValue(f"must be at most {MOST_SEEDS}")
    return count


WORDS: Mapping[str, Reader[Any]] = {"seeds": _seeds, "profile": name_of("profile"), "csv": path, "page": path}


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp rehearse <argv>`."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    if not argv or argv[0] != "learning":
        raise UsageError(
            "'tdpp rehearse' takes 'learning': 'tdpp rehearse learning …' trains with the delays of plans; to "
            "rehearse their times, use 'tdpp launch … executor.rehearse=virtual'"
        )
    own, words = parse_key_values(argv[1:], WORDS, LaunchError)
    refuse_options(config_dirs(words)[1])
    require_torch("tdpp rehearse learning")
    check_writable(own.get("csv"), own.get("page"))
    plans = compared(words, lambda each: _composed(each, own.get("profile")))
    until, best = plans[0].small.train.until, plans[0].small.train.best
    metric, _ = metric_of(until, best)
    found = train(plans, own.get("seeds", SEEDS), metric, predicted(plans))
    goal = goal_of(found, until, best)
    rows = ranked(found, goal)
    print_table(*table(rows, metric, goal))
    notes = [*sentences(rows, metric, goal), _peak()]
    remark(*notes)
    if "csv" in own:
        write_whole(own["csv"], csv_text(rows, metric, goal))
    if "page" in own:
        from reports.pages.command_pages import Quality, learning_page  # few ask for it, and plotly is slow to import

        curves = [Quality(**mean_curve(row.plan)) for row in rows if any(curve.values for curve in row.plan.curves)]
        target = None if goal is None else goal.target.value
        command = f"tdpp rehearse {shlex.join(argv)}"
        write_whole(own["page"], learning_page(command, *table(rows, metric, goal), notes, curves, metric, target))
        print(own["page"])
    return 0


def _composed(words: Sequence[str], profile: str | None) -> Experiment:
    """What a launch would start; what was chosen of it is reported."""
    from fasop.costs.profiles.files import with_profile

    cfg = compose_unchecked(words)
    if profile is not None:
        cfg, _ = with_profile(cfg, profile, words)
    experiment, chosen = resolve_auto(cfg, words)
    remark(chosen)
    return experiment


def predicted(plans: Sequence[Compared]) -> list[float | None]:
    """What an iteration of each plan takes on its cluster, seconds; None where that cannot be predicted, which is
    reported."""
    from fasop.simulation.predict import predict

    found: list[float | None] = []
    doubts: dict[str, None] = {}
    for plan in plans:
        experiment = plan.experiment
        try:
            prediction = predict(experiment)
        except SearchError as error:
            doubts[f"the time of an iteration is unknown: {error}"] = None
            found.append(None)
            continue
        found.append(prediction.iteration_s)
        for stage in prediction.stages:
            if stage.memory_gib > stage.limit_gib:
                doubts[
                    f"{plan.name}: stage {stage.name} takes {stage.memory_gib:.1f} GiB, but its GPU has "
                    f"{stage.limit_gib:g} GiB"
                ] = None
    remark(*doubts)
    return found


def train(plans: Sequence[Compared], seeds: int, metric: str, iterations: Sequence[float | None]) -> list[Trained]:
    """Each plan with its curves; plans that learn the same are trained once. Raises TdppError: something cannot be
    trained."""
    small = [_checked(plan.small) for plan in plans]
    jobs: dict[str, Plan] = {}
    keys = []
    for experiment in small:
        plan = make_plan(experiment, "rehearsal")
        keys.append(str(plan.as_json()))
        jobs.setdefault(keys[-1], plan)
    _require_memory(small)
    curves: dict[str, list[Curve]] = {key: [] for key in jobs}
    done, times = 0, [_batch_times(plan, seconds) for plan, seconds in zip(plans, iterations, strict=True)]
    for seed in range(seeds):
        for key, plan in jobs.items():
            began = time.process_time()
            curve = learn(replace(plan, train=replace(plan.train, seed=plan.train.seed + seed)), metric)
            curves[key].append(curve)
            done += 1
            name = plans[keys.index(key)].name
            what = curve.failed or f"{metric} {curve.values[-1]:.4f} after {curve.samples[-1]:,} samples"
            taken = time.process_time() - began
            print(
                f"({done} of {seeds * len(jobs)}: {name}, seed {plan.train.seed + seed}: {what}; {taken:.1f} CPU s)",
                file=sys.stderr,
                flush=True,
            )
    return [
        Trained(
            name=plan.name,
            layout=plan.layout,
            curves=[curve if of_batch is None else curve.timed(of_batch.seconds) for curve in curves[key]],
            iteration_s=iteration_s,
            samples=jobs[key].global_batch_size,
        )
        for plan, key, iteration_s, of_batch in zip(plans, keys, iterations, times, strict=True)
    ]


def _batch_times(plan: Compared, iteration_s: float | None) -> BatchTimes | None:
    """None where all iterations take as long, or nobody knows how long."""
    return None if iteration_s is None or plan.experiment.adapt.rule is Rule.none else BatchTimes(plan.experiment)


def learn(plan: Plan, metric: str) -> Curve:
    """A training in this process. Raises LaunchError: the model or its data cannot be used, or an evaluation lacks the
    metric."""
    import torch

    from megatron_ext.contract.errors import EngineError
    from megatron_ext.engine.results import NotFinite
    from megatron_ext.learning import learn as learning

    torch.set_num_threads(1)  # as on the ranks
    samples: list[int] = []
    values: list[float] = []
    batches: list[tuple[int, bool]] = []
    ends: list[int] = []
    try:
        for learned in learning.learn(plan):
            batches.append((learned.micro_batches, learned.measured))
            if learned.metrics:
                if metric not in learned.metrics:
                    raise LaunchError(
                        f"an evaluation measures {', '.join(learned.metrics)}, not {metric}; use one of them"
                    )
                samples.append(learned.samples)
                values.append(learned.metrics[metric])
                ends.append(learned.iteration)
    except NotFinite as error:
        return Curve(samples=samples, values=values, batches=batches, iterations=ends, failed=str(error))
    except EngineError as error:
        raise LaunchError(str(error)) from error
    return Curve(samples=samples, values=values, batches=batches, iterations=ends)


def _checked(small: Experiment) -> Experiment:
    """Returns the experiment with its length; reports what is odd about its data."""
    remark(*preflight(small))
    return with_length(small)


def _require_memory(small: Sequence[Experiment]) -> None:
    """Reports what weights take, and raises LaunchError where this machine has not so much."""
    largest = max(map(_weight_bytes, small))
    if not largest:
        return
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    message = f"weights, their versions, gradients and the optimizer's state take at most {size_text(largest)}"
    if largest > has:
        raise LaunchError(f"{message}, but this machine has {size_text(has)}; choose a smaller model (small.model=…)")
    remark(message)


def _weight_bytes(small: Experiment) -> int:
    """Returns the bytes of a training at most; 0 for a module, whose weights nobody has counted."""
    if small.model.code is not None:
        return 0
    stream, versions = small.parallel.stream, 1
    if stream is not None:
        versions = 2 + max(prove(stream, 2 * stream.in_flight + 2 * stream.period).versions)
    islands = 1 if small.train.sync_every is None else len(small.parallel.islands_of)
    return 4 * small.model.parameters() * (versions + 1 + small.train.kept_values) * islands


def _peak() -> str:
    unit = 1 if sys.platform == "darwin" else 1024
    return f"peak memory {size_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}, in one process"
