"""What the plan of an elastic run says of all its nodes: how many ranks they have, how fast their replicas are and how
these may take micro-batches, what nodes cost, and what an iteration is predicted to take on other numbers of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.schema.experiment import Experiment
from conf.visible import plural
from fasop.errors import SearchError
from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.adaptive.shares import overhead
from megatron_ext.contract.files import read_regular, why
from megatron_ext.contract.plan_parts import Choosing, Elastic, NodeCounts
from megatron_ext.contract.schedule.deal import Division, several

if TYPE_CHECKING:
    from fasop.trainings.play import Nodes


def elastic_of(experiment: Experiment, adapt: AdaptConfig | None) -> Elastic | None:
    """None where only these nodes train. `adapt` is what the plan of all nodes says.

    Raises:
        TdppError: with `elastic.by`, what an iteration takes is not known.
    """
    if not experiment.elastic.enabled:
        return None
    parallel, counts = experiment.parallel, experiment.ranks_per_node()
    prices = [experiment.cluster.groups[name].price_per_hour for name in experiment.node_order.groups]
    return Elastic(
        min_nodes=experiment.elastic.min_nodes,
        ranks=list(counts),
        weights=[float(share) for share in parallel.micro_batches_of],
        prices=None if None in prices else [price for price in prices if price is not None],
        choosing=_choosing(experiment),
        streams=list(parallel.streams_of) if max(parallel.streams_of) > 1 else None,
        micro_batch_sizes=None if adapt is None else adapt.micro_batch_sizes,
        numbers_of_streams=None if adapt is None else adapt.streams,
    )


def _choosing(experiment: Experiment) -> Choosing | None:
    elastic, train = experiment.elastic, experiment.train
    if elastic.by is None:
        return None
    from fasop.trainings.node_set import orders  # with numpy: no other launch needs it
    from fasop.trainings.placed_nodes import node_sets

    own, groups = experiment.node_order, dict.fromkeys(experiment.node_order.groups)
    epoch = elastic.epoch
    if epoch is None:
        assert train.samples is not None, "a launch counts them (launch.commands.launching.preflight)"
        assert train.epochs is not None, "checked by conf.schema.elastic"
        epoch = train.samples // train.epochs
    try:
        found, _ = node_sets(experiment, orders(own))
    except SearchError as error:
        raise SearchError(f"elastic.by={elastic.by} needs predicted times: {error}") from error
    times = {one.name: _times(one.nodes, experiment.parallel.micro_batch_size) for one in found}
    of_replica, _ = times[str(own)]
    firsts = accumulate((count // experiment.parallel.tensor_size for count in experiment.ranks_per_node()), initial=0)
    return Choosing(
        by=str(elastic.by),
        epoch=float(epoch),
        restart_s=elastic.restart_s,
        release=elastic.release,
        micro_batch_s=[of_replica[first] for first in list(firsts)[:-1]],
        candidates=[
            NodeCounts({name: one.groups.count(name) for name in groups}, times[str(one)][1])
            for one in orders(own)
            if str(one) in times
        ],
    )


def _times(nodes: Nodes, size: int) -> tuple[Sequence[float], float]:
    """Seconds of a micro-batch, by replica, and of what an iteration has beside them."""
    shares = tuple(nodes.weights)
    times = nodes.times(Division(shares, (size,) * len(shares), several(nodes.streams)), 1, measures=False)
    assert times is not None, "times are predicted"
    return times.micro_batch_s, overhead(times, shares)


def started_on(path: str, ranks: Sequence[int], min_nodes: int) -> list[int]:
    """The nodes that `elastic.start` names, by node rank; `ranks` are those of each node.

    Raises:
        ConfigError: the file is of another kind, or names what the plan does not have.
    """
    where = f"elastic.start={path}"
    try:
        found = json.loads(read_regular(Path(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cannot be read as JSON: {why(error)}") from error
    if not isinstance(found, dict) or not found:
        raise ConfigError(f'{where}: must be numbers of GPUs by node rank, such as {{"0": 4, "1": 4}}')
    nodes = []
    for key, value in found.items():
        node = int(key) if key.isdecimal() and len(key) < 10 else -1
        if not 0 <= node < len(ranks):
            raise ConfigError(f"{where}: node {key!r} must be one of the plan's, 0 to {len(ranks) - 1}")
        if str(value) not in ("0", str(ranks[node])) or isinstance(value, bool):
            raise ConfigError(
                f"{where}: node {key} has {plural(ranks[node], 'GPU')} in the plan, but {value!r} here; a node takes "
                f"part with all of its GPUs or none: give {ranks[node]} or 0"
            )
        if str(value) != "0":
            nodes.append(node)
    if not nodes:
        raise ConfigError(f"{where}: no node has GPUs, so nothing would train; give at least one")
    if len({*nodes}) < min_nodes:
        raise ConfigError(
            f"{where}: gives GPUs to {plural(len({*nodes}), 'node')}, fewer than elastic.min_nodes={min_nodes}; add "
            "nodes, or use a smaller elastic.min_nodes"
        )
    return sorted({*nodes})
