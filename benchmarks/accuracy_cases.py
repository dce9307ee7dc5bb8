"""The plans that `benchmarks.accuracy` predicts and runs: even, uneven, bad ones, both orders of two GPU types."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from conf.compose import compose
from conf.schema.experiment import Experiment
from fasop.costs.hardware import NodeKind
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape
from fasop.costs.training import PlacedTraining, Training


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    overrides: tuple[str, ...]
    """Overrides of `tdpp launch`."""
    nodes: str = ""
    """The node order that the ranks of a run whose layers sleep stand for, such as fast+slow."""
    slow_motion: int = 1
    """How many times as long as those of the GPUs the layers of such a run take."""

    @property
    def experiment(self) -> Experiment:
        return compose(self.overrides)


def plan_words(sizes: str, partition: str, batch: int, *more: str) -> tuple[str, ...]:
    """`sizes` are stages x replicas x tensor size."""
    pipeline, data, tensor = sizes.split("x")
    plan = {"pipeline": pipeline, "data": data, "tensor": tensor, "partition": partition, "global_batch_size": batch}
    return (*(f"parallel.{key}={value}" for key, value in plan.items()), "parallel.micro_batch_size=1", *more)


SLEEPING = (
    *("model=tiny", "model.layers=16", "model.sequence_length=32", "train=demo", "train.checkpoint=false"),
    *("train.iterations=5", "train.log_interval=1", "train.lr_warmup_iterations=1"),
)
FAST, SLOW = Cost(forward=1.638, backward=1.802), Cost(forward=2.12, backward=3.40)
"""Milliseconds of a layer of GPT-2 XL on an A100 and an A10 (fasop/profiles)."""


def _sleeping(name: str, sizes: str, nodes: str, partition: str, *more: str, batch: int) -> Case:
    """In slow motion, so that what this machine's processes need besides stays small; the more, the more there are."""
    slow_motion = 8 if int(sizes.split("x")[0]) >= 8 else 4
    overrides = (*SLEEPING, *plan_words(sizes, partition, batch, *more))
    return Case(name=name, overrides=overrides, nodes=nodes, slow_motion=slow_motion)


