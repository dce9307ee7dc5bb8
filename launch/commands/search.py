"""`tdpp search`: the best plans for a cluster and a model, the best stages of a graph, shares, or runs compared."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fasop.errors import SearchError
from fasop.search.arguments import parse
from launch.commands.searching import graph, plans, shares, stages, validation
from launch.commands.writing import check_plan_free, check_writable

USAGE = """usage: tdpp search [GROUP=CHOICE ...] [KEY=VALUE ...] [top=N] [csv=FILE] [page=FILE] [plan=NAME]
                   [overwrite=true] [leave_out=false] [by_stage=true|false] [prove=true] [explain=ROW]
                   [calibration=FILE]
       tdpp search pareto=time|cost [max_cost=N] [max_days=N] [tokens=N] ...
       tdpp search validate=RUN,... [calibrate=FILE] [calibration=FILE] [runs_dir=DIR]
       tdpp search iidp=FILE [parallel.global_batch_size=N] [parallel.micro_batch_size=N]
                   [train.overlap_optimizer=auto|true|false] [unit=N]
       tdpp search graph=FILE ... (of a graph.txt; 'tdpp search graph= --help')

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
  plan=NAME        keep the best one under this name in your configurations, which parallel=NAME then takes
  plan=FILE.yaml   write it to this file, which parallel=FILE.yaml then takes
  overwrite=true   also when there is such a file
  profile=NAME     the GPUs take as long as 'tdpp profile' measured under this name (cluster.gpus.<key>.profile)
  leave_out=false  only plans on all nodes; else also those on some of them
  by_stage=true    look closer at plans whose stages differ in replicas or tensor sizes (parallel.replicas=15-1,
                   parallel.tensor=4-2), which a search otherwise has a quick look at; by_stage=false: not at all
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
  calibrate=FILE   write there what they took, as a part of what was predicted

  iidp=FILE        a configuration of IIDP or JABAS with its profiles: the local batch size, shares, workers and
                   accumulation that take least for a global batch, and the line that its solver prints
  unit=N           so many GPUs of a server work alike (resource_alloc_unit, or what divides all servers)"""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp search <argv>`.

    Raises:
        TdppError: what is asked for cannot be read, searched or written.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(graph.USAGE if graph.asked(argv) else USAGE)
        return 0
    if shares.asked(argv):
        return shares.main(argv)
    if graph.asked(argv):
        return graph.main(argv)
    if stages.asked(argv):
        return stages.main(argv)
    args = parse(argv)
    for file in (args.csv, args.page, args.calibrate):
        if file is not None:
            check_writable(file)
    if args.validate:
        return validation.validate(args)
    if args.calibrate is not None:
        raise SearchError(f"calibrate={args.calibrate} takes the runs to calibrate by: add validate=RUN")
    if args.plan is not None:
        check_plan_free(args.plan, args.overwrite)
    return plans.rank(args, f"tdpp search {shlex.join(argv)}")
