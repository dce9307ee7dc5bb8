"""How the model and the batch are cut, and which node takes which part."""

from __future__ import annotations

from enum import StrEnum

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.partition import Shares


class Schedule(StrEnum):
    """In which order a stage takes its forward and backward passes (megatron_ext/contract/schedules.py)."""

    gpipe = "gpipe"
    """All forward, then all backward."""
    one_f_one_b = "one_f_one_b"
    """In turn; a stage holds no more micro-batches than stages follow it, and its own."""
    interleaved = "interleaved"
    """In turn over several chunks of the model on a stage: a smaller bubble for more messages and memory."""
    zb_h1 = "zb_h1"
    """1F1B with the weight gradients where it would wait: a smaller bubble, no stage holds more than the first."""


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass, to save their memory."""

    none = "none"
    selective = "selective"
    """The attention's core."""
    full = "full"
    """All but each layer's input."""


@config
class Parallel:
    """The plan: how the model and the batch are cut, and which node takes which part."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    partition: str | None = None
    """Transformer layers per stage, such as 0-11-8-8-8-8-5-0; null: as even as possible.

    With several chunks first those of every stage's chunk 0, then of chunk 1, and so on.
    """
    sequence_parallel: bool = False
    """Share the sequence over the tensor group outside its parallel regions: less memory for the same messages."""
    recompute: Recompute = Recompute.none
    sharded_optimizer: bool = False
    """Each replica keeps the optimizer state of its share of the weights only (ZeRO stage 1)."""
    micro_batch_size: int = 1
    global_batch_size: int = MISSING
    schedule: Schedule = Schedule.one_f_one_b
    chunks: int = 1
    """Parts of the model that each stage holds, 2 or more with the schedule `interleaved`."""
    schedule_file: str | None = None
    """A schedule of your own, which runs instead of `schedule` (docs/formats.md)."""
    shares: str | None = None
    """Micro-batches of each replica in proportion, such as 3-1 or 3*4-1*4, for replicas on GPUs of unlike speed; null:
    all take the same number."""
    node_order: str | None = None
    """Node groups by node rank, such as hgx+gpu2*7; null: all nodes, in the cluster's order."""

    def __post_init__(self) -> None:
        ranges.check("parallel", self)
        _check_shares(self)
        _check_batch(self)
        _check_chunks(self)

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def virtual_stages(self) -> int:
        """Parts of the model: chunk c of stage s is number c * pipeline + s."""
        return self.pipeline * self.chunks

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a data-parallel replica runs in an iteration; of unequal shares the most."""
        return (
            max(self.micro_batches_of) if self.shares else self.global_batch_size // (self.data * self.micro_batch_size)
        )

    @property
    def micro_batches_of(self) -> tuple[int, ...]:
        """By replica."""
        shares = Shares.parse(self.shares) if self.shares else Shares((1,) * self.data)
        return shares.of(self.global_batch_size // self.micro_batch_size)


def _check_shares(parallel: Parallel) -> None:
    if parallel.shares is None:
        return
    shares, data = Shares.parse(parallel.shares), parallel.data
    if len(shares.numbers) != data:
        count = len(shares.numbers)
        raise ConfigError(
            f"parallel.shares={shares} is for {count} replica{'s' * (count != 1)}, but parallel.data={data}; "
            f"use parallel.data={count}, or {data} share{'s' * (data != 1)}"
        )
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.shares={shares} does not go with parallel.schedule_file={parallel.schedule_file}, which is for "
            "one number of micro-batches; use a named parallel.schedule, or parallel.shares=null"
        )
    size, batch = parallel.micro_batch_size, parallel.global_batch_size
    if batch % (shares.least * size) == 0:
        return
    step = shares.least * size
    near = " or ".join(str(n) for n in (batch // step * step, (batch // step + 1) * step) if n)
    other = ""
    if batch % size == 0 and batch // size >= data:
        other = f", or parallel.shares={shares.fitted(batch // size)}"
    raise ConfigError(
        f"parallel.shares={shares} cannot share out parallel.global_batch_size={batch} samples in micro-batches of "
        f"{size}: it must be a multiple of {shares.least} micro-batches, {step} samples; use "
        f"parallel.global_batch_size={near}{other}"
    )


def _check_batch(parallel: Parallel) -> None:
    if parallel.shares is not None:
        return
    step = parallel.data * parallel.micro_batch_size
    batch = parallel.global_batch_size
    if batch % step:
        near = ", ".join(str(n) for n in (batch // step * step, (batch // step + 1) * step) if n)
        raise ConfigError(
            f"parallel.global_batch_size={batch} is not divisible by parallel.data * "
            f"parallel.micro_batch_size = {parallel.data} * {parallel.micro_batch_size} = {step}; "
            f"nearest that are: {near}"
        )


def _check_chunks(parallel: Parallel) -> None:
    """A schedule of one's own may have any number of chunks."""
    chunks, pipeline = parallel.chunks, parallel.pipeline
    interleaved = parallel.schedule == "interleaved"
    if chunks > 1 and pipeline == 1:
        raise ConfigError(
            f"parallel.chunks={chunks} needs parallel.pipeline of at least 2, not {pipeline}: one stage holds the "
            "whole model; use parallel.chunks=1"
            + (" and another parallel.schedule, such as one_f_one_b" if interleaved else "")
        )
    if parallel.schedule_file is not None:
        return
    if interleaved and chunks == 1:
        raise ConfigError(
            f"parallel.schedule=interleaved needs parallel.chunks of at least 2, not {chunks}; use parallel.chunks=2, "
            "or parallel.schedule=one_f_one_b"
        )
    if chunks > 1 and not interleaved:
        raise ConfigError(
            f"parallel.chunks={chunks} needs parallel.schedule=interleaved, not {parallel.schedule}, which has one "
            "chunk on a stage; use that, or parallel.chunks=1"
        )
