"""`tdpp launch`: the Hydra application. It starts one experiment, or with -m every combination of a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import conf
from conf.compose import command_line, read_experiment
from conf.errors import TdppError
from conf.hydra_files import register
from conf.origins import TRAINED, defaults_taken, what_counts, with_origins
from conf.pipedream import WORD as PIPEDREAM
from conf.reading import values
from conf.reading.files import Scratch
from conf.reading.own_folders import SUFFIX
from conf.reading.user_files import config_dirs
from conf.reading.values import name_of, parse_key_values
from conf.reading.words import FULL, check_options
from conf.run_folder.run_folders import stamp
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from conf.visible import visible
from launch.commands.completion import hydra_option
from launch.commands.launching.preflight import Preflight, before_launch, check_start, data_there, with_length
from launch.commands.launching.resolve_auto import require_choice, resolve_auto
from launch.commands.launching.resuming import (
    REPRODUCE,
    RESUME,
    SWEEPER,
    SWEEPS,
    WORDS,
    SweepWords,
    configuration_of,
    differences,
    resumed,
    run_to_reproduce,
    skipping,
)
from launch.control.follow import finishing, follow, interruptible, stop_if_active
from launch.control.planning.checks import check, check_image, check_supported
from launch.control.short_job import ANY_LENGTH, without_goal
from launch.control.submit import launch_directory, resume
from launch.errors import LaunchError
from launch.judge.state import next_step, print_next, word_for
from launch.judge.verdict import judge
from launch.machine.provenance import read_source
from launch.node.worker_command import WORKER
from launch.screen import remark
from launch.sweep.hydra_sweep import BatchTask, called_with, register_launcher
from launch.sweep.outcomes import NoValue, report_single, report_sweep, value_of
from launch.sweep.start import Combination, Outcome, Outcomes, check_sweep_wide, confirm, existing, start_all
from megatron_ext.contract.files import write_atomic

if TYPE_CHECKING:
    from launch.commands.launching.excluded import Known

OWN = {"profile": name_of("profile")}
"""Words that are no keys."""
COMPLETION = ("-sc", "--shell-completion")
"""Hydra's own."""
METRIC = "sweep_metric="
PACK = "pack"
NO_PACKING, BY_COST = "", "cost"
_PACKINGS = {"true": "true", "false": NO_PACKING, BY_COST: BY_COST}
CONFIG_FOLDER = Path(conf.__file__).resolve().parent


@dataclass
class Session:
    """One command: what Hydra has composed for it, and what came of that so far."""

    full: bool = False
    """Whether dry runs are shown in full."""
    profile: str | None = None
    """The name of the profiles of all its GPUs."""
    as_given: Callable[[str], str] = str
    """Returns an override that Hydra has read as it was given."""
    mode: RunMode | None = None
    """Unknown until the first task begins."""
    combinations: list[Combination] = field(default_factory=list)
    record: dict[str, str] = field(default_factory=dict)
    """What Hydra and its sweeper write of a sweep: texts by the name of the file."""
    outcomes: Outcomes = field(default_factory=dict)
    metric: str | None = None
    """The metric by which a sweeper chooses."""
    hosts: Known = field(default_factory=dict)
    """What `cluster.exclude=[auto]` has found."""
    experiments: list[Experiment] = field(default_factory=list)
    """All that were to be started so far."""

    def task(self, cfg: DictConfig) -> None:
        """Hydra calls this with each composed configuration. Nothing is started before all are known.

        What a user can mend is noted, not raised: Hydra would print it in its own way, and end a sweep.
        """
        self.mode = HydraConfig.get().mode
        self.metric = cfg.get("sweep_metric")
        # Unresolved: an override such as name='${model.name}-2' is text here, not a reference.
        read = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False) or ()
        overrides = tuple(self.as_given(str(override)) for override in read)
        composed: Experiment | TdppError
        chosen = None
        try:
            if self.profile is not None:
                from fasop.costs.profiles.files import with_profile  # others do without

                cfg, profiles = with_profile(cfg, self.profile, overrides)
                overrides = (*overrides, *profiles)
            composed, chosen = resolve_auto(cfg, overrides, self.hosts)
        except TdppError as error:
            composed = error
        self.combinations.append(Combination(overrides=overrides, composed=composed, chosen=chosen))


