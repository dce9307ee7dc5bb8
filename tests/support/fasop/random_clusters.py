"""Small clusters and models made from a seed, and all plans for them: what a search is held against."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from conf.schema.experiment import (
    Engine,
    EngineKind,
    Gpu,
    Model,
    NodeGroup,
    Precision,
    Recompute,
    Schedule,
)
from conf.schema.model import Family
from conf.schema.values.links import PairLink
from conf.schema.values.topology import Uplink
from fasop.costs.hardware import Factors, NodeKind
from fasop.costs.memory.allowance import communicator_bytes, context_bytes
from fasop.costs.memory.amounts import FRAGMENT_BYTES, GIB, WORKSPACE_BYTES
from fasop.costs.parallelism import Parallelism
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import CollectiveTimes, Operation
from fasop.costs.training import Training
from fasop.search.space.choices import Choices
from megatron_ext.contract.models.model import ModelConfig
from tests.support.fasop.plans import pipelines
from tests.support.fasop.random_pipelines import FLUSHING, all_partitions

MOST_PLANS = 10_000
"""Partitions and orders of any sizes of a cluster that are tried one and all."""


class _Shuffled(ModelConfig):
    """A T5's blocks between embedding and head, in an order of their own."""

    def all_kinds(self) -> tuple[tuple[str, int], ...]:
        first, *between, last = super().all_kinds()
        single = [kind for kind, count in between for _ in range(count)]
        random.Random(repr(self)).shuffle(single)
        while single[-1] in ("encoder_norm", "decoder_embedding"):  # they lie with a layer behind them
            single.insert(0, single.pop())
        return (first, *((kind, 1) for kind in single), last)


class Shuffled(Model):
    """A model of layers of several kinds, in any order."""

    def sized(self, tensor: int) -> ModelConfig:
        return _Shuffled(**vars(super().sized(tensor)))


def random_case(
    rng: np.random.Generator, *, alike: bool = True, schedules: Sequence[Schedule] = FLUSHING
) -> tuple[Training, list[NodeKind], Choices]:
    """One to three groups of nodes whose speed, memory and links differ, and a model of a few layers: of a GPT's, which
    are alike; or of a T5's, in its order or in any. Some of the schedules are its choices.
    """
    kinds = [_kind(rng, name) for name in "abc"[: rng.integers(1, 4)]]
    if rng.random() < 0.6:
        kinds = [replace(kind, gpus=kinds[0].gpus) for kind in kinds]
    model_class, own = Model, {}
    if not alike:
        model_class = (Model, Shuffled)[rng.integers(2)]
        own = {
            "family": Family("t5"),
            "decoder_layers": int(rng.integers(1, 4)),
            "decoder_sequence_length": int(rng.choice([16, 256])),
        }
    model = model_class(
        name="small",
        layers=int(rng.integers(2, 7) if alike else rng.integers(1, 4)),
        hidden=int(rng.choice([16, 64, 256, 1024])),
        heads=int(rng.choice([2, 4])),
        sequence_length=int(rng.choice([32, 256])),
        vocab_size=int(rng.choice([100, 5000])),
        **own,
    )
    choices = Choices(
        schedule=tuple(rng.permutation(np.array(tuple(schedules), object))[: rng.integers(1, 5)]),
        recompute=(Recompute.none, Recompute.full)[: rng.integers(1, 3)],
        sharded_optimizer=(False, True)[: rng.integers(1, 3)],
    )
    parallel = Parallelism(global_batch_size=int(rng.choice([4, 6, 8, 12])))
    engine = Engine(kind=EngineKind.tdpp)
    return (
        Training(model=model, parallel=parallel, precision=Precision(rng.choice(["fp32", "fp16"])), engine=engine),
        kinds,
        choices,
    )


