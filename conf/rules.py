"""The rules of a configuration, each with its message: keys, values, what does not hold, what would.

Every function returns nothing and raises `ConfigError` when its rule is broken.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from conf.errors import ConfigError

if TYPE_CHECKING:
    from conf.schema import Cluster, Experiment, Parallel, Train


def at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}")


def between(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key}={value} must be between {low} and {high}")


def divides(key: str, value: int, whole_key: str, whole: int) -> None:
    if whole % value:
        near = ", ".join(map(str, nearest_divisors(whole, value)))
        raise ConfigError(f"{whole_key}={whole} is not divisible by {key}={value}; nearest that divide: {near}")


def nearest_divisors(whole: int, value: int) -> list[int]:
    """The largest divisor of `whole` below `value` and the smallest above, where they exist."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in divisors if d < value][-1:]
    above = [d for d in divisors if d > value][:1]
    return below + above


def known_gpus(cluster: Cluster) -> None:
    if not cluster.groups:
        raise ConfigError(f"cluster {cluster.name!r} has no node groups: give it at least one, cluster.groups.<name>")
    for name, group in cluster.groups.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"cluster.groups: {name!r} is not a group name; use letters, digits, '.', '_', '-'")
        if group.gpu not in cluster.gpus:
            raise ConfigError(
                f"cluster.groups.{name}.gpu={group.gpu} is not in cluster.gpus, which has: "
                f"{', '.join(cluster.gpus) or 'nothing'}"
            )
        if group.gpus_per_node is None and (len(cluster.groups) > 1 or group.count > 1):
            raise ConfigError(
                f"cluster.groups.{name}.gpus_per_node=null (as many ranks as the plan asks for) needs a cluster "
                "of one node; give the number of GPUs per node"
            )


def batch_divides(parallel: Parallel) -> None:
    step = parallel.data * parallel.micro_batch_size
    batch = parallel.global_batch_size
    if batch % step:
        near = ", ".join(str(n) for n in (batch // step * step, (batch // step + 1) * step) if n)
        raise ConfigError(
            f"parallel.global_batch_size={batch} is not divisible by parallel.data * parallel.micro_batch_size = "
            f"{parallel.data} * {parallel.micro_batch_size} = {step}; nearest that are: {near}"
        )


def partition_fits(experiment: Experiment) -> None:
    parallel, layers = experiment.parallel, experiment.model.layers
    partition = experiment.partition
    stages, total = len(partition.layers), sum(partition.layers)
    if stages != parallel.pipeline:
        raise ConfigError(
            f"parallel.partition={partition} has {stages} stages, but parallel.pipeline={parallel.pipeline}; "
            f"use parallel.pipeline={stages} or a partition of {parallel.pipeline} numbers"
        )
    if total != layers:
        raise ConfigError(
            f"parallel.partition={partition} has {total} layers ({' + '.join(map(str, partition.layers))}), but "
            f"model.layers={layers}; nearest that fits: {partition.fitted(layers)}"
        )


def nodes_exist(experiment: Experiment) -> None:
    order = experiment.node_order.groups
    groups = experiment.cluster.groups
    for name in dict.fromkeys(order):
        if name not in groups:
            raise ConfigError(
                f"parallel.node_order={experiment.parallel.node_order} names the node group {name!r}, which "
                f"cluster {experiment.cluster.name!r} has not; it has: {', '.join(groups)}"
            )
        if order.count(name) > groups[name].count:
            raise ConfigError(
                f"parallel.node_order={experiment.parallel.node_order} uses {order.count(name)} nodes of group "
                f"{name!r}, but cluster.groups.{name}.count={groups[name].count}"
            )


def ranks_fill_nodes(experiment: Experiment) -> None:
    parallel, ranks = experiment.parallel, experiment.ranks_per_node()
    gpus = sum(ranks)
    if parallel.world_size == gpus:
        return
    rest = parallel.tensor * parallel.pipeline
    ways = []
    if gpus % rest == 0:
        ways.append(f"parallel.data={gpus // rest}")
    if gpus % (parallel.tensor * parallel.data) == 0:
        ways.append(f"parallel.pipeline={gpus // (parallel.tensor * parallel.data)}")
    if len(set(ranks)) == 1 and parallel.world_size % ranks[0] == 0:
        ways.append(f"{parallel.world_size // ranks[0]} nodes (cluster.groups.<group>.count, parallel.node_order)")
    raise ConfigError(
        f"parallel.tensor * parallel.data * parallel.pipeline = {parallel.tensor} * {parallel.data} * "
        f"{parallel.pipeline} = {parallel.world_size} ranks, but the {len(ranks)} chosen nodes of cluster "
        f"{experiment.cluster.name!r} have {gpus} GPUs"
        + (f"; one of these fits: {'; '.join(ways)}" if ways else "; change one of the three sizes")
    )


def tensor_fits(experiment: Experiment) -> None:
    tensor = experiment.parallel.tensor
    divides("parallel.tensor", tensor, "model.heads", experiment.model.heads)
    for name in dict.fromkeys(experiment.node_order.groups):
        per_node = experiment.cluster.groups[name].gpus_per_node
        if per_node is not None and per_node % tensor:
            near = ", ".join(map(str, nearest_divisors(per_node, tensor)))
            raise ConfigError(
                f"parallel.tensor={tensor} does not fit the nodes of group {name!r} with {per_node} GPUs: a tensor-"
                f"parallel group must lie inside one node; nearest that fit: {near}"
            )


def learning_rate(train: Train) -> None:
    decay = train.iterations if train.lr_decay_iterations is None else train.lr_decay_iterations
    if not 0 <= train.min_lr <= train.lr:
        raise ConfigError(f"train.min_lr={train.min_lr} must be between 0 and train.lr={train.lr}")
    if not 0 <= train.lr_warmup_iterations < decay:
        raise ConfigError(
            f"train.lr_warmup_iterations={train.lr_warmup_iterations} must be at least 0 and less than "
            f"train.lr_decay_iterations={decay}"
        )
    if not (math.isfinite(train.clip_grad) and train.clip_grad >= 0):
        raise ConfigError(f"train.clip_grad={train.clip_grad} must be 0 (no clipping) or a positive norm")


def split(text: str) -> None:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(re.fullmatch(r"\d+(\.\d+)?", part) for part in parts) or not float(parts[0]):
        raise ConfigError(
            f"data.split={text!r} must be three weights for training, validation and test, the first above 0, "
            "such as '969,30,1'"
        )


def run_name(name: str) -> None:
    if not name or name.startswith((".", "-")) or "/" in name or "\0" in name or name in ("by_job", "sweeps"):
        raise ConfigError(
            f"name={name!r} cannot name a run folder: it must not be empty, start with '.' or '-', hold '/', or be "
            "'by_job' or 'sweeps'"
        )