def main(argv: Sequence[str], *, preflight: Preflight = before_launch, worker: str = WORKER) -> int:
    """Runs `tdpp launch <argv>`; returns the exit code of the verdict, or for a sweep 1 unless all is well.

    Raises:
        TdppError: the configuration cannot be composed, or (without -m) the run cannot be started, or GPU-hours are
            not confirmed.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP; the run that was followed has been stopped.
    """
    if any(argument.startswith(RESUME) for argument in argv):

        def go_on(sweep: SweepWords) -> int:
            return _launched(skipping(sweep.words), preflight, worker, resumes=sweep)

        return resumed(argv, lambda run: _resume(run, worker), go_on)
    if any(argument.startswith(REPRODUCE) for argument in argv):
        return _reproduce(run_to_reproduce(argv), preflight, worker)
    if any(argument in COMPLETION for argument in argv):
        return hydra_option(argv)
    check_options(argv)
    require_choice(argv)
    return _launched(argv, preflight, worker)


def _launched(argv: Sequence[str], preflight: Preflight, worker: str, *, resumes: SweepWords | None = None) -> int:
    """Starts what the words say; with `resumes`, those of a sweep, runs that ended early go on."""
    typed = tuple(argv)
    own, argv = parse_key_values(argv, {**OWN, "start": str, PACK: _packing}, LaunchError)
    packs = own.get(PACK, NO_PACKING)
    if packs:
        _check_packs(argv)
    if "start" in own:
        argv = _with_first_plan(own["start"], argv, own.get("profile"))
    session = Session(full=FULL in argv, profile=own.get("profile"))
    argv = [word for word in argv if word != FULL]

    def run_batch(returns: Sequence[JobReturn]) -> None:
        if session.mode is not RunMode.MULTIRUN or session.metric is None:
            return  # nothing is started before all combinations are known
        wanted = _agreed(argv, session, preflight)
        start_all(session.combinations, wanted, session.outcomes, worker, check_start if resumes else None)
        _give_values(session, returns, session.metric)

    try:
        with interruptible():
            _run_hydra(argv, session, run_batch)
            waits = _pack(argv, session, resumes, packs) if packs else None
            wanted = _agreed(argv, session, preflight)
            if waits is not None:
                wanted = {number: wanted[number] for number in [*waits, *wanted] if number in wanted}
            if session.mode is RunMode.MULTIRUN and not resumes:
                plans = [one.overrides for one in session.combinations] if packs else []
                words = json.dumps({"words": typed, "cwd": str(Path.cwd()), "packed": plans}, indent=1)
                _record({**session.record, WORDS: words}, session.experiments)
            start_all(session.combinations, wanted, session.outcomes, worker, check_start if resumes else None, waits)
    except (KeyboardInterrupt, LaunchError):
        _report(argv, session)
        raise
    return _report(argv, session)


def _check_packs(argv: Sequence[str]) -> None:
    """Raises LaunchError where another word leaves nothing to pack, or says otherwise when runs start."""
    if not any(word in ("-m", "--multirun") for word in argv):
        raise LaunchError(f"{PACK}=true has a sweep's runs share the cluster: add -m and a key with several values")
    for word in argv:
        if word.startswith(("max_jobs=", METRIC, SWEEPER)) and not word.endswith("=null"):
            raise LaunchError(f"{PACK}=true decides which runs train side by side, and {word} does too; leave out one")


def _packing(text: str) -> str:
    if text.lower() not in _PACKINGS:
        raise values.NoValue("must be true, false or cost")
    return _PACKINGS[text.lower()]


def _pack(argv: Sequence[str], session: Session, resumes: SweepWords | None, packs: str) -> Mapping[int, Sequence[int]]:
    """Gives each combination its plan; returns after which other ones it starts, in the order of starts."""
    from launch.commands.launching.packed import packed, with_words  # few launches search

    folders = _folders(argv)
    if resumes is not None and resumes.packed:
        own = [skipping(words) for words in resumes.packed]
        session.combinations = with_words(session.combinations, own, folders, session.hosts)
        return {}
    found = packed(session.combinations, folders, session.hosts, by_cost=packs == BY_COST)
    session.combinations = found.combinations
    return {number: found.waits[number] for number in found.order}


def _with_first_plan(start: str, argv: Sequence[str], profile: str | None) -> list[str]:
    """The words with the plan whose training would end first if it were submitted now."""
    if start != "now":
        raise LaunchError(
            f"start={start}: must be now: the plan is chosen by when a training that starts now would end"
        )
    if any(word in ("-m", "--multirun") for word in argv):
        raise LaunchError("start=now chooses the plan of one run, and -m starts several; leave out one of them")
    from launch.commands.searching.queue import with_first_plan  # few launches search

    full = [word for word in argv if word == FULL]
    return [*with_first_plan([word for word in argv if word != FULL], profile), *full]


