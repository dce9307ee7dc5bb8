"""`tdpp launch resume=…` continues a run, or starts what of a sweep is missing or failed; `reproduce=RUN` starts a new
run with the configuration and the code of another one, and says what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.compose import read_experiment
from conf.errors import RunFolderError, reworded
from conf.reading.values import parse_key_values, path
from conf.run_folder.json_values import typed
from conf.run_folder.run_files import parse_json, read_text
from conf.run_folder.run_folders import RUNS_DIR, usual_runs_dir
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from launch.errors import LaunchError
from launch.files.own_path import read_own_file, require_own_file
from launch.machine.processes import variable_set
from launch.machine.provenance import Source, provenance
from megatron_ext.contract.files import digest_of_file

RESUME = "resume="
SWEEPS, WORDS = "sweeps", "words.json"
"""In a folder of runs; and in that of a sweep, what was typed."""
SWEEPER = "hydra/sweeper="
SKIPS = "skip_existing="


@dataclass(frozen=True, kw_only=True)
class SweepWords:
    """What was typed to start a sweep, and where."""

    words: tuple[str, ...]
    cwd: str
    packed: tuple[tuple[str, ...], ...] = ()
    """With pack=true the words of each combination, with the plan that it got."""


def resumed(argv: Sequence[str], of_run: Callable[[RunDir], int], of_sweep: Callable[[SweepWords], int]) -> int:
    """Has the run or the sweep that is meant go on; `of_sweep` gets what was typed for the sweep. Raises TdppError:
    there is none, or other words are given."""
    wanted, runs_dir = named_run(
        argv,
        RESUME,
        empty="give a run's folder, its name, its job id, 'latest', or a sweep's folder",
        others="continues a run as it was configured and takes no other word but runs_dir=…; to change the "
        "configuration, start a new run with train.load=FOLDER of that run",
    )
    places = [Path(wanted), runs_dir / SWEEPS / wanted, runs_dir / wanted]
    if (
        sweep := next((place for place in places if place.absolute().parent.name == SWEEPS and place.is_dir()), None)
    ) is None:
        return of_run(RunDir.find(runs_dir, wanted))
    sweep = sweep.absolute()
    typed_words = _words(sweep)
    # Where nothing that was typed says where runs are, they are where the sweep is, whatever the shell says now.
    with variable_set(RUNS_DIR, str(sweep.parent.parent)), contextlib.chdir(typed_words.cwd):
        return of_sweep(typed_words)


def skipping(words: Sequence[str]) -> tuple[str, ...]:
    """The words by which what is there already is left alone, unless they say whether it is."""
    return tuple(words) if any(word.startswith(SKIPS) for word in words) else (*words, f"{SKIPS}true")


def named_run(argv: Sequence[str], word: str, *, empty: str, others: str) -> tuple[str, Path]:
    """What a word such as `resume=` names, and the folder of runs in which it is. `empty`: the way out where it names
    nothing. `others`: what to say of other words beside it and runs_dir=. Raises LaunchError: in either case."""
    key = word.rstrip("=")
    wanted, _ = parse_key_values(argv, {key: str, "runs_dir": path}, LaunchError)
    if not wanted[key]:
        raise LaunchError(f"{word} is empty; {empty}")
    if len(wanted) != len(argv):
        raise LaunchError(f"{' '.join(argv)}: {word}RUN {others}")
    return wanted[key], wanted.get("runs_dir", usual_runs_dir())


def _words(sweep: Path) -> SweepWords:
    """Raises LaunchError where they are not there, not this user's own, or cannot be typed again."""
    file = sweep / WORDS
    if not file.exists():
        raise LaunchError(
            f"resume={sweep}: {WORDS} is not there, for the sweep is of an earlier version of tdpp; type its command "
            "again with skip_existing=true"
        )
    with reworded(
        LaunchError, f"resume={sweep}: ", "; type the sweep's command again with skip_existing=true", of=RunFolderError
    ):
        found = typed(SweepWords, parse_json(read_own_file(file).decode(errors="replace"), str(file)), str(file))
    if any(word.startswith(SWEEPER) for word in found.words):
        raise LaunchError(
            f"resume={sweep}: its sweeper chooses each combination by the results before, and would choose anew; "
            "type the sweep's command again, with the storage of the sweeper where it has one"
        )
    if not Path(found.cwd).is_dir():
        raise LaunchError(f"resume={sweep}: {found.cwd}, where it was started, is not there any more")
    return found


REPRODUCE = "reproduce="


def run_to_reproduce(argv: Sequence[str]) -> RunDir:
    """Returns the run that is meant. Raises TdppError: there is none, or other words are given."""
    wanted, runs_dir = named_run(
        argv,
        REPRODUCE,
        empty="give a run's folder, its name, its job id, or 'latest'",
        others="starts a run as that one was configured and takes no other word but runs_dir=…; to change something, "
        "launch with the words in the run's overrides.txt",
    )
    return RunDir.find(runs_dir, wanted)


def configuration_of(run: RunDir) -> tuple[Experiment, tuple[str, ...]]:
    """Returns what a run was configured to do, with the code that it kept, and the words that were typed for it. Raises
    TdppError: it cannot be read, is not this user's own, or its code is not there as it was."""
    require_own_file(run.config)
    experiment = replace(read_experiment(run.config), skip_existing=False, dry_run=False)
    experiment = replace(experiment, executor=replace(experiment.executor, after=None))
    code, digest = run.read_plan().model.code, run.read_plan().model.code_digest
    if code is not None:
        file = Path(code.rpartition(":")[0])
        try:
            same = digest_of_file(file) == digest
        except OSError:
            same = False
        if not same:
            raise LaunchError(f"reproduce={run.name}: {file} is not there any more as the run had it")
        experiment = replace(experiment, model=replace(experiment.model, code=code))
    overrides = tuple(read_text(run.overrides).splitlines()) if run.overrides.is_file() else ()
    return experiment, overrides


def differences(run: RunDir, source: Source) -> Iterator[str]:
    """Yields in words what is not as it was when a run was launched, and how to get it back."""
    try:
        then = run.read_object(run.provenance, ()) or {}
    except RunFolderError as error:
        yield f"what differs from {run.name} is unknown: {error}"
        return
    now = provenance(source)
    for package, version in _versions(then).items():
        if (own := _versions(now).get(package)) != version and package != "tdpp":
            yield f"{package} is {own or 'not installed'}, and was {version or 'not installed'}"
    diff = read_text(run.diff) if run.diff.is_file() else ""
    commit = then.get("commit")
    if commit is None or source.commit is None:
        was, own = _versions(then).get("tdpp"), _versions(now).get("tdpp")
        if was != own:
            yield f"tdpp is {own}, and was {was}"
    elif commit != source.commit or diff != source.diff:
        patch = f", then git apply {run.diff}" if diff else ""
        what = f"at {source.commit[:12]}, and was at {str(commit)[:12]}" if commit != source.commit else "edited"
        yield f"the source of tdpp is {what}; to have it again: git checkout {commit}{patch}"
    if then.get("host") != now["host"]:
        yield f"the host of the launch is {now['host']}, and was {then.get('host')}"


def _versions(content: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = content.get("versions")
    return versions if isinstance(versions, dict) else {}
