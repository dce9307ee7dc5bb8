"""Running a node's worker under NVIDIA's profilers: Nsight Systems (profile.nsys) and Nsight Compute (profile.ncu).

Options: the chapters on the command line in their guides, docs.nvidia.com/nsight-systems and /nsight-compute.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ContainerKind, ExecutorKind, Experiment
from launch.errors import LaunchError
from launch.node.worker_command import Worker
from megatron_ext.contract.plan import Plan


class Profiler(StrEnum):
    """The name of its command, and of its key."""

    nsys = "nsys"
    ncu = "ncu"

    def wrap(self, command: list[str], report: Path) -> list[str]:
        """The command under the profiler, which writes `<report>.nsys-rep` or `<report>.ncu-rep`."""
        output = str(report).replace("%", "%%")  # both replace %h, %p and others
        if self is Profiler.nsys:
            return [
                "nsys",
                "profile",
                f"--output={output}",
                "--force-overwrite=true",
                "--trace=cuda,nvtx,osrt",
                "--sample=none",
                "--trace-fork-before-exec=true",  # ranks are forked and never call exec: without it they are not seen
                "--wait=primary",  # what outlives the worker is the agent's to end
                *command,
            ]
        return [
            "ncu",
            f"--export={output}",
            "--force-overwrite",
            "--target-processes=all",
            "--nvtx",
            "--kernel-name=regex:^(?!nccl)",  # ncu runs one kernel at a time, but NCCL's wait for those of other GPUs
            *command,
        ]


def profiler_of(experiment: Experiment) -> Profiler | None:
    """The profiler of a run; a rule of the configuration sees to it that there is one at most."""
    profile = experiment.profile
    return Profiler.nsys if profile.nsys else Profiler.ncu if profile.ncu else None


def check(experiment: Experiment) -> None:
    """Raises LaunchError if the run is to have a profiler that this machine, where it will run, has not."""
    profiler = profiler_of(experiment)
    here = experiment.executor.kind is ExecutorKind.local and experiment.container.kind is ContainerKind.none
    if profiler is not None and here and shutil.which(profiler) is None:
        product = "Nsight Systems" if profiler is Profiler.nsys else "Nsight Compute"
        raise LaunchError(
            f"profile.{profiler}=true: this machine has no command '{profiler}' on PATH; install NVIDIA {product}, or "
            f"use profile.{profiler}=false"
        )


def profiled(worker: Worker, experiment: Experiment, plan: Plan) -> Worker:
    """The worker under the profiler that the run is to have, or as it is."""
    profiler = profiler_of(experiment)
    if profiler is None:
        return worker
    return ProfiledWorker(worker=worker, profiler=profiler, nodes=tuple(plan.node_names))


@dataclass(frozen=True, kw_only=True)
class ProfiledWorker:
    """Another worker, under a profiler."""

    worker: Worker
    profiler: Profiler
    nodes: tuple[str, ...]
    """Names by node rank."""

    def command(self, run: RunDir, node_rank: int, start: str) -> list[str] | None:
        command = self.worker.command(run, node_rank, start)
        if command is None:
            return None
        report = self._report(run.path, node_rank)
        report.parent.mkdir(exist_ok=True)
        return self.profiler.wrap(command, report)

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return self.profiler.wrap(self.worker.shown(run, node_rank), self._report(run, node_rank))

    def _report(self, run: Path, node_rank: int) -> Path:
        """Without the ending, which the profiler adds."""
        folder = RunDir(run).nsys if self.profiler is Profiler.nsys else RunDir(run).ncu
        return folder / self.nodes[node_rank]