def _agreed(argv: Sequence[str], session: Session, preflight: Preflight) -> dict[int, Experiment]:
    """Returns those combinations without an outcome that are to be started, by their number. Raises LaunchError:
    GPU-hours, with those of the batches before, are not confirmed; or an option is of dry runs alone."""
    data_later = any(argument.startswith(PIPEDREAM) for argument in argv)
    wanted = partition_outcomes(session.combinations, session.outcomes, preflight, data_later)
    if session.full and not all(experiment.dry_run for experiment in wanted.values()):
        raise LaunchError(f"{FULL} shows everything of a dry run; add dry_run=true, or leave it out")
    if not session.experiments:
        for number in sorted(wanted)[:1]:  # of a sweep its first run: all choose values for the same keys
            remark(defaults_taken([*_folders(argv), *session.combinations[number].overrides], wanted[number], TRAINED))
    if wanted:
        session.experiments += wanted.values()
        confirm(session.experiments)
    return wanted


def _give_values(session: Session, returns: Sequence[JobReturn], metric: str) -> None:
    """Waits for the runs of a sweeper's batch, the latest combinations, and gives it their values."""
    first = len(session.combinations) - len(returns)
    for number, returned in enumerate(returns, first):
        try:
            value = value_of(session.outcomes[number], metric)
        except NoValue as error:  # the sweeper meets it where it reads the value, and decides whether to go on
            returned.status, returned.return_value = JobStatus.FAILED, error
        else:
            session.outcomes[number] = replace(session.outcomes[number], value=value)
            returned.return_value = value


def partition_outcomes(
    combinations: Sequence[Combination], outcomes: Outcomes, preflight: Preflight, data_later: bool = False
) -> dict[int, Experiment]:
    """Notes what is wrong, or there already; returns what is left to be started, by the combination's number.
    What has an outcome stays as it is.

    A dry run is shown although its data are not there, with any length if they alone know it: both are noted, and where
    the data are to be made later (`data_later`) as a doubt.
    """
    wanted = {}
    doubts: dict[str, None] = {}
    for number, combination in enumerate(combinations):
        if number in outcomes:
            continue
        composed, overrides = combination.composed, combination.overrides
        if combination.chosen is not None:
            doubts[combination.chosen] = None
        if isinstance(composed, TdppError):
            outcomes[number] = Outcome(overrides=overrides, error=composed)
            continue
        try:
            if composed.dry_run:
                check_supported(composed)
                wanted[number] = without_goal(composed)
                check_image(composed)
            else:
                check(composed)
            doubts |= dict.fromkeys(preflight(composed))
            composed = with_length(composed)
            run = existing(composed)
        except TdppError as error:
            if data_later and number in wanted and not data_there(composed):
                doubts[str(error)] = None
            else:
                outcomes[number] = Outcome(overrides=overrides, error=error)
            if number in wanted and composed.train.iterations is None:
                length = composed.train.length
                doubts[f"{length}: shown with train.iterations={ANY_LENGTH}; the data decide the real number"] = None
            continue
        if run is None:
            wanted[number] = composed
        else:
            wanted.pop(number, None)
            outcomes[number] = Outcome(overrides=overrides, run=run, skipped=True)
    check_sweep_wide(list(wanted.values()))
    remark(*doubts)
    return wanted


def _report(argv: Sequence[str], session: Session) -> int:
    outcomes = [outcome for _, outcome in sorted(session.outcomes.items())]
    _name_origins(argv, outcomes)
    if session.mode is RunMode.MULTIRUN:
        return report_sweep(outcomes, len(session.combinations), session.metric, session.full)
    return report_single(outcomes, session.full)


