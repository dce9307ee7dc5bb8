"""Islands with plans of their own: tensor sizes and layers that are written island by island."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from conf.errors import ConfigError
from conf.schema.values.partition import AUTO, Partition, Shares, run_length_text
from conf.visible import plural
from megatron_ext.contract.keys import Get, shown
from megatron_ext.contract.parallel_config import Parallel

BY_ISLAND = "/"
"""Between the values of islands with plans of their own."""
BY_ISLANDS = ("tensor", "partition")
"""The keys that have such values."""
NOT_BY_ISLAND = {
    "replicas": (None, "parallel.replicas=null"),
    "chunks": (1, "parallel.chunks=1 with parallel.schedule=one_f_one_b"),
    "schedule_file": (None, "parallel.schedule_file=null"),
    "streams": (None, "parallel.streams=null"),
    "scatter_messages": ("false", "parallel.scatter_messages=false"),
    "micro_batch_size": (AUTO, "a number, such as that of tdpp search"),
    "shares": (AUTO, "numbers, such as those of tdpp search"),
}
"""What does not go with them: every value but this one, or auto alone; and what to use instead."""
SAME_IN_ALL = ("recompute", "offload", "zero")
OTHERWISE = "or one parallel.tensor and one parallel.partition for all islands"
Plan = TypeVar("Plan", bound=Parallel)


def check_with_own_plans(get: Get) -> None:
    """Raises ConfigError for a key that does not go with plans by island."""
    given = " ".join(f"parallel.{key}={shown(get(key, None))}" for key in BY_ISLANDS)
    for key, (only, use) in NOT_BY_ISLAND.items():
        value = get(key, only)
        as_word = str(value).lower()  # YAML reads false as False
        if as_word == AUTO if only is AUTO else as_word != str(only).lower():
            raise ConfigError(
                f"parallel.{key}={shown(value)} cannot be combined with plans by island, {given}; use {use}, "
                f"{OTHERWISE}"
            )
    for key in SAME_IN_ALL:
        value = str(get(key, None))
        if "-" in value:
            raise ConfigError(
                f"parallel.{key}={value} is by stage, but all stages of islands with plans of their own, {given}, have "
                f"the same {key}; use one value, {OTHERWISE}"
            )


def own_plans(plan: Plan, sizes: Sequence[int]) -> tuple[Plan, ...]:
    """The plan of each island, which has so many replicas, with its part of the batch; `plan` is that of all. Raises
    ConfigError: there are values for more or fewer islands, or those of an island break a rule."""
    given = dict[str, list[str]]()
    for key in BY_ISLANDS:
        value = getattr(plan, key)
        texts = ("" if value is None else str(value)).split(BY_ISLAND)
        if len(texts) not in (1, len(sizes)) or (len(texts) > 1 and "" in texts):
            islands = plan.islands or run_length_text(sizes, "-")
            raise ConfigError(
                f"parallel.{key}={value} is for {plural(len([*filter(None, texts)]), 'island')}, but there are "
                f"{len(sizes)}: parallel.islands={islands}; give one for each, joined by {BY_ISLAND}"
            )
        given[key] = texts * (len(sizes) if len(texts) == 1 else 1)
    size = plan.micro_batch_size
    shares = Shares.parse(plan.shares).numbers if plan.shares else (1,) * sum(sizes)
    count = max(1, plan.global_batch_size // size // sum(shares))
    found = []
    for number, (tensor, partition) in enumerate(zip(given["tensor"], given["partition"], strict=True)):
        taken = shares[sum(sizes[:number]) :][: sizes[number]]
        with naming(number):
            own = replace(
                plan,
                tensor=int(tensor) if tensor.isdecimal() else tensor,
                pipeline=len(Partition.parse(partition).layers) if partition else plan.pipeline,
                partition=partition or None,
                data=sizes[number],
                islands=None,
                shares=str(Shares(taken)) if len({*taken}) > 1 else None,
                global_batch_size=count * sum(taken) * size,
            )
        found.append(own)
    stages = max(own.pipeline for own in found)
    if plan.pipeline != stages:
        raise ConfigError(
            f"parallel.pipeline={plan.pipeline}, but the islands of parallel.partition={plan.partition} have "
            f"up to {plural(stages, 'stage')}; use parallel.pipeline={stages}"
        )
    return tuple(found)


@contextmanager
def naming(island: int | None) -> Iterator[None]:
    """Names the island with whose plan something is wrong; None: there is one plan for all."""
    try:
        yield
    except ConfigError as error:
        raise error if island is None else ConfigError(f"island {island}: {error}") from None
