"""Running a node's worker under NVIDIA's profilers: Nsight Systems (profile.nsys) and Nsight Compute (profile.ncu).

Options: the chapters on the command line in their guides, docs.nvidia.com/nsight-systems and /nsight-compute.
"""

from __future__ import annotations

import shutil

from conf.schema.experiment import ContainerKind, ExecutorKind, Experiment
from launch.errors import LaunchError
from launch.node.worker_command import ProfiledWorker, Profiler, SingleWorker, Worker
from megatron_ext.contract.plan import Plan


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
            f"profile.{profiler}=true: '{profiler}' is not on this machine's PATH; install NVIDIA {product}, or use "
            f"profile.{profiler}=false"
        )


def profiled(worker: SingleWorker, experiment: Experiment, plan: Plan) -> Worker:
    """The worker under the profiler that the run is to have, or as it is."""
    profiler = profiler_of(experiment)
    if profiler is None:
        return worker
    captured = plan.trace_iteration if profiler is Profiler.nsys and plan.device == "cuda" else None
    return ProfiledWorker(worker=worker, profiler=profiler, nodes=tuple(plan.node_names), iteration=captured)
