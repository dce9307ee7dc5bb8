"""`tdpp search`: the best plans for a cluster and a model, as a table, a CSV file and a configuration."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import conf
from conf.reading.files import check_free, write_whole
from conf.reading.own_folders import path_of
from conf.reading.words import with_values
from conf.schema.cluster import Cluster
from conf.schema.executor import ExecutorKind
from conf.schema.values.partition import AUTO
from conf.visible import plural
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from launch.errors import LaunchError
from launch.judge.state import print_next
from launch.screen import print_table, remark

if TYPE_CHECKING:
    from fasop.search.inputs import Inputs
    from fasop.search.plan import Plan, Run


PLANS = Path(conf.__file__).resolve().parent / "parallel"


def plan_path(name: str) -> Path:
    """Where a plan is kept under this name, or the file whose path it is."""
    return path_of(name, "parallel", PLANS)


def check_plan_free(name: str, overwrite: bool) -> None:
    """Raises OutputError before the search, where the plan could not be kept."""
    check_free(plan_path(name), f"plan={name}", replace=overwrite, kept_as=name)


def rank(args: Arguments, command: str) -> int:
    """Prints the best plans for the nodes of the cluster."""
    from fasop.compiled.build_age import outdated
    from fasop.costs.profiles.doubts import doubts
    from fasop.search.front_search import against, front
    from fasop.search.run import best_plans
    from fasop.tables.plans import front as front_table
    from fasop.tables.plans import ranking

    if outdated():
        remark("tdpp's sources have changed since it was installed, so the search takes longer: install it again")
    if args.export is not None:
        from launch.control.exports.formats import with_limits  # few searches export

        args = replace(args, overrides=tuple(with_limits(args.export, args.overrides)))
    inputs, notes = _inputs(args)
    if inputs.islands:
        _check_words(args, inputs.training.sync_every)
    if args.start is not None:
        return _by_end(args, inputs, command)
    if args.robust is not None:
        return _by_worst_case(args, inputs, command, notes)
    outcome = front(inputs, args) if args.pareto else best_plans(inputs, args)
    plans = outcome.plans
    _check_row(args, plans)
    print_table(*(front_table(plans, inputs.run, against(args)) if args.pareto else ranking(plans)))
    remark(*doubts(inputs.training, inputs.kinds, {plan.basis for plan in plans}), *outcome.notes)
    print(*outcome.summary, sep="\n", file=sys.stderr)
    if (line := in_streams(plans)) is not None:
        notes.append(line.strip("()"))
        print(line, file=sys.stderr)
    return _finish(args, inputs, plans, [*outcome.notes, *outcome.summary, *notes], command)


def _check_words(args: Arguments, every: int) -> None:
    """Raises SearchError for what a search of plans with islands does not do."""
    asked = {"start": args.start, "pareto": args.pareto, "by_stage": args.by_stage, "prove": args.prove}
    for word, value in asked.items():
        if value:
            raise SearchError(
                f"{word}={str(value).lower()} cannot be combined with train.sync_every={every}: plans with islands "
                f"have equal stages, use all nodes and come without bounds; leave {word}= out, or use "
                "train.sync_every=null"
            )


CANDIDATES = 30
"""So many of the fastest plans are rated by their worst case, at least."""


def _by_worst_case(args: Arguments, inputs: Inputs, command: str, notes: Sequence[str]) -> int:
    """Prints the plans by the longest iteration that a slower part of their nodes can make."""
    from fasop.costs.profiles.doubts import doubts
    from fasop.search.robustness import by_worst_case
    from fasop.search.run import best_plans
    from fasop.tables.plans import ranking

    assert args.robust is not None
    candidates = best_plans(inputs, replace(args, top=max(args.rows, CANDIDATES))).plans
    rated = by_worst_case(candidates, args.robust, args.rows)
    shown = rated[: args.rows]
    plans = [one.plan for one in shown]
    _check_row(args, plans)
    head, rows = ranking(plans)
    more = [[f"{one.worst.seconds * 1e3:.1f} ms", f"+{one.loss:.1%}", one.worst.what] for one in shown]
    head = [*head, "worst case", "adds", f"{args.robust:.0%} slower"]
    print_table(head, [[*row, *own] for row, own in zip(rows, more, strict=True)])
    remark(*doubts(inputs.training, inputs.kinds, {plan.basis for plan in plans}))
    others = "the next plans of the search are slower than these worst cases as they are"
    if len(rated) == len(candidates) < max(args.rows, CANDIDATES):
        others = "all plans of the search were rated"
    elif candidates[min(len(rated), len(candidates) - 1)].total < shown[-1].worst.seconds:
        others = f"plans behind the {len(rated)} fastest were not rated"
    print(
        f"Ranked by the worst case, in which one group's GPUs, one group's links or one node takes "
        f"{args.robust:.0%} more time; {others}. As measured, the fastest takes {candidates[0].total * 1e3:.1f} ms.",
        file=sys.stderr,
    )
    return _finish(args, inputs, plans, notes, command)


def _check_row(args: Arguments, rows: Sequence[object]) -> None:
    """Raises SearchError if the row that is to be explained is not there."""
    if args.explain is not None and args.explain > len(rows):
        raise SearchError(f"explain={args.explain}: the table has {plural(len(rows), 'row')}; choose one of them")


def _finish(args: Arguments, inputs: Inputs, plans: Sequence[Plan], notes: Sequence[str], command: str) -> int:
    """Does what follows the table; returns the exit code."""
    if args.explain is not None:
        explain(args.explain, plans[args.explain - 1])
    _write(args, inputs, plans, notes, command)
    if args.export is not None:
        from launch.control.exports.formats import exported

        print(f"\n{exported(args.export, plans[0], command)}")
    print_next(with_plan(args.plan, args.overrides, command))
    return 0


def _inputs(args: Arguments) -> tuple[Inputs, list[str]]:
    """Read what is searched, and tell what is to be known of it; returns these notes, too."""
    from fasop.search.inputs import read

    inputs = read(args.overrides, args.profile)
    notes = [] if inputs.by_default is None else [inputs.by_default]
    if args.export is not None:
        from launch.control.exports.formats import limited

        inputs = limited(args.export, inputs)
    if AUTO in inputs.cluster.exclude:
        from launch.commands.launching.excluded import with_excluded  # few searches look at all runs
        from launch.commands.searching.queue import runs_dir

        cluster, left_out = with_excluded(inputs.cluster, inputs.executor.kind, runs_dir(args.overrides))
        inputs = replace(inputs, cluster=cluster)
        notes += [left_out] if left_out else []
    if inputs.executor.kind is ExecutorKind.slurm and args.start is None:
        notes += nodes_now(inputs.cluster)
    remark(*notes)
    if args.tokens is not None:
        training = inputs.training
        if not training.model.sequence_length:
            raise SearchError(
                f"tokens={args.tokens:g}: samples of {training.model.said} have no tokens; give the training's length "
                f"with train.iterations=N"
            )
        run = inputs.run.of_tokens(args.tokens, training.parallel.global_batch_size, training.model.sequence_length)
        inputs = replace(inputs, run=run)
    if not inputs.run.known and (limits := args.limits()):
        raise SearchError(
            f"{limits} limits a whole training, so its length is needed: add tokens=N, train.samples=N or "
            f"train.iterations=N"
        )
    if args.calibration is not None:
        from fasop.costs.calibration import read_calibration  # few searches are calibrated

        calibration = read_calibration(args.calibration)
        inputs = replace(inputs, kinds=calibration.applied(inputs.kinds))
        notes.append(str(calibration))
        remark(calibration)
    return inputs, notes


def _write(args: Arguments, inputs: Inputs, plans: Sequence[Plan], notes: Sequence[str], command: str) -> None:
    """Write the files that were asked for."""
    from fasop.tables.plans import csv_text, plan_yaml

    if args.csv is not None:
        write_whole(args.csv, csv_text(plans, inputs.run))
    if args.page is not None:
        from fasop.search.front_search import against
        from fasop.tables.plans import launch_words
        from reports.pages.search_page import render  # few ask for a page, and it is slow to import

        launches = [
            shlex.join(["tdpp", "launch", *words])
            for words in launch_words(args.overrides, plans, _length(args, inputs.run))
        ]
        write_whole(args.page, render(command, plans, inputs.run, notes, launches, against(args)))
        print(args.page)
    if args.plan is not None:
        path = plan_path(args.plan)
        write_whole(path, plan_yaml(plans[0], command))
        print(f"parallel={args.plan} is the first plan ({path})")


def _by_end(args: Arguments, inputs: Inputs, command: str) -> int:
    """Prints the plans by when their trainings would end, waiting for nodes included."""
    from fasop.costs.profiles.doubts import doubts
    from fasop.tables.plans import plan_yaml
    from launch.commands.searching.queue import print_choices, rank_by_end

    now = time.time()
    choices = rank_by_end(inputs, args)
    print_choices(choices, now)
    remark(*doubts(inputs.training, inputs.kinds, {choice.plan.basis for choice in choices}))
    print("waits are Slurm's estimates, which change with what others submit and how early jobs end", file=sys.stderr)
    if args.plan is not None:
        path = plan_path(args.plan)
        write_whole(path, plan_yaml(choices[0].plan, command))
        print(f"parallel={args.plan} is the first plan ({path})")
    words = with_values(_without_plan(args.overrides), _length(args, inputs.run))
    print_next(f"{shlex.join(['tdpp', 'launch', *words, 'start=now'])}  # submits the first plan")
    return 0


def with_plan(saved: str | None, overrides: Sequence[str], command: str) -> str:
    """The command that runs the first plan once it is saved; else the one that saves it."""
    if saved is None:
        names = chain(["best"], (f"best-{number}" for number in count(2)))
        name = next(name for name in names if not plan_path(name).exists())
        return f"{command} plan={name}  # saves the first plan, which 'tdpp launch … parallel={name}' runs"
    words = [*_without_plan(overrides), f"parallel={saved}"]
    return f"{shlex.join(['tdpp', 'launch', *words])}  # trains with the first plan"


def _length(args: Arguments, run: Run) -> dict[str, str]:
    """What a launch is to be told of the training's length; `tokens=` is a search's own word."""
    return {} if args.tokens is None else {"train.iterations": str(run.iterations)}


def _without_plan(overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if not word.lstrip("+~").startswith(("parallel=", "parallel."))]


def in_streams(plans: Sequence[Plan]) -> str | None:
    """What several streams on a GPU would make of the first data parallel plan, where a profile measured that they gain
    something."""
    for row, plan in enumerate(plans, 1):
        parallel = plan.parallel
        if not (parallel.world_size == parallel.data and parallel.alike) or plan.training.equal_only:
            continue
        from fasop.shares.own_streams import best_in_streams  # few plans come as far

        found = best_in_streams(plan, replace(parallel, micro_batch_size=AUTO, shares=AUTO))  # type: ignore[arg-type]
        if found is None or found.seconds >= plan.total:
            return None
        shares = "null" if found.shares is None else found.shares
        return (
            f"(row {row} with several streams per GPU, from the measurements: {found.seconds * 1e3:.1f} ms instead of "
            f"{plan.total * 1e3:.1f} with parallel.micro_batch_size={found.micro_batch_size} parallel.shares={shares} "
            f"parallel.streams={found.streams})"
        )
    return None


SLOWER = 0.1
"""How much more time a part of the nodes takes in the last table of `explain=`."""


def explain(row: int, plan: Plan) -> None:
    """Where the time and the memory of one plan go."""
    from fasop.search.robustness import slowdowns
    from fasop.simulation.predict import predict_plan
    from fasop.tables.explain import LEGEND, memory, slower, times

    prediction = predict_plan(plan)
    print(f"\nPlan {row}: where the {prediction.iteration_s * 1e3:.1f} ms of an iteration go, in ms by stage")
    print_table(*times(prediction))
    remark(LEGEND)
    print(f"\nPlan {row}: memory of one rank, in GiB by stage")
    print_table(*memory(prediction))
    print(f"\nPlan {row}: an iteration where a part of its nodes takes {SLOWER:.0%} more time")
    print_table(*slower(slowdowns(plan, SLOWER)))


TIMEOUT_S = 5
"""A search needs no Slurm."""


def nodes_now(cluster: Cluster) -> Iterator[str]:
    """A note for each group of which Slurm has fewer usable nodes than the cluster's file says."""
    if shutil.which("sinfo") is None:
        return
    from launch.machine import slurm_commands  # few machines need it

    try:
        listed = slurm_commands.nodes(TIMEOUT_S)
        from launch.machine.sinfo import parse

        rows = parse(listed)
    except slurm_commands.SlurmSilent as error:
        yield f"Slurm does not answer ({str(error).rpartition(': ')[2]}), so nodes that are down are not known"
        return
    except LaunchError:  # of a site where sinfo says nothing to this user
        return
    from launch.control.executors.sbatch import component
    from launch.control.executors.slurm import shortages

    for found in shortages([(component(name, cluster), group.count) for name, group in cluster.groups.items()], rows):
        how = f"cluster.groups.{found.group}.count={found.usable} leaves out the others"
        yield f"{found}; the plans count {found.wanted}" + (f": {how}" if found.usable else "")
