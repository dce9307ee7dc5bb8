"""`tdpp launch`: the Hydra application. It starts one experiment, or with -m every combination of a sweep."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
from conf.compose import read_experiment, register, to_experiment
from conf.errors import TdppError
from conf.rundir import RunDir
from conf.schema import ExecutorKind, Experiment
from launch.dry_run import dry_run_text
from launch.errors import LaunchError
from launch.follow import follow, interruptible
from launch.observe import observe
from launch.runs import COLUMNS, run_row
from launch.submit import Preflight, check_supported, resume, submit
from launch.table import print_table
from launch.verdict import decide, judge
from launch.worker import WORKER

_NOISE = re.compile(r"To append to your config use|See https?://|\s*(full_key|object_type|reference_type)[:=]")
RESUME = "resume="
CONFIG_FOLDER = Path(conf.__file__).resolve().parent


@dataclass(frozen=True)
class Outcome:
    """What became of one combination: one of the three."""

    overrides: tuple[str, ...]
    run: RunDir | None = None
    dry_run: str | None = None
    error: TdppError | None = None


@dataclass
class Session:
    """One command: what it was given, and what came of it so far."""

    preflight: Preflight
    worker: str
    mode: RunMode | None = None
    """Unknown until the first task begins."""
    outcomes: list[Outcome] = field(default_factory=list)

    def task(self, cfg: DictConfig) -> None:
        """Hydra calls this with each composed configuration.

        What a user can mend is noted, not raised: Hydra would print it in its own way, and end a sweep.
        """
        self.mode = HydraConfig.get().mode
        # Unresolved: an override such as name='${model.name}-2' is text here, not a reference.
        overrides = tuple(map(str, OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False) or ()))
        try:
            self._launch(to_experiment(cfg), overrides)
        except TdppError as error:
            self.outcomes.append(Outcome(overrides, error=error))

    def _launch(self, experiment: Experiment, overrides: tuple[str, ...]) -> None:
        if experiment.dry_run:
            check_supported(experiment)
            self.outcomes.append(Outcome(overrides, dry_run=dry_run_text(experiment, self.worker)))
            return
        run = submit(experiment, overrides, self.preflight, self.worker)
        self.outcomes.append(Outcome(overrides, run=run))
        print(f"run {run.path}", file=sys.stderr, flush=True)
        _wait(experiment, run)


def _wait(experiment: Experiment, run: RunDir) -> None:
    """Follows a run on this machine to its end, if that is wanted; one on Slurm goes its own way."""
    if experiment.executor.kind is ExecutorKind.local and experiment.executor.wait:
        follow(run)


def main(argv: Sequence[str], *, preflight: Preflight, worker: str = WORKER) -> int:
    """Runs `tdpp launch <argv>`; returns the exit code of the verdict, or for a sweep 1 unless all is well.

    Raises:
        TdppError: the configuration cannot be composed, or (without -m) the run cannot be started.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP; the run that was followed has been stopped.
    """
    session = Session(preflight, worker)
    if any(argument.startswith(RESUME) for argument in argv):
        return _resume(argv, worker)
    try:
        with interruptible():
            _run_hydra(argv, session)
    except KeyboardInterrupt:
        _tell(session)
        raise
    return _tell(session)


def _resume(argv: Sequence[str], worker: str) -> int:
    """`resume=RUN` stands alone: the run goes on as it was configured, so Hydra composes nothing."""
    wanted = {key: value for key, _, value in (argument.partition("=") for argument in argv)}
    others = sorted(set(wanted) - {"resume", "runs_dir"})
    if others or len(wanted) != len(argv) or not wanted["resume"]:
        raise LaunchError(
            f"{' '.join(argv)}: resume=RUN goes on with a run as it was configured, and takes nothing but runs_dir=… "
            "beside it; for another configuration start a new run with train.load=RUN"
        )
    run = RunDir.find(Path(wanted.get("runs_dir", "runs")), wanted["resume"])
    with interruptible():
        resume(run, worker)
        print(f"run {run.path}", file=sys.stderr, flush=True)
        _wait(read_experiment(run.config), run)
    verdict = judge(run)
    print(f"{run.name}: {verdict.state}, {verdict.reason}")
    return verdict.exit_code


def _run_hydra(argv: Sequence[str], session: Session) -> None:
    register()
    task = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="config")(session.task)
    time = datetime.now().strftime("%Y%m%d-%H%M%S")
    with tempfile.TemporaryDirectory(prefix="tdpp-") as scratch, _arguments(argv), _errors_raised():

        def sweep_dir(dry_run: bool, runs_dir: str) -> str:
            """Where Hydra records a sweep before it runs it; a dry run must leave no trace."""
            return scratch if dry_run else str(Path(runs_dir) / "sweeps" / time)

        OmegaConf.register_new_resolver("sweep_dir", sweep_dir, replace=True)
        try:
            task()
        except (HydraException, OmegaConfBaseException) as error:
            raise LaunchError(hydra_message(error)) from error
        except OSError as error:
            if session.mode is not None:
                raise
            raise LaunchError(
                f"cannot record the sweep: {error.strerror}: {error.filename}; choose another runs_dir, where you may "
                "write"
            ) from error


@contextmanager
def _arguments(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads its arguments from sys.argv, and takes options only before or after all overrides."""
    before = sys.argv
    sys.argv = ["tdpp launch", *sorted(argv, key=lambda argument: argument not in ("-m", "--multirun"))]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Hydra then raises what it would otherwise print and exit with."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def hydra_message(error: BaseException) -> str:
    """What Hydra and OmegaConf say about a configuration, without their advice for their own developers."""
    said = [str(error), *([str(error.__cause__)] if isinstance(error.__cause__, OmegaConfBaseException) else [])]
    lines = (
        [f"{error.override}: is not KEY=VALUE as Hydra reads it"] if isinstance(error, OverrideParseException) else []
    )
    for line in "\n".join(said).splitlines():
        if line.startswith("Config search path"):
            break
        if line.strip() and not _NOISE.match(line):
            lines.append(line)
    if "Could not override" in str(error):
        lines.append("'tdpp launch --cfg job' prints every key")
    return "\n".join(lines)


