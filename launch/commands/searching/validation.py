"""`tdpp search validate=RUN`: what runs took beside what was predicted of them."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conf.reading.values import own_words, path
from conf.run_folder.run_folders import usual_runs_dir
from conf.run_folder.rundir import RunDir
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from launch.commands.launching.preflight import shared_cpus
from launch.files.writing import write
from launch.screen.table import print_table

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment


def validate(args: Arguments) -> int:
    """Prints what runs took beside what was predicted of them."""
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
        write(args.calibrate, calibration(comparisons).text())
        print(f"calibration={args.calibrate} applies it")
    return 0


def cores_shared(run: RunDir, experiment: Experiment) -> tuple[int, int] | None:
    """As `shared_cpus`, of a run on this machine."""
    here = (run.read_object(run.provenance, ()) or {}).get("host") == socket.gethostname()
    return shared_cpus(experiment) if here else None


def runs_dir(args: Arguments) -> Path:
    """Where the runs to validate are.

    Raises:
        SearchError: something else is asked for, too, which has no meaning there.
    """
    given, words = own_words(args.overrides, {"runs_dir": path}, SearchError)
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
    folder: Path = given.get("runs_dir", usual_runs_dir())
    return folder
