"""`tdpp search`: the best plans for a cluster and a model, as a table, a CSV file and a configuration."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import conf
from conf.reading.user_files import path_of
from conf.reading.values import own_words, path
from conf.reading.writable import why_not_kept, why_not_writable, write_whole
from conf.run_folder.rundir import RunDir
from fasop.errors import SearchError
from fasop.search.arguments import Arguments, parse
from launch.screen.table import print_table

USAGE = """usage: tdpp search [GROUP=CHOICE ...] [KEY=VALUE ...] [top=N] [csv=FILE] [page=FILE] [plan=NAME]
                   [overwrite=true] [leave_out=false] [prove=true] [explain=ROW] [calibration=FILE]
       tdpp search pareto=time|cost [max_cost=N] [max_days=N] [tokens=N] ...
       tdpp search validate=RUN,... [calibrate=FILE] [calibration=FILE] [runs_dir=DIR]

Ranks all ways to cut the model over the nodes of the cluster: tensor, data and pipeline size, micro-batch, schedule,
recomputation, sharded optimizer, node order and layers per stage. GROUP, KEY and --config-dir DIR are those of 'tdpp
launch'. Of parallel the global batch counts, and what you give of it: parallel.recompute=full is then the only way that
is tried, parallel.recompute=none,full are the two; and so for tensor, data, pipeline, micro_batch_size, schedule,
chunks, sharded_optimizer, sequence_parallel.

  tdpp search experiment=seed_a100x1_a10x7
  tdpp search cluster=a10x8 model=xl parallel.global_batch_size=64 plan=best
  tdpp launch cluster=a10x8 model=xl parallel=best ...
  tdpp search pareto=cost cluster=a100x8_a10x8 model=xl train=gpt2 parallel.global_batch_size=64 tokens=1e9 max_days=2
  tdpp search experiment=seed_a10x8 parallel.schedule=one_f_one_b,gpipe parallel.tensor=1

  top=N            as many plans (10)
  csv=FILE         write them there as well
  page=FILE        a page of them, with the predicted timeline, time and memory of each
  plan=NAME        write the best one as conf/parallel/NAME.yaml, which parallel=NAME then takes
  plan=FILE.yaml   write it to this file, which parallel=FILE.yaml then takes
  overwrite=true   also when there is such a file
  profile=NAME     the GPUs take as long as 'tdpp profile' measured under this name (cluster.gpus.<key>.profile)
  leave_out=false  only plans on all nodes; else also those on some of them
  prove=true       look closer at how much faster other layers per stage could make the plans shown; without, a
                   quicker bound says so
  pareto=time      show the plans that no other one beats in both time and cost, over all numbers of nodes up to those
                   of the cluster, by cluster.groups.<group>.price_per_hour; the fastest first
  pareto=cost      the cheapest first
  tokens=N         a whole training is so many tokens (or train.iterations=N): what it takes in days and US dollars
  max_cost=N max_days=N   of them those whose whole training keeps these US dollars and days
  calibration=FILE multiply times with what runs took (see calibrate)
  explain=ROW      tell of the plan in this row of the table where each second and each byte goes, stage by stage

  validate=RUN     compare what runs took with what was predicted: in all, by term and by stage; which term is off
  calibrate=FILE   write there what they took, as a part of what was predicted"""

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment
    from fasop.search.plan import Plan

PLANS = Path(conf.__file__).resolve().parent / "parallel"


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp search <argv>`.

    Raises:
        TdppError: what is asked for cannot be read, searched or written.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    args = parse(argv)
    for file in (args.csv, args.page, args.calibrate):
        if file is not None:
            check_writable(file)
    if args.validate:
        return validate(args)
    if args.calibrate is not None:
        raise SearchError(f"calibrate={args.calibrate} takes the runs to calibrate by: add validate=RUN")
    if args.plan is not None:
        check_free(args.plan, args.overwrite)
    return rank(args, f"tdpp search {shlex.join(argv)}")


def rank(args: Arguments, command: str) -> int:
    """The best plans for the nodes of the cluster."""
    from fasop.costs.calibration import read_calibration
    from fasop.costs.doubts import doubts
    from fasop.search.inputs import read
    from fasop.search.plan import Run
    from fasop.search.run import best_plans, front
    from fasop.tables.plans import csv_text, plan_yaml, ranking
    from fasop.tables.plans import front as front_table

    inputs = read(args.overrides, args.profile)
    if inputs.by_default is not None:
        print(f"({inputs.by_default})", file=sys.stderr)
    if args.tokens is not None:
        training = inputs.training
        if not training.model.sequence_length:
            raise SearchError(
                f"tokens={args.tokens:g}: samples of {training.model.said} have no tokens; say how long the "
                "training is with train.iterations=N"
            )
        run = Run.of_tokens(args.tokens, training.parallel.global_batch_size, training.model.sequence_length)
        inputs = replace(inputs, run=run)
    if not inputs.run.known and (limits := args.limits()):
        raise SearchError(f"{limits} limits a whole training: say how long it is, tokens=N or train.iterations=N")
    if args.calibration is not None:
        calibration = read_calibration(args.calibration)
        inputs = replace(inputs, kinds=calibration.applied(inputs.kinds))
        print(f"({calibration})", file=sys.stderr)
    outcome = front(inputs, args) if args.pareto else best_plans(inputs, args)
    plans = outcome.plans
    if args.explain is not None and args.explain > len(plans):
        raise SearchError(f"explain={args.explain}: there are {len(plans)} plans; choose a row of the table")
    print_table(*(front_table(plans, inputs.run) if args.pareto else ranking(plans)))
    for doubt in doubts(inputs.training, inputs.kinds, {plan.basis for plan in plans}):
        print(f"({doubt})", file=sys.stderr)
    for note in outcome.notes:
        print(f"({note})", file=sys.stderr)
    print(outcome.summary, file=sys.stderr)
    if args.explain is not None:
        explain(args.explain, plans[args.explain - 1])
    if args.csv is not None:
        _write(args.csv, csv_text(plans, inputs.run))
    if args.page is not None:
        from reports.pages.search_page import render  # few ask for a page, and it is slow to import

        _write(args.page, render(command, plans, inputs.run, [*outcome.notes, outcome.summary]))
        print(args.page)
    if args.plan is not None:
        path = path_of(args.plan, PLANS)
        _write(path, plan_yaml(plans[0], command))
        print(f"parallel={args.plan} is the first of them ({path}): 'tdpp launch … parallel={args.plan}' runs it")
    return 0


def validate(args: Arguments) -> int:
    """What runs took beside what was predicted of them."""
    from conf.compose import read_experiment
    from fasop.costs.calibration import read_calibration
    from fasop.simulation.predict import predict
    from fasop.tables import accuracy_tables as tables
    from fasop.tables.accuracy import calibration, compare
    from reports.facts.measured import measure

    folder, used = runs_dir(args), None if args.calibration is None else read_calibration(args.calibration)
    comparisons, shared = [], []
    for wanted in args.validate:
        run = RunDir.find(folder, wanted)
        experiment = read_experiment(run.config)
        shared += [tables.shared(run.name, *use)] if (use := cores_shared(run, experiment)) else []
        schedule = None if experiment.parallel.schedule_file is None else run.read_json(run.schedule)
        comparisons.append(compare(measure(run), predict(experiment, schedule, used)))
    print_table(*tables.runs(comparisons))
    if len(comparisons) > 1:
        print(tables.together(comparisons))
    for one in comparisons:
        if one.durations is not None:
            print(f"\n{one.measured.run}: milliseconds of an iteration, by term")
            print_table(*tables.terms(one))
            print(f"\n{one.measured.run}: milliseconds of an iteration, by stage, predicted / measured")
            print_table(*tables.stages(one))
        for sentence in tables.verdict(one):
            print(sentence)
    for note in shared:
        print(f"({note})", file=sys.stderr)
    if used is not None:
        print(f"({used})", file=sys.stderr)
    if args.calibrate is not None:
        _write(args.calibrate, calibration(comparisons).text())
        print(f"calibration={args.calibrate} takes that into account")
    return 0


def cores_shared(run: RunDir, experiment: Experiment) -> tuple[int, int] | None:
    """Ranks and cores, of a run on this machine's CPU that had fewer cores than ranks; a rehearsal computes nothing."""
    cpu = all(gpu.name == "CPU" for gpu in experiment.cluster.gpus.values())
    if not cpu or experiment.executor.kind != "local" or experiment.executor.rehearse != "none":
        return None
    here = (run.read_object(run.provenance, ()) or {}).get("host") == socket.gethostname()
    ranks, cores = experiment.parallel.world_size, len(os.sched_getaffinity(0))
    return (ranks, cores) if here and ranks > cores else None


