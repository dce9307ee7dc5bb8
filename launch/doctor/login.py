"""What `tdpp doctor` looks at where it is called, before it starts anything: a login node, or the machine itself."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from conf.errors import TdppError
from conf.reading.files import Scratch
from conf.schema import containers
from conf.schema.experiment import ContainerKind, EngineKind, ExecutorKind, Experiment, RunsMode
from conf.visible import size_text
from launch.control import megatron_lm
from launch.control.executors import hosts, slurm
from launch.control.executors.sbatch import job_requests
from launch.control.planning.checks import check_supported
from launch.control.planning.plan import make_plan
from launch.control.short_job import without_goal
from launch.doctor.findings import Check, Level
from launch.doctor.judge import checkpoint_bytes
from launch.errors import LaunchError
from launch.files.own_path import require_place
from launch.machine import slurm_commands
from launch.machine.container_commands import found_image, run_container
from launch.machine.provenance import PROJECT
from launch.node.container_setup import check_program
from launch.node.image_file import check_found

HERE = "here"
SLURM_COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun")
MOUNTS = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")
"""In there a blank is \\040."""
PYXIS_OPTION = "--container-env"
"""The option that pyxis has since 0.15."""


def login_checks(experiment: Experiment, data: Check) -> Iterator[Check]:
    """Everything that can be found out without a job; each check stands alone. `data` is what was found of the data."""
    found = f"python {sys.version.split()[0]}, submitit {metadata.version('submitit')}"
    yield Check(Level.ok, HERE, "software", f"{found}, tdpp in {PROJECT}")
    yield _runs(experiment)
    yield data
    if experiment.engine.kind is EngineKind.megatron_lm:
        yield _passes(
            "engine", lambda: megatron_lm.check(experiment), lambda: f"Megatron-LM in {experiment.engine.checkout}"
        )
    if experiment.container.kind is not ContainerKind.none:
        yield _container(experiment)


def jobs_check(experiment: Experiment) -> Check:
    """Whether what is to be started could be; on Slurm, asked of Slurm for each job."""
    if experiment.executor.kind is ExecutorKind.local:
        return _passes("processes", lambda: check_supported(experiment), lambda: "can be started on this machine")
    if experiment.executor.kind is ExecutorKind.hosts:
        return _passes("hosts", lambda: _look(experiment), lambda: _reached(experiment))
    missing = [command for command in SLURM_COMMANDS if shutil.which(command) is None]
    if missing:
        text = f"{', '.join(missing)} not on this machine's PATH; use a login node, or executor=local"
        return Check(Level.error, HERE, "slurm", text)
    return _passes("slurm", lambda: _ask_slurm(experiment), lambda: _asked(experiment))


def _runs(experiment: Experiment) -> Check:
    """The folder, or the one in which it is to be made, takes files; the nodes' own checks say whether they see it."""
    folder = Path(experiment.runs_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    needed = checkpoint_bytes(experiment)
    summary = f"{folder} ({file_system(there, MOUNTS.read_text(errors='surrogateescape'))}), {size_text(free)} free"
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        level, summary = (
            Level.error,
            f"runs_dir={experiment.runs_dir}: you may not write to {there}; choose another folder",
        )
    elif free < needed:
        level, summary = Level.error, f"{summary}, and a checkpoint takes {size_text(needed)}; choose another runs_dir"
    elif why := _unsafe(experiment):
        level, summary = Level.error, why
    else:
        level = Level.ok
    return Check(level, HERE, "runs_dir", summary)


def _unsafe(experiment: Experiment) -> str | None:
    """Why others could replace the runs; None if nobody can."""
    try:
        require_place(Path(experiment.runs_dir), experiment.name, group=experiment.runs_mode is RunsMode.group)
    except LaunchError as error:
        return str(error)
    return None


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system of a path that exists, such as ext4 or nfs4. `mounts` is as in proc(5)."""
    found = {}
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        plain = _OCTAL.sub(lambda escape: chr(int(escape[1], 8)), point)
        found[Path(plain)] = kind  # what comes later lies above
    real = Path(os.path.realpath(path))
    return next((found[at] for at in (real, *real.parents) if at in found), "unknown")


def _container(experiment: Experiment) -> Check:
    """The image, and, where it is this machine that starts it, its program."""

    def look() -> None:
        kind = experiment.container.kind
        if kind is ContainerKind.pyxis:
            if shutil.which("srun") is not None and not slurm_commands.srun_has(PYXIS_OPTION):
                raise TdppError(
                    f"container.kind=pyxis: srun has no option {PYXIS_OPTION}; Slurm here lacks the plugin pyxis, "
                    f"0.15 or newer"
                )
        elif experiment.executor.kind is ExecutorKind.local:
            check_program(kind)
        plan = make_plan(without_goal(experiment), "doctor")
        container = run_container(experiment, plan, Path(experiment.runs_dir), PROJECT)
        assert container is not None
        if (found := found_image(experiment.container)) is not None:
            check_found(found)
        if isinstance(container.image, Path) and not container.image.is_file():
            raise TdppError(f"container.image={experiment.container.image}: no such file")

    summary = f"{experiment.container.kind}, {experiment.container.image}"
    found = _passes("container", look, lambda: summary)
    if found.level is Level.ok and not containers.has_digest(experiment.container):
        text = (
            f"{summary}: without a digest, the tag may name another image on another day; add the digest to "
            f"container.image (registry/name@sha256:…)"
        )
        return Check(Level.warning, HERE, "container", text)
    return found


def _look(experiment: Experiment) -> None:
    check_supported(experiment)
    hosts.look(experiment)


def _reached(experiment: Experiment) -> str:
    names = ", ".join(host.name for host in experiment.executor.reached)
    return f"{names}: reached by ssh, with the same tdpp, Python and torch"


def _ask_slurm(experiment: Experiment) -> None:
    check_supported(experiment)
    with Scratch() as folder:
        submission = slurm.submission_of(experiment, folder.path, "doctor", resumable=False)
        refused = []
        for request in job_requests(experiment):
            try:
                slurm.ask(submission, request, folder.path)
            except TdppError as error:
                refused.append(str(error))
    if refused:
        raise TdppError("; ".join(dict.fromkeys(refused)))


def _asked(experiment: Experiment) -> str:
    summary = " and ".join(slurm.requested(request) for request in job_requests(experiment))
    return f"{slurm_commands.version()} accepts {summary}"


def _passes(what: str, look: Callable[[], None], fine: Callable[[], str]) -> Check:
    try:
        look()
        text = fine()
    except TdppError as error:
        return Check(Level.error, HERE, what, str(error))
    return Check(Level.ok, HERE, what, text)
