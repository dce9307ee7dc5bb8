"""`tdpp launch reproduce=RUN`: a new run with the configuration and the code of another one, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.compose import read_experiment
from conf.errors import RunFolderError
from conf.run_folder.run_files import read_text
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from launch.commands.launching.resuming import named_run
from launch.errors import LaunchError
from launch.files.own_path import require_own_file
from launch.machine.provenance import Source, provenance
from megatron_ext.contract.files import digest_of_file

REPRODUCE = "reproduce="


def run_to_reproduce(argv: Sequence[str]) -> RunDir:
    """Returns the run that is meant.

    Raises:
        TdppError: there is none, or other words are given.
    """
    wanted, runs_dir = named_run(
        argv,
        REPRODUCE,
        empty="give a run's folder, its name, its job id, or 'latest'",
        others="starts a run as that one was configured and takes no other word but runs_dir=…; to change something, "
        "launch with the words in the run's overrides.txt",
    )
    return RunDir.find(runs_dir, wanted)


def configuration_of(run: RunDir) -> tuple[Experiment, tuple[str, ...]]:
    """Returns what a run was configured to do, with the code that it kept, and the words that were typed for it.

    Raises:
        TdppError: it cannot be read, is not this user's own, or its code is not there as it was.
    """
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
