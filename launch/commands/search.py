"""`tdpp search`: the best plans for a cluster and a model, the best stages of a graph, shares, or runs compared."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.reading.files import check_writable, write_whole
from conf.reading.values import parse_key_values, path
from conf.run_folder.run_folders import usual_runs_dir
from fasop.errors import SearchError
from fasop.search.arguments import Arguments, parse
from launch.commands.searching import plans, shares
from launch.screen import print_table, remark

if TYPE_CHECKING:
    from conf.run_folder.rundir import RunDir
    from conf.schema.experiment import Experiment


USAGE = """usage: tdpp search [GROUP=CHOICE ...] [KEY=VALUE ...] [top=N] [csv=FILE] [page=FILE] [plan=NAME]
                   [overwrite=true] [leave_out=false] [by_stage=true|false] [prove=true] [explain=ROW]
                   [robust=PERCENT] [calibration=FILE] [export=torchtitan|megatron|flagscale|nemo]
       tdpp search pareto=time|cost|energy [max_cost=N] [max_days=N] [tokens=N] ...
       tdpp search start=now [tokens=N] ...
       tdpp search validate=RUN,... [calibrate=FILE] [calibration=FILE] [runs_dir=DIR]
       tdpp search iidp=FILE [parallel.global_batch_size=N] [parallel.micro_batch_size=N]
                   [train.overlap_optimizer=auto|true|false] [unit=N]
       tdpp search graph=FILE ... (of a graph.txt; 'tdpp search graph= --help')

Ranks all ways to split the model over the nodes of the cluster: tensor, data and pipeline size, micro-batch, schedule,
recomputation, sharded optimizer, node order and layers per stage. GROUP, KEY and --config-dir DIR are those of 'tdpp
launch'. parallel.global_batch_size is the global batch. Other keys of parallel limit the search if you give
them: parallel.recompute=full tries only that, parallel.recompute=none,full tries both. The same holds for tensor, data,
pipeline, expert, context, micro_batch_size, schedule, chunks, sharded_optimizer and
sequence_parallel.

  tdpp search experiment=seed_a100x1_a10x7
  tdpp search cluster=a10x8 model=xl parallel.global_batch_size=64 plan=best
  tdpp launch cluster=a10x8 model=xl parallel=best ...
  tdpp search pareto=cost cluster=a100x8_a10x8 model=xl train=gpt2 parallel.global_batch_size=64 tokens=1e9 max_days=2
  tdpp search experiment=seed_a10x8 parallel.schedule=one_f_one_b,gpipe parallel.tensor=1

  top=N            the number of plans to show (10)
  csv=FILE         also write the table to this file
  page=FILE        write a page with the predicted timeline, time and memory of each plan
  plan=NAME        save the best plan under this name in your configurations; parallel=NAME then uses it
  plan=FILE.yaml   save it to this file; parallel=FILE.yaml then uses it
  overwrite=true   replace such a file
  export=TRAINER   search only what torchtitan, megatron (Megatron-LM), flagscale or nemo can run, and print the best
                   plan as its users paste it
  profile=NAME     use the times that 'tdpp profile' saved under this name (cluster.gpus.<key>.profile)
  leave_out=false  show only plans that use all nodes
  by_stage=true    search longer for plans whose stages differ in replicas or tensor sizes (parallel.replicas=15-1,
                   parallel.tensor=4-2); by_stage=false leaves them out
  prove=true       compute tighter bounds on how much faster other plans, and other layers per stage, could be
  pareto=time      show the plans that no other plan found beats in both time and cost, over all numbers of nodes up
                   to those of the cluster, at the prices cluster.groups.<group>.price_per_hour; the fastest first
  pareto=cost      the same, the cheapest first
  pareto=energy    the same in time and energy, with all GPUs of a plan's nodes at the power cluster.gpus.<key>.watts;
                   the plan of least energy first
  start=now        ask Slurm when nodes would start (executor=slurm), and show the plans by when the whole training
                   would end, waiting included; 'tdpp launch … start=now' submits the first one
  tokens=N         the tokens of a whole training (or train.iterations=N), to show its days, US dollars or kWh
  max_cost=N max_days=N   with pareto: only plans whose whole training stays within these US dollars and days
  calibration=FILE multiply the predicted times by the factors in this file (see calibrate)
  explain=ROW      show where each second and each byte of the plan in this row goes, stage by stage, and what the plan
                   loses where a part of its nodes is 10% slower
  robust=10%       rank by the worst case, in which one group's GPUs, one group's links or one node takes so much more
                   time

  validate=RUN     compare the times of runs with the predictions, in all, by term and by stage, and name the term that
                   is off
  calibrate=FILE   write the measured times, as factors of the predicted ones, to this file

  iidp=FILE        for a configuration of IIDP or JABAS with its profiles: find the local batch size, shares, workers
                   and accumulation that take least time for a global batch, and print them as its solver does
  unit=N           the number of GPUs of a server that work alike (resource_alloc_unit, or what divides all servers)"""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp search <argv>`."""
    help_asked = any(word in ("-h", "--help") for word in argv)
    if any(word.startswith("graph=") for word in argv):
        from launch.commands.searching import graph  # few searches are of a graph, or of stages without a flush

        if not help_asked:
            return graph.main(argv)
        print(graph.USAGE)
        return 0
    if help_asked:
        print(USAGE)
        return 0
    if shares.asked(argv):
        return shares.main(argv)
    if unit := next((word for word in argv if word.startswith("unit=")), None):
        raise SearchError(f"{unit} belongs to iidp=FILE: only a search of shares takes it; add iidp=, or leave it out")
    if "parallel.schedule=pipedream" in argv:
        from launch.commands.searching import stages

        return stages.main(argv)
    args = parse(argv)
    check_writable(args.csv, args.page, args.calibrate)
    if args.validate:
        return validate(args)
    if args.calibrate is not None:
        raise SearchError(f"calibrate={args.calibrate} needs runs to calibrate with: add validate=RUN")
    if args.plan is not None:
        plans.check_plan_free(args.plan, args.overwrite)
    return plans.rank(args, f"tdpp search {shlex.join(argv)}")


