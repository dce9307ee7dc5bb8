"""An experiment on numbers of nodes of its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.compose import compose_unchecked
from conf.schema.adapt import Elastic, Rule
from conf.schema.experiment import Experiment
from conf.schema.values.partition import NodeOrder
from conf.visible import plural
from fasop.errors import SearchError
from fasop.trainings.placed_nodes import node_sets, times_of
from fasop.trainings.play import Training
from fasop.trainings.played import NodeSet, orders
from launch.commands.launching.preflight import with_length
from launch.commands.launching.resolve_auto import resolve_auto
from launch.commands.simulating.arguments import Arguments


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What is to be played."""

    training: Training
    """Without noise."""
    own: str
    """The name of the nodes that it is configured for."""
    epoch: float | None
    """Samples; None: not known."""
    node_sets: Sequence[NodeSet]
    refused: dict[str, str]
    """Why a set of nodes cannot train, by its name."""
    notes: Sequence[str]
    runs_dir: Path
    elastic: Elastic | None = None
    """How the run itself would choose nodes."""


def simulated(args: Arguments) -> Simulated:
    """What `tdpp launch` would train, and on which nodes it could. Raises TdppError: it cannot be composed, or its
    times are not known."""
    from fasop.costs.profiles.files import with_profile

    cfg = compose_unchecked(args.overrides)
    if args.profile is not None:
        cfg, _ = with_profile(cfg, args.profile, args.overrides)
    experiment, chosen = resolve_auto(cfg, args.overrides)
    samples, epoch = _length(experiment, args.epoch or experiment.elastic.epoch)
    wanted = _orders(experiment, args.nodes)
    times = times_of(experiment)
    sets, refused = node_sets(experiment, wanted, times)
    parallel, adapt = experiment.parallel, experiment.adapt
    notes = [*([chosen] if chosen is not None else []), *times.notes]
    return Simulated(
        training=Training(
            adapt=adapt.planned(parallel.global_batch_size),
            micro_batch_size=parallel.micro_batch_size,
            global_batch_size=parallel.global_batch_size,
            samples=samples,
            noise=None,
        ),
        own=str(experiment.node_order),
        epoch=epoch,
        node_sets=sets,
        refused=refused,
        notes=notes,
        runs_dir=Path(experiment.runs_dir),
        elastic=experiment.elastic if experiment.elastic.by is not None else None,
    )


def _length(experiment: Experiment, epoch: int | None) -> tuple[float, float | None]:
    """Samples of the training and of an epoch."""
    train = experiment.train
    if train.load is not None:
        raise SearchError(f"train.load={train.load}: a simulation starts from the beginning; leave train.load out")
    if train.epochs is not None and epoch is not None:
        return float(train.epochs * epoch), float(epoch)
    if train.epochs is not None:
        counted = with_length(experiment).train.samples
        assert counted is not None, "with_length finds it"
        return float(counted), counted / train.epochs
    if train.samples is not None:
        return float(train.samples), epoch
    assert experiment.adapt.rule is Rule.none, "checked by conf.schema.rules.adaptation"
    return float(train.last_iteration * experiment.parallel.global_batch_size), epoch


def _orders(experiment: Experiment, given: Sequence[NodeOrder]) -> Sequence[NodeOrder]:
    """Returns the orders given, or all numbers of nodes; of machines that are named one by one only all."""
    own = experiment.node_order
    if experiment.executor.reached:
        return [own]
    for order in given:
        for name in order.groups:
            if order.groups.count(name) > own.groups.count(name):
                raise SearchError(
                    f"nodes={order}: the plan has {plural(own.groups.count(name), 'node')} of group {name!r} ({own}); "
                    f"give at most that many"
                )
    return given or orders(own)