ALONE = tuple(
    _sleeping(f"{layers} layers", "1x1x1", "slow", str(layers), f"model.layers={layers}", batch=8) for layers in (2, 16)
)
"""Cases of one rank, whose ends tell of those of all others."""
ZB_H1 = "parallel.schedule=zb_h1"
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.chunks=2")
ENGINE = (
    _sleeping("two stages, even", "2x1x1", "slow", "8-8", batch=6),
    _sleeping("two stages, fast first", "2x1x1", "fast+slow", "10-6", batch=6),
    _sleeping("two stages, fast first, bad", "2x1x1", "fast+slow", "4-12", batch=6),
    _sleeping("two stages, fast last", "2x2x1", "slow+fast", "6-10", batch=12),
    _sleeping("three stages, none on the first", "3x2x1", "slow", "0-9-7", batch=12),
    _sleeping("even", "4x1x1", "slow", "4-4-4-4", batch=8),
    _sleeping("all on the last stage", "4x1x1", "slow", "1-1-1-13", batch=6),
    _sleeping("fast half first", "4x2x1", "fast+slow", "5-5-3-3", batch=16),
    _sleeping("fast half last", "4x2x1", "slow+fast", "3-3-5-5", batch=16),
    _sleeping("fast half last, bad", "4x2x1", "slow+fast", "5-5-3-3", batch=16),
    _sleeping("GPipe", "4x1x1", "slow", "6-4-3-3", "parallel.schedule=gpipe", batch=8),
    _sleeping("interleaved", "4x1x1", "slow", "2-2-2-2-2-2-2-2", *INTERLEAVED, batch=8),
    _sleeping("ZB-H1, even", "4x1x1", "slow", "4-4-4-4", ZB_H1, batch=8),
    _sleeping("ZB-H1, fast half first", "4x2x1", "fast+slow", "5-5-3-3", ZB_H1, batch=16),
    _sleeping("ZB-H1, fast half last", "4x2x1", "slow+fast", "3-3-5-5", ZB_H1, batch=16),
    _sleeping("ZB-H1, 8 stages", "8x1x1", "slow", "2-2-2-2-2-2-2-2", ZB_H1, batch=8),
    _sleeping("8 stages, even", "8x1x1", "slow", "2-2-2-2-2-2-2-2", batch=8),
    _sleeping("8 stages, uneven", "8x2x1", "fast+slow", "3-3-3-3-1-1-1-1", batch=16),
    _sleeping("8 stages, ends empty", "8x1x1", "slow", "0-3-3-3-3-2-2-0", batch=8),
    _sleeping("16 stages, even", "16x1x1", "slow", "1-1-1-1-1-1-1-1-1-1-1-1-1-1-1-1", batch=8),
    _sleeping("16 stages, fast first", "16x1x1", "fast+slow", "2-2-2-2-2-1-1-1-1-1-1-0-0-0-0-0", batch=8),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a rank does besides its layers: Python and the ends of the model for a micro-batch, and the optimizer."""

    pass_ms: Cost
    optimizer_ns: float | None
    """For each parameter; None: as configured for this machine."""


NOTHING = Cost(forward=0.001, backward=0.001)
NO_ENDS = Ends(pass_ms=NOTHING, optimizer_ns=None)


def stood_for(case: Case, measured: LayerProfile | None = None, ends: Ends = NO_ENDS) -> PlacedTraining:
    """What a run on this machine is predicted as: GPUs of one or two types, on nodes with equally many ranks.

    `measured` is the profile of all of them; without, layers sleep, and `ends` are awake.
    """
    experiment = case.experiment
    names = case.nodes.split("+")
    group = next(iter(experiment.cluster.groups.values()))
    gpus = experiment.parallel.world_size // len(names)
    nodes = [
        NodeKind(
            name=name,
            group=replace(group, gpus_per_node=gpus),
            gpu=replace(experiment.cluster.gpus[group.gpu], name=name),
            gpus=gpus,
            profile=measured or given_profile(experiment, name, _layer(name, case.slow_motion), ends),
        )
        for name in names
    ]
    return PlacedTraining(training=Training.of(experiment), partition=experiment.partition, nodes=nodes)


def _layer(name: str, slow_motion: int) -> Cost:
    cost = {"fast": FAST, "slow": SLOW}[name]
    return Cost(forward=slow_motion * cost.forward, backward=slow_motion * cost.backward)


def given_profile(experiment: Experiment, name: str, layer: Cost, ends: Ends = NO_ENDS) -> LayerProfile:
    model, precision = experiment.model, experiment.train.precision
    costs = ModelCosts(
        model=model.name,
        tensor=1,
        micro_batch_size=experiment.parallel.micro_batch_size,
        precision=precision,
        embedding=NOTHING,
        layer=layer,
        head=ends.pass_ms,
    )
    return LayerProfile(
        gpu=name,
        source="benchmarks.accuracy",
        models={model.name: Shape.of(model)},
        costs=[costs],
        optimizer_ns_per_parameter={} if ends.optimizer_ns is None else {precision: ends.optimizer_ns},
    )


COMPUTING = (
    *(
        "model=tiny",
        "model.hidden=256",
        "model.layers=8",
        "model.vocab_size=512",
        "train=demo",
        "train.checkpoint=false",
    ),
    *("train.iterations=5", "train.log_interval=1", "train.lr_warmup_iterations=1"),
)


def _computing(name: str, sizes: str, partition: str, *more: str, batch: int = 6) -> Case:
    return Case(name=name, overrides=(*COMPUTING, *plan_words(sizes, partition, batch, *more)), nodes="local")


PROFILED = tuple(_computing(f"{layers} layers", "1x1x1", str(layers), f"model.layers={layers}") for layers in (2, 8))
"""Cases of one rank: what all others are predicted from."""
REAL = (
    _computing("half each", "2x1x1", "4-4"),
    _computing("more on the last", "2x1x1", "2-6"),
    _computing("more on the first", "2x1x1", "6-2"),
    _computing("all but one on the last", "2x1x1", "1-7"),
    _computing("GPipe", "2x1x1", "5-3", "parallel.schedule=gpipe"),
    _computing("two replicas", "1x2x1", "8"),
)


OF_MODULE = (
    *("train=demo", "train.checkpoint=false", "train.iterations=12", "train.log_interval=1"),
    *("train.lr_warmup_iterations=1", "container=none", "executor=local"),
)
OF_SAMPLES = 8
"""In a micro-batch of a user's module."""


def _users(code: str, *more: str) -> tuple[str, ...]:
    return ("model=module", f"model.code={Path(__file__).with_name('convnets.py')}:{code}", *more)


def _module(name: str, model: tuple[str, ...], sizes: str, partition: str, *more: str) -> Case:
    plan = plan_words(sizes, partition, 8 * OF_SAMPLES * int(sizes.split("x")[1]), *more)
    return Case(name=name, overrides=(*model, *OF_MODULE, *plan, f"parallel.micro_batch_size={OF_SAMPLES}"))


PLAIN, SKIPPING = _users("plain"), _users("Skipping", "model.capture=true")
MODULES = {
    PLAIN: (
        _module("convnet, one process", PLAIN, "1x1x1", "11"),
        _module("convnet, about half each", PLAIN, "2x1x1", "4-7"),
        _module("convnet, more on the first", PLAIN, "2x1x1", "7-4"),
        _module("convnet, GPipe", PLAIN, "2x1x1", "4-7", "parallel.schedule=gpipe"),
        _module("convnet, two replicas", PLAIN, "1x2x1", "11"),
    ),
    SKIPPING: (_module("convnet that skips, captured", SKIPPING, "2x1x1", "4-4"),),
}
"""What each is profiled with."""


REHEARSED = (
    *("model=xl", "train=gpt2", "train.precision=fp16", "train.iterations=4", "train.log_interval=1"),
    *("executor=local", "container=none", "executor.rehearse=anchored"),
)


def _rehearsed(
    name: str, sizes: str, nodes: str, partition: str, *more: str, batch: int, cluster: str = "a100x1_a10x7"
) -> Case:
    given = (f"cluster={cluster}", *REHEARSED, f"parallel.node_order={nodes}")
    return Case(name=name, overrides=(*given, *plan_words(sizes, partition, batch, *more)))


SLOW_NETWORK = "cluster.groups.gpu2.inter_gbit_per_s=2"
REHEARSALS = (
    _rehearsed("the seed's plan", "8x4x1", "gpu2*8", "0-11-8-8-8-8-5-0", batch=64, cluster="a10x8"),
    _rehearsed("the seed's, A100 first", "8x4x1", "hgx+gpu2*7", "8-6-6-6-6-6-5-5", batch=64),
    _rehearsed("A100 last", "8x4x1", "gpu2*7+hgx", "5-5-6-6-6-6-6-8", batch=64),
    _rehearsed("A100 in the middle", "16x1x1", "gpu2+hgx+gpu2*2", "2-2-2-2-5-5-5-5-3-3-3-3-2-2-2-2", batch=32),
    _rehearsed("a stage on both kinds", "2x8x1", "gpu2+hgx+gpu2*2", "20-28", batch=32),
    _rehearsed("tensor 4, slow network", "4x1x4", "hgx+gpu2*3", "15-12-11-10", SLOW_NETWORK, batch=8),
    _rehearsed("ZB-H1", "4x2x1", "hgx+gpu2", "18-14-8-8", "parallel.schedule=zb_h1", batch=16),
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run of others."""

    case: Case
    measured_s: float


MEGATRON = ("engine=megatron_lm", "engine.checkout=/opt/megatron-lm", "train.precision=fp16")
PUBLISHED = (
    Published(case=Case(name="GPT-2 XL on 8 x 4 A10", overrides=("experiment=seed_a10x8", *MEGATRON)), measured_s=1.40),
    Published(
        case=Case(
            name="GPT-2 XL on 4 A100 and 7 x 4 A10",
            overrides=("experiment=seed_a100x1_a10x7", *MEGATRON, "parallel.partition=5-7-7-6-6-6-6-5"),
        ),
        measured_s=1.13,
    ),
)