def _kind(rng: np.random.Generator, name: str) -> NodeKind:
    def about(number: float) -> float:
        return float(number * 10 ** rng.uniform(-1, 1))

    rates = [about(10) for _ in range(3)]
    gpu = Gpu(
        name=name.upper(),
        memory_gib=float(rng.choice([80.0, about(8e7) / GIB])),
        fp32_tflops=rates[0],
        fp16_tflops=rates[1],
        bf16_tflops=rates[2],
        memory_gb_per_s=about(500),
    )
    gpus = int(rng.integers(1, 4))
    group = NodeGroup(
        count=int(rng.integers(1, 4)),
        gpus_per_node=gpus,
        gpu=name,
        intra_gbit_per_s=about(100),
        intra_latency_us=about(5),
        inter_gbit_per_s=about(20),
        inter_latency_us=about(20),
        price_per_hour=about(5),
    )
    factors = Factors(forward=about(1), backward=about(1)) if rng.random() < 0.5 else Factors()
    kind = NodeKind(name=name, group=group, gpu=gpu, gpus=gpus, profile=None, factors=factors)
    always = context_bytes(gpu) + communicator_bytes(kind, 5) + FRAGMENT_BYTES + WORKSPACE_BYTES
    return replace(kind, gpu=replace(gpu, memory_gib=gpu.memory_gib + always / GIB))


def with_links(rng: np.random.Generator, kinds: Sequence[NodeKind]) -> list[NodeKind]:
    """The same nodes, of which some pairs have links of their own, whose directions or sizes may differ."""
    alike = rng.random() < 0.4

    def link() -> PairLink:
        rate = float(20 * 10 ** rng.uniform(-1, 1))
        latency = float(20 * 10 ** rng.uniform(-1, 1)) if rng.random() < 0.7 else None
        if rng.random() < 0.6:
            return PairLink(gbit_per_s=rate, latency_us=latency)
        small = 10 ** int(rng.integers(2, 6))
        points = ((small, rate * 0.2), (8 * small, rate), (64 * small, rate * 2))
        return PairLink(gbit_per_s_by_bytes=points[: rng.integers(2, 4)], latency_us=latency)

    table: dict[str, dict[str, PairLink]] = {kind.name: {} for kind in kinds}
    for first, second in itertools.combinations_with_replacement([kind.name for kind in kinds], 2):
        if rng.random() < 0.7:
            there = link()
            table[second][first] = there if alike else link()
            table[first][second] = there
    return [replace(kind, links=table[kind.name]) for kind in kinds]


def with_uplinks(rng: np.random.Generator, kinds: Sequence[NodeKind]) -> list[NodeKind]:
    """The same nodes, most of which hang on one of two leaves."""
    rates = {name: float(20 * 10 ** rng.uniform(-1, 1)) for name in "xy"}
    leaves = [rng.choice([*"xy", ""], p=[0.4, 0.4, 0.2]) for _ in kinds]
    return [
        replace(kind, uplink=Uplink(leaf, rates[leaf]) if leaf else None)
        for kind, leaf in zip(kinds, leaves, strict=True)
    ]


def with_nics(rng: np.random.Generator, kinds: Sequence[NodeKind]) -> list[NodeKind]:
    """The same nodes, of which most have several network cards."""
    return [replace(kind, group=replace(kind.group, nics=int(rng.integers(1, kind.gpus + 1)))) for kind in kinds]


def with_collectives(rng: np.random.Generator, kinds: Sequence[NodeKind]) -> list[NodeKind]:
    """The same nodes, of which some have measured collectives of some operations and numbers of ranks."""

    def times(operation: Operation, ranks: int, nodes: int) -> CollectiveTimes:
        sizes = sorted({int(10 ** rng.uniform(1, 8)) for _ in range(6)})
        us_by_bytes = {size: float(10 ** rng.uniform(0, 1) + size / 10 ** rng.uniform(2, 4)) for size in sizes}
        sharing = int(rng.integers(1, 4)) if nodes > 1 else 1
        return CollectiveTimes(operation=operation, ranks=ranks, nodes=nodes, sharing=sharing, us_by_bytes=us_by_bytes)

    found = []
    for kind in kinds:
        some = [
            times(operation, ranks, nodes)
            for operation in Operation
            for ranks in (2, 4)
            for nodes in (1, 2)
            if rng.random() < 0.6
        ]
        profile = LayerProfile(gpu=kind.gpu.name, source="drawn", collectives=some) if some else None
        found.append(kind if kind.profile is not None or profile is None else replace(kind, profile=profile))
    return found


