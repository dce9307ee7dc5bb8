"""What a user has given of the keys of plan.json, by which `megatron_ext.contract.rules` has rules for both."""

from __future__ import annotations

from typing import NamedTuple

from conf.schema.adapt import Adapt, Elastic
from conf.schema.parallel import Parallel
from megatron_ext.contract.keys import shown
from megatron_ext.contract.parallel_config import SCATTERED, Compress, Offload, ReduceDtype, Shards


class Given(NamedTuple):
    """A key of plan.json as a user knows it."""

    name: str
    value: object
    """What was given."""
    planned: object
    """What stands for it in the plan; None where plan.json has null."""

    def __str__(self) -> str:
        return f"{self.name}={shown(self.value)}"


def keys_of_plan(parallel: Parallel) -> dict[str, Given]:
    """Keys by the names that they have in plan.json."""
    schedule, tensors = str(parallel.schedule), parallel.layout.tensors
    planned = {
        "tensors": ("tensor", tensors if len({*tensors}) > 1 else None),
        "replicas": ("replicas", None if parallel.layout.even else parallel.replicas),
        "shares": ("shares", parallel.shares),
        "streams": ("streams", parallel.streams if max(parallel.streams_of) > 1 else None),
        "reduce_dtype": ("reduce_dtype", None if parallel.reduce_dtype is ReduceDtype.fp32 else parallel.reduce_dtype),
        "compress": ("compress", None if parallel.compress is Compress.none else parallel.compress),
        "sharded_optimizer": ("sharded_optimizer", parallel.sharded_optimizer),
        "zero": ("zero", parallel.zero if max(parallel.zeros) >= SCATTERED else None),
        "zeros": ("zero", parallel.zeros if len({*parallel.zeros}) > 1 else None),
        "shards": ("shards", None if parallel.shards is Shards.equal else parallel.shards),
        "offload": ("offload", None if parallel.offload is Offload.none else parallel.offload),
        "recompute": ("recompute", parallel.recompute),
        "scattered_cuts": ("scatter_messages", True if parallel.scatter_messages == "true" else None),
        "hierarchical_stages": ("hierarchical_reduce", parallel.hierarchical_reduce or None),
        "chunks": ("chunks", parallel.chunks),
        "schedule_file": ("schedule_file", parallel.schedule_file),
        "schedule": ("schedule", schedule),
        "streaming": ("schedule", None if parallel.stream is None else schedule),
    }
    return {key: Given(f"parallel.{name}", getattr(parallel, name), one) for key, (name, one) in planned.items()}


def keys_that_change(adapt: Adapt, elastic: Elastic) -> dict[str, Given]:
    """The same of what changes a plan while it trains."""
    name = "rebalance" if adapt.rebalance else "rule"
    return {
        "adapt": Given(f"adapt.{name}", getattr(adapt, name), adapt.on or None),
        "elastic": Given("elastic.enabled", elastic.enabled, elastic.enabled or None),
    }
