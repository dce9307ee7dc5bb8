"""The files that are written, with comments on what may be changed. Pure: values in, text out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conf.schema.values.partition import NodeOrder
from conf.visible import plural
from launch.init.gpu_kinds import YAML_WORDS, GpuKind
from launch.init.machines import (
    ASSUMED_GBIT_PER_S,
    CPU_LATENCY_US,
    GPU_LATENCY_US,
    NODE_LATENCY_US,
    TCP_LATENCY_US,
    Found,
    FoundGroup,
)

FROM_DRIVER = "peaks computed from what the driver reports; the data sheet is more accurate"
UNTIL_MEASURED = "assumed, until 'tdpp profile' measures it"


def cluster_text(name: str, found: Found, today: str) -> str:
    """The cluster's file."""
    kinds = {group.gpu.key: group.gpu for group in found.groups}
    lines = [
        f"# Written by 'tdpp init' on {today} from what {found.source}. Change what you like:",
        "# 'tdpp config cluster' explains every key, 'tdpp doctor' compares the figures with the nodes.",
        *(f"# Note: {note}" for note in found.notes),
        "defaults:",
        *(f"  - /gpu@gpus.{kind.key}: {kind.shipped}" for kind in kinds.values() if kind.shipped),
        "  - _self_",
        "",
        f"name: {scalar(name)}",
        *_gpus([kind for kind in kinds.values() if not kind.shipped]),
        "groups:",
    ]
    for group in found.groups:
        lines += _group(group, found.executor)
    return "\n".join([*lines, ""])


def _gpus(kinds: list[GpuKind]) -> Iterator[str]:
    if not kinds:
        return
    yield "gpus:"
    for kind in kinds:
        known = len(kind.values) - 1 > len(kind.assumed)
        yield f"  {kind.key}: # {FROM_DRIVER if known else 'its figures are not known'}"
        for key, value in kind.values:
            assumed = " # assumed: replace it with the figure of the data sheet" if key in kind.assumed else ""
            yield f"    {key}: {scalar(value)}{assumed}"
        yield "    # profile: a name or a file, once 'tdpp profile' has measured it"


def _group(group: FoundGroup, executor: str) -> Iterator[str]:
    yield f"  {group.name}:"
    yield from (f"    # {note}" for note in (*group.notes, *([group.gpu.note] if group.gpu.note else [])))
    yield f"    count: {group.count}"
    ranks = "null # as many ranks as the plan asks for" if group.ranks is None else str(group.ranks)
    if group.on_cpu and group.ranks is not None:
        ranks += " # ranks of a node, a CPU thread each; more of them if you like"
    yield f"    gpus_per_node: {ranks}"
    yield f"    gpu: {group.gpu.key}"
    if executor.startswith("slurm"):
        yield from _slurm(group)
    yield f"    intra_gbit_per_s: {group.within_gbit_per_s:g} # within a node; {UNTIL_MEASURED}"
    yield f"    intra_latency_us: {CPU_LATENCY_US if group.on_cpu else GPU_LATENCY_US:g}"
    known = group.network_gbit_per_s is not None
    rate = group.network_gbit_per_s if known else ASSUMED_GBIT_PER_S
    yield f"    inter_gbit_per_s: {rate:g} # out of a node; {'its peak' if known else UNTIL_MEASURED}"
    latency = CPU_LATENCY_US if group.on_cpu else NODE_LATENCY_US if executor.startswith("slurm") else TCP_LATENCY_US
    yield f"    inter_latency_us: {latency:g}"
    price = "null" if group.price_per_hour is None else f"{group.price_per_hour:g}"
    yield f"    price_per_hour: {price} # US dollars of one node, for searches by cost"


def _slurm(group: FoundGroup) -> Iterator[str]:
    for key, value in {
        "partition": group.partition,
        "gres": group.gres,
        "constraint": group.constraint,
        "account": group.account,
        "qos": group.qos,
        "cpus_per_task": group.cpus,
    }.items():
        if value is not None:
            comment = " # cores of a node for its ranks" if key == "cpus_per_task" else ""
            yield f"    {key}: {scalar(value)}{comment}"
    limit = "" if group.time_limit in (None, "infinite") else f", up to {group.time_limit}"
    yield f"    # time_min: 60 # minutes{limit}; without it the partition's default"
    yield "    # mem: 0 # all memory of a node; without it the partition's default"
    if group.account is None or group.qos is None:
        yield "    # account: and qos:, where Slurm wants them"