def _tell(session: Session) -> int:
    """Tells on stdout what became of everything that was tried; returns the exit code."""
    if session.mode is RunMode.MULTIRUN:
        return _tell_sweep(session.outcomes)
    return _tell_single(session.outcomes)


def _tell_single(outcomes: Sequence[Outcome]) -> int:
    """Without outcome Hydra itself has answered, for example to --cfg."""
    code = 0
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        if outcome.dry_run is not None:
            print(outcome.dry_run)
        if outcome.run is not None:
            verdict = judge(outcome.run)
            print(f"{outcome.run.name}: {verdict.state}, {verdict.reason}")
            code = verdict.exit_code
    return code


def _tell_sweep(outcomes: Sequence[Outcome]) -> int:
    """A table of the runs, then each combination that could not be tried; 0 only if none failed in any way."""
    rows, wrong = [], False
    for outcome in outcomes:
        if outcome.dry_run is not None:
            print(f"# {' '.join(outcome.overrides)}\n{outcome.dry_run}\n")
        if outcome.run is not None:
            seen = observe(outcome.run)
            name, *rest = run_row(outcome.run.name, seen)
            rows.append([name, " ".join(outcome.overrides), *rest])
            wrong = wrong or decide(seen).exit_code != 0
    if rows:
        print_table([COLUMNS[0], "overrides", *COLUMNS[1:]], rows)
    sys.stdout.flush()
    for outcome in outcomes:
        if outcome.error is not None:
            print(f"tdpp: error: {' '.join(outcome.overrides)}: {outcome.error}", file=sys.stderr)
            wrong = True
    return int(wrong)
