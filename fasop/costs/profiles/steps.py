"""What a profile says beside the parts of models: times of collectives, and of a whole model on one GPU its steps, as
IIDP and JABAS measure them, and its room."""

from __future__ import annotations

import math
from dataclasses import fields
from enum import StrEnum, unique

from conf.errors import ConfigError
from conf.schema.values.ranges import MISSING, config
from megatron_ext.contract.train_config import Precision


@unique
class Operation(StrEnum):
    """What ranks do together; the values are nccl-tests' names."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    send_recv = "send_recv"
    alltoall = "alltoall"


@config
class CollectiveTimes:
    """Microseconds of one operation of a group of ranks, by bytes.

    Bytes are what nccl-tests calls size: the whole tensor of an all-reduce, an all-gather and a reduce-scatter, all
    that a rank sends in an all-to-all, the message of a send.
    """

    operation: Operation = MISSING
    ranks: int = MISSING
    nodes: int = 1
    """On which the group lies; 1: its messages stay in a node."""
    sharing: int = 1
    """Such groups that used the link of a node at the same time."""
    us_by_bytes: dict[int, float] = MISSING

    @property
    def name(self) -> str:
        """Say which measurement this is: no profile has two of a name."""
        return f"{self.operation} of {self.ranks} ranks on {self.nodes} node{'s' if self.nodes > 1 else ''}"


def check_collectives(every: list[CollectiveTimes]) -> None:
    """Raises ConfigError for the first figure that cannot be."""
    seen = set()
    for one in every:
        what = f"collectives: {one.name}"
        if one.name in seen:
            raise ConfigError(f"{what} occurs twice; keep one of them")
        seen.add(one.name)
        if one.ranks < 2 or not 1 <= one.nodes <= one.ranks or one.sharing < 1:
            raise ConfigError(f"{what}: ranks must be at least 2, nodes from 1 to ranks, sharing={one.sharing} above 0")
        if len(one.us_by_bytes) < 2:
            raise ConfigError(f"{what}: us_by_bytes must have the times of at least two sizes")
        for size, us in one.us_by_bytes.items():
            if not (size > 0 and math.isfinite(us) and us > 0):
                raise ConfigError(f"{what}: us_by_bytes: {size}: {us} must be above 0, both")


@config
class StepTimes:
    """Milliseconds of a step, on average."""

    workers: int = MISSING
    """Copies of the model on the GPU."""
    total: float | None = None
    data: float = MISSING
    forward: float = MISSING
    backward: float = MISSING
    update: float = MISSING
    copy: float = MISSING
    """Copying the weights to the workers but the first."""
    statistics: float | None = None
    """Batch norm's, summed over GPUs, for each worker."""

    @property
    def ms(self) -> dict[str, float]:
        """Map the name of each part that was measured to its milliseconds."""
        every = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "workers"}
        return {name: value for name, value in every.items() if value is not None}


@config
class Steps:
    """What a GPU of one host takes with one local batch size."""

    model: str | None = None
    """null: a memory limit alone is known, which names no model."""
    precision: Precision | None = None
    """null: files of IIDP and JABAS do not say it."""
    host: str = MISSING
    micro_batch_size: int = MISSING
    most_workers: int | None = None
    """That its memory has room for; null: not measured."""
    memory_bytes: int | None = None
    """The GPU's memory."""
    times: list[StepTimes] = MISSING
    """Times for each number of workers, upwards."""

    def __str__(self) -> str:
        of_format = "" if self.precision is None else f" train.precision={self.precision}"
        return (
            f"steps of host {self.host}, model={self.model}{of_format} "
            f"parallel.micro_batch_size={self.micro_batch_size}"
        )


@config
class Host:
    """Which GPUs a host has and how they are connected, as IIDP's solver is told."""

    gpus: int = MISSING
    tflops: float = 0.0
    within_gbit_per_s: float | None = None
    """The bandwidth that all-reduces have at best; null: that of the measured ones."""
    between_gbit_per_s: float | None = None


@config
class Room:
    """The largest micro-batch that was trained with the whole of a model on one GPU, without recomputation; 0: none."""

    model: str = MISSING
    precision: Precision = MISSING
    micro_batch_size: int = MISSING


@config
class AllReduces:
    """Milliseconds of all-reduces, each as long as bandwidth alone would make it and as measured."""

    ideal_ms: list[float] = MISSING
    measured_ms: list[float] = MISSING


def check_steps(every: list[Steps]) -> None:
    """Raises ConfigError for the first figure that cannot be."""
    seen = set()
    for steps in every:
        if str(steps) in seen:
            raise ConfigError(f"{steps} occur twice; keep one of them")
        seen.add(str(steps))
        if steps.micro_batch_size < 1 or (steps.most_workers is not None and steps.most_workers < 1):
            raise ConfigError(f"{steps}: micro_batch_size and most_workers must be at least 1")
        workers = [times.workers for times in steps.times]
        if workers != sorted({*workers}) or (workers and workers[0] < 1):
            raise ConfigError(f"{steps}: times must be listed by number of workers, rising from 1, each once")
        for times in steps.times:
            for field in fields(times):
                value = getattr(times, field.name)
                if value is not None and not (math.isfinite(value) and value >= 0):
                    raise ConfigError(f"{steps}: {field.name}={value} of {times.workers} workers must be at least 0")


def check_hosts(hosts: dict[str, Host]) -> None:
    """Raises ConfigError for the first figure that cannot be."""
    for name, host in hosts.items():
        rates = [rate for rate in (host.within_gbit_per_s, host.between_gbit_per_s) if rate is not None]
        if host.gpus < 1 or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ConfigError(
                f"hosts.{name}: gpus must be at least 1, within_gbit_per_s and between_gbit_per_s above 0"
            )
        if not (math.isfinite(host.tflops) and host.tflops >= 0):
            raise ConfigError(f"hosts.{name}.tflops={host.tflops} must be at least 0")


def check_buckets(buckets: dict[str, list[float]]) -> None:
    """Raises ConfigError for sizes that cannot be."""
    for model, sizes in buckets.items():
        if not sizes or not all(math.isfinite(size) and size > 0 for size in sizes):
            raise ConfigError(f"buckets_mib.{model} must be sizes above 0 MiB, at least one")


def check_all_reduces(times: dict[str, AllReduces]) -> None:
    """Raises ConfigError for lists that do not belong together."""
    for where, one in times.items():
        if where not in ("within", "between"):
            raise ConfigError(f"all_reduces.{where}: must be within (a node) or between (nodes)")
        every = [*one.ideal_ms, *one.measured_ms]
        if len(one.ideal_ms) != len(one.measured_ms) or not all(math.isfinite(ms) and ms >= 0 for ms in every):
            raise ConfigError(
                f"all_reduces.{where}: ideal_ms and measured_ms must be the same number of values in milliseconds, "
                f"each at least 0"
            )