def plan_text(plan: FirstPlan) -> str:
    """The first plan's file."""
    return "\n".join(
        [
            f"# Written by 'tdpp init': {plan.why}. 'tdpp search ... plan=NAME' writes better ones.",
            *(f"{key}: {scalar(value)}" for key, value in plan.keys.items()),
            "",
        ]
    )


def experiment_text(name: str, found: Found) -> str:
    """The first experiment's file."""
    hosts = [] if not found.hosts else ["executor:", f"  hosts: {json.dumps(found.hosts)}"]
    return "\n".join(
        [
            "# @package _global_",
            "# Written by 'tdpp init': a small GPT. Every line may be changed, and every key overridden:",
            f"# tdpp launch experiment={name} train.iterations=200",
            "defaults:",
            f"  - override /cluster: {name}",
            "  - override /model: tiny # 'tdpp launch --help' lists others; 'tdpp init model config.json' writes one",
            f"  - override /parallel: {name}",
            "  - override /container: none # this Python; or enroot, pyxis, apptainer, docker (docs/containers.md)",
            f"  - override /executor: {found.executor}",
            "  - override /train: demo",
            "  # tdpp data prepare --source stdlib --tokenizer byte --output data/stdlib",
            "  - override /data: stdlib",
            "  - _self_",
            "",
            f"name: {scalar(name)}",
            *hosts,
            "",
        ]
    )


def model_text(name: str, values: Mapping[str, object], source: str, notes: Sequence[str]) -> str:
    """A model's file."""
    return "\n".join(
        [
            f"# Written by 'tdpp init model' from {source}.",
            *(f"# {note}" for note in notes),
            f"name: {scalar(name)}",
            *(f"{key}: {scalar(value)}" for key, value in values.items()),
            "",
        ]
    )


def scalar(value: object) -> str:
    """Writes a value as YAML: JSON is YAML, and plain words need no quotes."""
    if isinstance(value, str):
        plain = value.replace(":", "").replace("_", "").replace("-", "").replace(".", "").replace("/", "")
        simple = plain.isascii() and plain.isalnum() and value[0].isalpha() and value[-1] != ":"
        return value if simple and value.lower() not in YAML_WORDS else json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value and "e" not in f"{value:g}" else json.dumps(value)
    return json.dumps(value)


MOST_STAGES = 4
"""The model `tiny` has so many layers."""
RANKS_HERE = 4
MICRO_BATCH, MICRO_BATCHES = 2, 4
"""Samples of a micro-batch, and micro-batches of a replica in an iteration."""


@dataclass(frozen=True, kw_only=True)
class FirstPlan:
    """The keys of `parallel` that are not as in `parallel=single`."""

    data: int
    pipeline: int
    node_order: str | None
    why: str
    """What it does, in words."""

    @property
    def keys(self) -> dict[str, int | str]:
        found: dict[str, int | str] = {"data": self.data, "pipeline": self.pipeline}
        found |= {"micro_batch_size": MICRO_BATCH, "global_batch_size": MICRO_BATCH * MICRO_BATCHES * self.data}
        return found | ({} if self.node_order is None else {"node_order": self.node_order})


def first_plan(found: Found) -> FirstPlan:
    """A stage on each of a few nodes, one of every kind or two of the only one; where they have unequal numbers of
    ranks, or are one, replicas."""
    if found.hosts:
        nodes = [int(host.rpartition(":")[2]) if "gpu" not in host else host.count("+") + 1 for host in found.hosts]
        order = str(NodeOrder(found.order)) if len(found.groups) > 1 or found.groups[0].count != len(nodes) else None
        return _over(nodes, order)
    if len(found.groups) > 1:
        chosen = found.groups[:MOST_STAGES]
        return _over([_ranks(group) for group in chosen], str(NodeOrder(tuple(group.name for group in chosen))))
    (group,) = found.groups
    count = min(2, group.count)
    return _over([_ranks(group)] * count, None if count == group.count else f"{group.name}*{count}")


def _over(nodes: list[int], order: str | None) -> FirstPlan:
    ranks = sum(nodes)
    if len(nodes) == 1:
        stages = 2 if ranks % 2 == 0 else 1
    else:
        stages = len(nodes) if len(set(nodes)) == 1 and len(nodes) <= MOST_STAGES else 1
    data = ranks // stages
    what = f"{plural(data, 'replica')} of {plural(stages, 'stage')}"
    where = f"{plural(len(nodes), 'node')}, {plural(ranks, 'rank')}"
    return FirstPlan(data=data, pipeline=stages, node_order=order, why=f"{what} on {where}")


def _ranks(group: FoundGroup) -> int:
    return RANKS_HERE if group.ranks is None else group.ranks