def with_slow_links(rng: np.random.Generator, kinds: Sequence[NodeKind]) -> list[NodeKind]:
    """As `with_links`, up to a hundred times as slow."""
    part = float(rng.choice([1.0, 0.1, 0.01]))

    def slower(link: PairLink) -> PairLink:
        points = tuple((size, part * rate) for size, rate in link.gbit_per_s_by_bytes)
        return replace(link, gbit_per_s=link.gbit_per_s and part * link.gbit_per_s, gbit_per_s_by_bytes=points)

    return [
        replace(kind, links={name: slower(link) for name, link in kind.links.items()})
        for kind in with_links(rng, kinds)
    ]


NETWORKS: Mapping[str, Callable[[np.random.Generator, Sequence[NodeKind]], Sequence[NodeKind]]] = {
    "plain": lambda _, kinds: kinds,
    "leaves": lambda rng, kinds: with_nics(rng, with_uplinks(rng, kinds)),
    "links": with_slow_links,
    "links and leaves": lambda rng, kinds: with_slow_links(rng, with_nics(rng, with_uplinks(rng, kinds))),
    "collectives": with_collectives,
}
"""What nodes may have between them."""


def all_sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> Iterator[Training]:
    """Every plan but for its partition and its order, one by one, with all that `Choices` may leave out."""
    gpus = sum(kind.gpus * kind.group.count for kind in kinds)
    model, batch = training.model, training.parallel.global_batch_size
    for tensor, data in itertools.product(range(1, gpus + 1), repeat=2):
        pipeline, left = divmod(gpus, tensor * data)
        whole_nodes = all(kind.gpus % tensor == 0 for kind in kinds)
        if left or model.heads % tensor or not whole_nodes or batch % data or pipeline > model.counted + 2:
            continue
        for micro in range(1, batch // data + 1):
            if batch // data % micro:
                continue
            for schedule in choices.schedule:
                chunks = 2 if schedule == "interleaved" else 1
                if chunks > 1 and (pipeline == 1 or pipeline * chunks > model.counted):
                    continue
                for recompute, sharded in itertools.product(choices.recompute, choices.sharded_optimizer):
                    parallel = replace(
                        training.parallel,
                        tensor=tensor,
                        data=data,
                        pipeline=pipeline,
                        micro_batch_size=micro,
                        schedule=schedule,
                        chunks=chunks,
                        recompute=recompute,
                        sharded_optimizer=sharded,
                    )
                    yield replace(training, parallel=parallel)


def best_times(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> list[tuple[Training, float]] | None:
    """By sizes and options, seconds of the fastest of all partitions and orders of all these nodes; infinite where none
    fits. None if there are too many.
    """
    nodes = [number for number, kind in enumerate(kinds) for _ in range(kind.group.count)]
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for order in sorted(set(itertools.permutations(nodes))):
        alike.setdefault(tuple(kinds[number].gpus for number in order), []).append(order)
    most = max(map(len, alike.values()))
    best = []
    for sized in all_sizes(training, kinds, choices):
        table = all_partitions(training.model.counted, sized.parallel.virtual_stages)
        if table.shape[1] * most > MOST_PLANS:
            return None
        seconds = []
        for orders in alike.values():
            lines = pipelines(sized, kinds, np.array(orders)).take(np.repeat(np.arange(len(orders)), table.shape[1]))
            columns = np.tile(table, (1, len(orders)))
            seconds.append(np.where(lines.fits(columns), lines.iteration(columns), np.inf).min())
        best.append((sized, float(min(seconds))))
    return best
