"""What keeps an experiment from being started, as far as Slurm need not be asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from conf.schema.experiment import ContainerKind, EngineKind, ExecutorKind, Experiment, Rehearse
from conf.utf8 import require_utf8
from launch.control import megatron_lm
from launch.control.executors import local, slurm
from launch.control.notify import SCHEMES
from launch.errors import LaunchError
from launch.machine.container_commands import found_image
from launch.node.container_setup import check_program
from launch.node.image_file import check_found
from launch.node.worker_command import Profiler
from launch.tracking.run_info import require_ready
from launch.tracking.series import require_known

_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")


def check(experiment: Experiment) -> None:
    """Raises a TdppError for what keeps the experiment from being started, as far as Slurm need not be asked."""
    check_supported(experiment)
    require_exported(experiment, os.environ)
    require_ready(experiment.log, {**os.environ, **experiment.cluster.environment})
    check_image(experiment)
    if experiment.sweep_metric is not None:
        require_known(experiment.sweep_metric)
    if experiment.executor.kind is ExecutorKind.local:
        local.check_port(experiment.executor.master_port)
        notify = experiment.notify  # other machines may have other programs
        if notify.words and shutil.which(notify.words[0]) is None:
            raise LaunchError(
                f"notify.command={notify.command}: no program {notify.words[0]} that can be executed; give its full "
                "path"
            )
        check_profiler(experiment)
        if experiment.container.kind is not ContainerKind.none:
            check_program(experiment.container.kind)
    if experiment.engine.kind is EngineKind.megatron_lm:
        megatron_lm.check(experiment)


def check_image(experiment: Experiment) -> None:
    """Raises LaunchError for an image that was fetched, and must not be used."""
    if (image := found_image(experiment.container)) is not None:
        check_found(image)


def check_supported(experiment: Experiment) -> None:
    """Raises LaunchError for what this version cannot start, ConfigError for names that no file of a run can hold."""
    require_utf8(experiment, Path.cwd())
    kind = experiment.executor.kind
    if kind is ExecutorKind.slurm:
        slurm.check(experiment, os.environ)
    elif experiment.container.kind is ContainerKind.pyxis:
        raise LaunchError(
            f"container.kind=pyxis: pyxis is a plugin of Slurm's srun, but executor.kind={kind} does not use srun; "
            f"use container=enroot, or executor=slurm"
        )
    if kind is ExecutorKind.slurm and experiment.container.kind is ContainerKind.docker:
        raise LaunchError(
            "container.kind=docker: docker's daemon starts containers outside of Slurm's jobs, so Slurm could neither "
            "limit nor end them; use container=enroot, pyxis or apptainer, or executor=hosts"
        )
    if kind is ExecutorKind.local:
        _check_local(experiment)
    path = str(Path(experiment.runs_dir).absolute() / experiment.name)
    for tag in _SUBMITIT_TAGS:
        if tag in path:
            raise LaunchError(
                f"runs_dir={experiment.runs_dir}, name={experiment.name}: {path} contains {tag!r}, which submitit "
                f"replaces in paths; choose a path without it"
            )


def _check_local(experiment: Experiment) -> None:
    partitions = {name: experiment.cluster.groups[name].partition for name in experiment.node_order.groups}
    elsewhere = [f"cluster.groups.{name}.partition={partition}" for name, partition in partitions.items() if partition]
    if elsewhere and experiment.executor.rehearse is Rehearse.none and not experiment.dry_run:
        raise LaunchError(
            f"{', '.join(elsewhere)}: these nodes belong to Slurm, but executor.kind=local starts runs on this "
            f"machine; use executor=slurm, or executor.rehearse=virtual to rehearse the plan without the nodes"
        )


def require_exported(experiment: Experiment, shell: Mapping[str, str]) -> None:
    """Raises LaunchError where this shell lacks a variable that the ranks are to have of it."""
    if (name := experiment.notify.webhook) is not None and not shell.get(name):
        raise LaunchError(
            f"notify.webhook: the variable {name} is not set in this shell; export it before the launch, or leave it "
            f"out"
        )
    if name is not None and not shell[name].startswith(SCHEMES):
        raise LaunchError(  # without the value: it is the secret
            f"notify.webhook={name}: the variable must hold an address that begins with {' or '.join(SCHEMES)}"
        )
    if lacking := [name for name in experiment.cluster.environment_from if name not in shell]:
        names = ", ".join(lacking)
        raise LaunchError(
            f"cluster.environment_from: not set in this shell: {names}; export it before the launch (export "
            f"{lacking[0]}=…), or leave it out"
        )


def profiler_of(experiment: Experiment) -> Profiler | None:
    """The profiler of a run; a rule of the configuration sees to it that there is one at most."""
    profile = experiment.profile
    return Profiler.nsys if profile.nsys else Profiler.ncu if profile.ncu else None


def check_profiler(experiment: Experiment) -> None:
    """Raises LaunchError if the run is to have a profiler that this machine, where it will run, has not."""
    profiler = profiler_of(experiment)
    here = experiment.executor.kind is ExecutorKind.local and experiment.container.kind is ContainerKind.none
    if profiler is not None and here and shutil.which(profiler) is None:
        product = "Nsight Systems" if profiler is Profiler.nsys else "Nsight Compute"
        raise LaunchError(
            f"profile.{profiler}=true: '{profiler}' is not on this machine's PATH; install NVIDIA {product}, or use "
            f"profile.{profiler}=false"
        )
