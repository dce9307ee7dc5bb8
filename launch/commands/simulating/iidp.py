"""`iidp=FILE`: a training on servers that IIDP or JABAS profiled, as JABAS would adapt it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.compose import compose_unchecked, to_object
from conf.reading.values import parse_key_values
from conf.run_folder.run_folders import usual_runs_dir
from conf.schema.adapt import Adapt, Rule
from conf.schema.values.partition import AUTO
from fasop.errors import SearchError
from fasop.shares.json_files import of_word
from fasop.shares.public_files import read_adaptation, read_cluster
from fasop.trainings.play import Training
from fasop.trainings.played import orders
from fasop.trainings.public_nodes import kinds_of, node_sets, sizes_with, step, streams_by_server, unit_of, whole_order
from launch.commands.searching.shares import Overlap, weight_sync
from launch.commands.simulating.arguments import OF_PUBLIC, Arguments
from launch.commands.simulating.experiment import Simulated


def simulated(args: Arguments, file: Path) -> Simulated:
    """What the configuration describes, with the keys of the command line in the place of its own. Raises TdppError: a
    word or a file cannot be read, or the batch cannot be shared out."""
    given, others = parse_key_values(args.overrides, OF_PUBLIC, SearchError)
    if strange := [word for word in others if not word.startswith("adapt.")]:
        raise SearchError(f"iidp={file} does not take {strange[0]}, only {', '.join(OF_PUBLIC)} and adapt.KEY")
    with of_word("iidp", file):
        cluster, of_jabas = read_cluster(file), read_adaptation(file)
    batch = given.get("parallel.global_batch_size", cluster.smallest_batch)
    if batch is None:
        raise SearchError(f"iidp={file} needs the global batch: add parallel.global_batch_size=512, for example")
    adapt = _adapt(of_jabas, others)
    if adapt.rule is Rule.goodput or adapt.rebalance:
        what = "adapt.rebalance=true" if adapt.rebalance else f"adapt.rule={adapt.rule}"
        raise SearchError(
            f"{what} needs times that a run measures; with iidp={file} every batch is divided anew anyway: use "
            f"adapt.rule=similarity or noise"
        )
    size = given.get("parallel.micro_batch_size")
    unit = unit_of(cluster, args.unit)
    streams = streams_by_server(cluster, given.get("parallel.streams", AUTO), unit)
    sizes = sizes_with(cluster, size, streams)
    step_size = step(sizes, unit)
    if batch % (2 * step_size):
        near = batch // (2 * step_size) * 2 * step_size
        raise SearchError(
            f"parallel.global_batch_size={batch} must be a multiple of {2 * step_size}, for micro-batches of "
            f"{min(sizes)} and units of {unit} GPUs; {near or 2 * step_size} or {near + 2 * step_size} would be"
        )
    lower, upper = adapt.bounds(batch)
    if not lower <= batch <= upper:
        raise SearchError(
            f"parallel.global_batch_size={batch}, with which the training starts, must lie between adapt.lower={lower} "
            f"and adapt.upper={upper}"
        )
    whole = whole_order(cluster, streams)
    for order in args.nodes:
        for name in order.groups:
            if order.groups.count(name) > whole.groups.count(name):
                raise SearchError(f"nodes={order}: {file} has {whole}; give at most that many of each")
    prices, kinds = args.prices or {}, kinds_of(cluster, streams)
    if unknown := [name for name in prices if name not in kinds]:
        raise SearchError(f"prices={unknown[0]}:…: the kinds of servers are {', '.join(kinds)}")
    sync = weight_sync(given.get("train.overlap_optimizer", Overlap.auto), cluster)
    return Simulated(
        training=Training(
            adapt=adapt.planned(batch),
            micro_batch_size=step_size,
            global_batch_size=batch,
            samples=_samples(file, given.get("train.samples"), given.get("train.epochs"), args.epoch),
            noise=None,
        ),
        own=str(whole),
        epoch=args.epoch,
        node_sets=node_sets(cluster, sync, args.nodes or orders(whole), size, args.unit, prices, streams),
        refused={},
        notes=[],
        runs_dir=given.get("runs_dir", usual_runs_dir()),
    )


def _adapt(of_jabas: Mapping[str, str | float | int], words: Sequence[str]) -> Adapt:
    """What a configuration says of the batch, as far as the rule of the command line looks at it, and the words."""
    rule = next((Rule(word) for word in Rule if f"adapt.rule={word}" in words), Rule.similarity)
    used = {Rule.similarity: of_jabas.keys(), Rule.none: ()}.get(rule, ("lower", "upper", "every", "target"))
    own = [f"adapt.{key}={value}" for key, value in of_jabas.items() if key in used]
    return to_object(compose_unchecked([*own, *words]), Adapt, "adapt")


def _samples(file: Path, samples: int | None, epochs: int | None, epoch: int | None) -> float:
    if samples is not None and epochs is None:
        return float(samples)
    if samples is None and epochs is not None and epoch is not None:
        return float(epochs * epoch)
    raise SearchError(
        f"iidp={file} needs the length of the training: add train.epochs=90 epoch=1281167, the samples of an epoch, or "
        "train.samples=N alone"
    )