def runs_dir(args: Arguments) -> Path:
    """Where the runs to validate are.

    Raises:
        SearchError: something else is asked for, too, which has no meaning there.
    """
    given, words = own_words(args.overrides, {"runs_dir": path}, SearchError)
    others = sorted({word.partition("=")[0] for word in words})
    if others:
        raise SearchError(
            f"validate={','.join(args.validate)} predicts runs as they were configured; it does not take "
            f"{', '.join(others)}, only calibrate=FILE, calibration=FILE and runs_dir=DIR"
        )
    if args.calibrate is not None and args.calibration is not None:
        raise SearchError(
            f"calibrate={args.calibrate} calibration={args.calibration}: a calibration is made from what is "
            "predicted without one; give one of them"
        )
    folder: Path = given.get("runs_dir", Path("runs"))
    return folder


def explain(row: int, plan: Plan) -> None:
    """Where the time and the memory of one plan go."""
    from fasop.simulation.predict import predict_plan
    from fasop.tables.explain import LEGEND, memory, times

    prediction = predict_plan(plan)
    print(f"\nPlan {row}: an iteration of {prediction.iteration_s * 1e3:.1f} ms, in ms by stage")
    print_table(*times(prediction))
    print(f"({LEGEND})", file=sys.stderr)
    print(f"\nPlan {row}: memory of a rank, in GiB by stage")
    print_table(*memory(prediction))


def check_free(name: str, overwrite: bool) -> None:
    """Before the search, so that no time is lost.

    Raises:
        SearchError: there is such a configuration, or none can be written.
    """
    path = path_of(name, PLANS)
    if (why := why_not_kept(name, PLANS)) is not None:
        raise SearchError(f"plan={name}: {why}")
    if path.exists() and not overwrite:
        raise SearchError(f"plan={name}: {path} exists; choose another name, or add overwrite=true")


def check_writable(path: Path) -> None:
    """Before the search, so that neither its time is lost, nor some of its files are there and others not.

    Raises:
        SearchError: there cannot be such a file.
    """
    if (why := why_not_writable(path)) is not None:
        raise SearchError(f"cannot write {path}: {why}")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise SearchError(
            f"cannot write {path}: {error.strerror}; choose a folder where you may write and that has room"
        ) from error
