"""What a plan has from the predictions of fasop: what nodes of an elastic run take, and a rehearsal's ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import ConfigError, reworded
from conf.schema.experiment import Experiment
from conf.visible import plural
from fasop.errors import SearchError
from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.adaptive.shares import overhead
from megatron_ext.contract.files import read_regular
from megatron_ext.contract.plan_parts import Choosing, Elastic, NodeCounts, RankTimes, TimesInStreams
from megatron_ext.contract.schedule.iteration import SampleDivision, several

if TYPE_CHECKING:
    from fasop.costs.training import PlacedTraining
    from fasop.simulation.ranks.replay import RankDurations
    from fasop.trainings.play import Nodes


def elastic_of(experiment: Experiment, adapt: AdaptConfig | None) -> Elastic:
    """What the plan of an elastic run says of its nodes. `adapt` is what the plan of all nodes says. Raises TdppError:
    with `elastic.by`, what an iteration takes is not known."""
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


def traffic_price(experiment: Experiment) -> float | None:
    """Dollars for what an iteration sends between groups of nodes; None where no link has a price. Raises SearchError:
    the model is a module that no profile knows."""
    columns = [entry for row in experiment.cluster.links.values() for entry in row.values()]
    if not any(entry.get("price_per_gb") for entry in columns):
        return None
    from fasop.search.traffic import dollars_per_step  # with numpy: no other launch needs it
    from fasop.simulation.predict import planned

    with reworded(
        SearchError,
        f"train.max_cost={experiment.train.max_cost:g} needs the bytes that pass links with a price_per_gb: ",
        of=SearchError,
    ):
        return dollars_per_step(planned(experiment))


def _choosing(experiment: Experiment) -> Choosing | None:
    elastic, train = experiment.elastic, experiment.train
    if elastic.by is None:
        return None
    from fasop.trainings.placed_nodes import node_sets
    from fasop.trainings.played import orders  # with numpy: no other launch needs it

    own, groups = experiment.node_order, dict.fromkeys(experiment.node_order.groups)
    epoch = elastic.epoch
    if epoch is None:
        assert train.samples is not None, "a launch counts them (launch.commands.launching.preflight)"
        assert train.epochs is not None, "checked by conf.schema.adapt"
        epoch = train.samples // train.epochs
    with reworded(SearchError, f"elastic.by={elastic.by} needs predicted times: ", of=SearchError):
        found, _ = node_sets(experiment, orders(own))
    times = {one.name: _times(one.nodes, experiment.parallel.micro_batch_size) for one in found}
    of_replica, _ = times[str(own)]
    firsts = accumulate((count // experiment.parallel.tensor_size for count in experiment.ranks_per_node()), initial=0)
    return Choosing(
        by=elastic.by,
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
    times = nodes.times(SampleDivision(shares, (size,) * len(shares), several(nodes.streams)), 1, measures=False)
    assert times is not None, "times are predicted"
    return times.micro_batch_s, overhead(times, shares)


def started_on(path: str, ranks: Sequence[int], min_nodes: int) -> list[int]:
    """The nodes that `elastic.start` names, by node rank; `ranks` are those of each node. Raises ConfigError: the file
    is of another kind, or names what the plan does not have."""
    where = f"elastic.start={path}"
    with reworded(ConfigError, f"{where}: cannot be read as JSON: ", of=(OSError, ValueError, RecursionError)):
        found = json.loads(read_regular(Path(path)))
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


def rehearsal_times(experiment: Experiment, micro_batch_size: int | None = None) -> list[RankTimes]:
    """Returns the times by rank, of replicas with one stream; None: of the micro-batches that the plan has.

    A rank takes its own GPU's time to compute, which of a stage on several kinds of GPU is not the slowest one's. All
    else, which ranks do together, takes what is predicted of the stage.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for a tensor size.
    """
    from fasop.simulation.predict import planned  # with numpy: no other launch needs it

    return _by_rank(planned(experiment), micro_batch_size, in_streams=False)


def times_in_streams(experiment: Experiment, micro_batch_size: int, most: int) -> TimesInStreams:
    """What ranks take while replicas have up to so many streams, by the gain that was measured on their GPUs.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for a tensor size.
    """
    from fasop.costs.stream_rates import stream_rates
    from fasop.simulation.predict import planned

    placed = planned(experiment)
    model, precision = placed.training.model, placed.training.precision
    by_kind = {kind.name: stream_rates(kind.profile, model, precision, micro_batch_size) for kind in placed.kinds}
    rates = [by_kind[node.name] for node in placed.nodes for _ in range(node.gpus)]
    return TimesInStreams(
        size=micro_batch_size,
        ranks=_by_rank(placed, micro_batch_size, in_streams=True),
        rates=[[of.rate(streams) for streams in range(1, most + 1)] for of in rates],
        copy_ns=[_ns(of.copy_s) for of in rates],
    )


def doubts(experiment: Experiment) -> list[str]:
    """What is hard to believe of the times that a rehearsal takes, or is not a measurement, in words.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for a tensor size.
    """
    from fasop.costs.profiles import doubts
    from fasop.simulation.predict import planned
    from fasop.simulation.ranks.rank_durations import basis

    plan = planned(experiment)
    return [*doubts.doubts(plan.training, sorted(plan.kinds, key=lambda kind: kind.name), {basis(plan)})]


def _by_rank(placed: PlacedTraining, micro_batch_size: int | None, *, in_streams: bool) -> list[RankTimes]:
    """Returns the times of one micro-batch by rank; `in_streams` as of `Training`."""
    from fasop.simulation.ranks.rank_durations import by_rank

    sized = placed if micro_batch_size is None else placed.sized(micro_batch_size)
    return [_in_ns(rank) for rank in by_rank(replace(sized, training=replace(sized.training, in_streams=in_streams)))]


def _in_ns(rank: RankDurations) -> RankTimes:
    times = rank.times
    return RankTimes(
        forward_ns=[_ns(seconds) for seconds in times.forward],
        backward_ns=[_ns(seconds) for seconds in times.backward],
        send_forward_ns=_ns(times.send_forward),
        send_backward_ns=_ns(times.send_backward),
        busy_forward_ns=_ns(times.sends("forward-send")[1]),
        busy_backward_ns=_ns(times.sends("backward-send")[1]),
        one_way_out=times.one_way_out,
        grads_all_reduce_ns=_ns(rank.gradients),
        embedding_all_reduce_ns=_ns(rank.embedding),
        optimizer_ns=_ns(rank.optimizer - rank.weights),
        params_all_gather_ns=_ns(rank.weights),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
