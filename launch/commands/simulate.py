"""`tdpp simulate`: a whole training whose batch adapts, on many sets of nodes, before a GPU is booked."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import RunFolderError
from conf.reading.files import check_writable, write_whole
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from fasop.errors import SearchError
from fasop.trainings.noise import NUMBERS, measured, of_numbers, read_csv
from launch.commands.simulating.arguments import RESTART_S, Arguments, parse
from launch.screen import print_table, remark
from megatron_ext.contract.adaptive.noise import Noise
from reports.readers.json_lines import Decision, decisions

if TYPE_CHECKING:
    from fasop.tables.trainings import Results


USAGE = f"""usage: tdpp simulate [GROUP=CHOICE ...] [KEY=VALUE ...] [noise=…] [nodes=NODES,...] [epoch=N]
                     [elastic=time|dollars] [restart_s=N] [profile=NAME] [csv=FILE] [page=FILE] [--json]
       tdpp simulate iidp=FILE train.epochs=N epoch=N [adapt.KEY=VALUE ...] [parallel.global_batch_size=N]
                     [parallel.micro_batch_size=N] [parallel.streams=auto|3*4-1*4] [unit=N]
                     [train.overlap_optimizer=auto|true|false] [prices=SERVER:DOLLARS,...] ...

Simulates a whole training with the controller that adapts a run's batch (adapt.…), on every number of nodes of the
cluster. Shows how long each training takes, what it costs, and which nodes are fastest and cheapest. GROUP, KEY and
--config-dir DIR are those of 'tdpp launch'.

  tdpp simulate cluster=mine experiment=vit adapt.rule=noise adapt.upper=8192 noise=500,20000 train.epochs=90
  tdpp simulate iidp=vit.json noise=vit train.epochs=90 epoch=1281167 page=vit.html

  noise=N            the noise scale of the gradient, in samples, for the whole training
  noise=N,N          the noise scale at the beginning and at the end; it grows by a constant factor in between
  noise=FILE.csv     a file with the columns samples and noise_scale
  noise=RUN          the noise scale that an earlier run measured
  nodes=NODES,...    only these sets of nodes, as node orders, such as hgx+gpu2*7,gpu2*4 (default: all)
  epoch=N            the samples of an epoch, if there are no data here to count or the length is given in samples
  elastic=time       also simulate changing nodes after an epoch where that saves time; =dollars: where it saves money
  restart_s=N        the seconds that such a change takes ({RESTART_S:g})
  profile=NAME       use the times that 'tdpp profile' saved under this name
  csv=FILE           write a line for each set of nodes and epoch to this file
  page=FILE          write a page: time against dollars, batch over samples, all sets of nodes
  --json             print everything as JSON instead of the table
  iidp=FILE          take servers and times from a configuration of IIDP or JABAS and the folders that it names
  unit=N             with iidp: the number of GPUs of a server that work alike
  prices=…           with iidp: US dollars an hour for a server of each kind, such as node0:12.24,node4:3.06"""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp simulate <argv>`."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    args = parse(argv)
    check_writable(args.csv, args.page)
    from fasop.tables.trainings import HEAD, as_json, csv_text, summary, table

    results, notes = played(args)
    if args.json:
        print(json.dumps(as_json(results, [*notes, *summary(results)])))
    else:
        print_table(HEAD, table(results))
        remark(*summary(results), *notes)
    if args.csv is not None:
        write_whole(args.csv, csv_text(results))
    if args.page is not None:
        from reports.pages.command_pages import simulation_page  # few ask for it, and plotly is slow to import

        write_whole(args.page, simulation_page(f"tdpp simulate {shlex.join(argv)}", results, notes))
        print(args.page, file=sys.stderr if args.json else sys.stdout)
    return 0


def played(args: Arguments) -> tuple[Results, list[str]]:
    """The training on all nodes, and what is to be known of it. Raises TdppError: it cannot be read, or no nodes can
    train it."""
    from fasop.tables.trainings import Results
    from fasop.trainings.simulate import Elastic, simulate, simulate_elastic
    from launch.commands.simulating import experiment, iidp

    asked = experiment.simulated(args) if args.iidp is None else iidp.simulated(args, args.iidp)
    training, notes = asked.training, [*asked.notes]
    measures = training.adapt is not None and training.adapt.measures
    if training.adapt is not None and measures and args.noise is None:
        raise SearchError(
            f"adapt.rule={training.adapt.rule} follows the gradient noise, so it needs a forecast: noise=RUN of an "
            f"earlier run, noise=FILE.csv, or the noise scale at the beginning and at the end, such as noise=500,20000"
        )
    if not measures and args.noise is not None:
        raise SearchError(
            f"noise={args.noise} has no effect unless the batch adapts; add adapt.rule=noise adapt.upper=8192, for "
            f"example, or leave it out"
        )
    if args.noise is not None:
        noise, note = forecast(args.noise, training.samples, asked.runs_dir)
        training, notes = replace(training, noise=noise), notes + ([note] if note else [])
    trainings, refused = simulate(training, asked.node_sets)
    refused = asked.refused | refused
    if not trainings:
        name, why = next(iter(refused.items()))
        raise SearchError(f"no set of nodes can run this training; {name}: {why}")
    if refused:
        name, why = next(iter(refused.items()))
        notes.append(f"{plural(len(refused), 'set')} of nodes cannot run this training, such as {name}: {why}")
    elastic = None
    run = asked.elastic
    goal = args.elastic if args.elastic is not None else str(run.by) if run is not None else None
    if goal is not None:
        if asked.epoch is None:
            raise SearchError(
                f"elastic={goal} changes nodes at the end of an epoch; add epoch=N, the samples of an epoch"
            )
        able = {one.name for one in trainings}
        restart_s = args.restart_s if args.restart_s is not None else run.restart_s if run is not None else RESTART_S
        how = Elastic(epoch=asked.epoch, goal=goal, restart_s=restart_s)
        if how.goal == "dollars" and all(one.dollars is None for one in trainings):
            raise SearchError("elastic=dollars: no node has a price; set cluster.groups.<group>.price_per_hour")
        elastic = simulate_elastic(training, [one for one in asked.node_sets if one.name in able], how)
    return Results(trainings=trainings, own=asked.own, epoch=asked.epoch, elastic=elastic), notes


def forecast(text: str, samples: float, runs_dir: Path) -> tuple[Noise, str | None]:
    """Returns the noise of a training of so many samples, and in words what of it is not known.

    Raises:
        SearchError: there is none.
        RunFolderError: there is no such run.
    """
    if NUMBERS.fullmatch(text):
        return of_numbers(text, samples), None
    file = Path(text)
    noise = read_csv(file) if file.suffix == ".csv" else _of_run(text, runs_dir)
    last = noise.samples[-1]
    note = None
    if last < 0.99 * samples:
        note = (
            f"noise={text} ends after {last:,.0f} of {samples:,.0f} samples; the noise scale is assumed to stay at "
            f"{noise.scales[-1]:.4g}"
        )
    return noise, note


def _of_run(name: str, runs_dir: Path) -> Noise:
    run = RunDir.find(runs_dir, name)
    try:
        lines = run.decisions.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise SearchError(
            f"noise={name}: {run.path} has no decisions.jsonl, because its batch did not adapt; name a run with "
            "adapt.rule=noise, similarity or goodput"
        ) from error
    except OSError as error:
        raise RunFolderError(f"{run.decisions}: {error.strerror}") from error
    made = [one for one in decisions(lines, []) if isinstance(one, Decision)]
    points = {float(one.consumed_samples): one.noise_scale for one in reversed(made)}
    return measured(sorted(points.items()), name)
