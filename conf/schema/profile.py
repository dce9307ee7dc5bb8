"""What is recorded of a run while it trains."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.config_class import config
from conf.schema.values import ranges
from megatron_ext.contract.keys import COUNT, Range, option


@config
class Profile:
    timeline: bool = True
    """Record when each rank does what (events/rank-*.bin)."""
    nsys: bool = False
    """Run the ranks of every node under Nsight Systems, which must be installed on the node or in its container."""
    ncu: bool = False
    """The same under Nsight Compute, which runs every kernel except NCCL's several times to measure it."""
    trace_iteration: int | None = option(None, COUNT)
    """The iteration for which the first rank of each stage writes a torch profiler trace (traces/) for Perfetto; with
    nsys on GPUs, Nsight Systems captures only this iteration instead; null: none."""
    gpu_interval_s: int = option(10, Range(0, 10**6))
    """Seconds between two readings of the GPUs (nodes/<node>.gpu); 0: none."""

    def __post_init__(self) -> None:
        ranges.check("profile", self)
        _check_profilers(self)


def _check_profilers(profile: Profile) -> None:
    if profile.nsys and profile.ncu:
        raise ConfigError(
            "profile.nsys=true and profile.ncu=true: a process runs under one profiler at a time; set one to false"
        )
    if profile.ncu and profile.trace_iteration is not None:
        raise ConfigError(
            f"profile.trace_iteration={profile.trace_iteration} must be null with profile.ncu=true, under which torch "
            "traces nothing; set train.iterations to profile few iterations"
        )