def _name_origins(argv: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Errors name the lines of the user's files that they are about; looked up once for those that are alike."""
    named: dict[tuple[object, ...], str] = {}
    for outcome in outcomes:
        if (error := outcome.error) is not None:
            words = [*_folders(argv), *outcome.overrides]
            alike = (type(error), str(error), what_counts(words))
            if alike not in named:
                named[alike] = with_origins(error, words)
            error.args = (named[alike],)


def _folders(argv: Sequence[str]) -> list[str]:
    return [f"--config-dir={folder}" for folder in config_dirs(argv)[0]]


def _resume(run: RunDir, worker: str) -> int:
    """The run goes on as it was configured, so Hydra composes nothing."""
    with interruptible():
        started = False
        try:
            with finishing():
                resume(run, worker, check_start)
                started = True
            print(f"run {run.path}", file=sys.stderr, flush=True)
            if run.code_tree.is_dir():
                text = f"is the code that it runs; a new run with train.load={run.path} takes later edits"
                print(f"({run.code_tree} {text})", file=sys.stderr, flush=True)
            if read_experiment(run.config).executor.followed:
                follow(run)
        except KeyboardInterrupt:
            if started and read_experiment(run.config).executor.followed:  # else it may be somebody else's to stop
                stop_if_active(run)
            raise
    verdict = judge(run)
    print(visible(f"{run.name}: {verdict.state}, {verdict.reason}"), flush=True)
    print_next(next_step(verdict.state, word_for(run)))
    return verdict.exit_code


def _reproduce(run: RunDir, preflight: Preflight, worker: str) -> int:
    """The configuration is there already, so Hydra composes nothing."""
    with interruptible(), launch_directory(run, REPRODUCE):
        experiment, overrides = configuration_of(run)
        nothing = "nothing differs in tdpp, its packages and the host of the launch"
        for difference in [*differences(run, read_source())] or [nothing]:
            print(visible(f"({REPRODUCE}{run.name}: {difference})"), file=sys.stderr, flush=True)
        combinations = [Combination(overrides=overrides, composed=experiment)]
        outcomes: Outcomes = {}
        wanted = partition_outcomes(combinations, outcomes, preflight)
        confirm(list(wanted.values()))
        start_all(combinations, wanted, outcomes, worker)
    return report_single(list(outcomes.values()), full=False)


def _run_hydra(argv: Sequence[str], session: Session, run_batch: Callable[[Sequence[JobReturn]], None]) -> None:
    """Has Hydra call the session's task for each combination, and `run_batch` once a batch of a sweeper is complete.
    Raises LaunchError: a sweeper that is no part of Hydra gave up."""
    try:
        _compose_all(argv, session, run_batch)
    except TdppError:
        raise
    except Exception as error:
        chosen = [word for word in argv if word.startswith(SWEEPER)]
        if not chosen:
            raise
        hint = (
            ""
            if session.metric
            else f"; most sweepers need a result to choose by: add {METRIC}…, such as {METRIC}valid/loss"
        )
        raise LaunchError(f"{chosen[0]}: the sweeper ended: {str(error).rstrip('.')}{hint}") from error


def _compose_all(argv: Sequence[str], session: Session, run_batch: Callable[[Sequence[JobReturn]], None]) -> None:
    register()
    register_launcher()
    batch_task = BatchTask(compose=session.task, end_batch=run_batch)
    task = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="config")(batch_task)
    with Scratch() as scratch, command_line(argv) as words, called_with(words.all):
        OmegaConf.register_new_resolver("sweep_dir", lambda: str(scratch.path), replace=True)
        session.as_given = words.as_given
        remark(*words.notes)
        task()
        if session.mode is RunMode.MULTIRUN:
            files = [file for file in scratch.files if file.suffix == SUFFIX]
            session.record = {file.name: words.as_given(file.read_text(encoding="utf-8")) for file in files}


def _record(files: Mapping[str, str], wanted: Sequence[Experiment]) -> None:
    """Keeps what Hydra writes of a sweep, if any of it is to be started: <runs_dir>/sweeps/<time>/multirun.yaml, or
    what a sweeper writes instead."""
    runs_dir = next((experiment.runs_dir for experiment in wanted if not experiment.dry_run), None)
    if runs_dir is None or not files:
        return
    sweeps, made = Path(runs_dir) / SWEEPS, stamp(datetime.now())
    try:
        sweeps.mkdir(parents=True, exist_ok=True)
        folder = _new_folder(sweeps, made)
        for name, text in files.items():
            write_atomic(folder / name, text)
    except OSError as error:
        raise LaunchError(
            f"cannot record the sweep: {error.strerror}: {error.filename}; choose a runs_dir that you may write to"
        ) from error


def _new_folder(sweeps: Path, made: str) -> Path:
    """Two sweeps of one second do not share one."""
    folder, attempt = sweeps / made, 0
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            attempt += 1
            folder = sweeps / f"{made}.{attempt}"
        else:
            return folder