def validate(args: Arguments) -> int:
    """Prints what runs took beside what was predicted of them."""
    from conf.compose import read_experiment
    from conf.run_folder.rundir import RunDir
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
    remark(*shared)
    remark(used)
    if args.calibrate is not None:
        write_whole(args.calibrate, calibration(comparisons).text())
        print(f"calibration={args.calibrate} applies it")
    return 0


def cores_shared(run: RunDir, experiment: Experiment) -> tuple[int, int] | None:
    """Says where a run on this machine shares CPUs, as `shared_cpus` does."""
    import socket

    from launch.commands.launching.preflight import shared_cpus

    here = (run.read_object(run.provenance, ()) or {}).get("host") == socket.gethostname()
    return shared_cpus(experiment) if here else None


def runs_dir(args: Arguments) -> Path:
    """Where the runs to validate are. Raises SearchError: something else is asked for, too, which has no meaning
    there."""
    given, words = parse_key_values(args.overrides, {"runs_dir": path}, SearchError)
    others = sorted({word.partition("=")[0] for word in words})
    if others:
        raise SearchError(
            f"validate={','.join(args.validate)} predicts runs as they were configured, so it does not take "
            f"{', '.join(others)}, only calibrate=FILE, calibration=FILE and runs_dir=DIR"
        )
    if args.calibrate is not None and args.calibration is not None:
        raise SearchError(
            f"calibrate={args.calibrate} calibration={args.calibration}: a calibration is made from uncalibrated "
            f"predictions; give only one of the two"
        )
    return given.get("runs_dir", usual_runs_dir())
