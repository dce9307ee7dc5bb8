"""The adaptive trainings that `benchmarks.simulation` simulates, rehearses and runs with layers that sleep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.accuracy_cases import given_profile
from conf.compose import compose
from fasop.costs.profiles.profile import Cost
from fasop.costs.profiles.profile_text import profile_text
from fasop.costs.profiles.steps import Steps, StepTimes

CLUSTER = """
name: sleepers
gpus:
  fast: {{name: CPU fast, profile: {folder}/fast.yaml, memory_gib: 8, fp32_tflops: 0.05, fp16_tflops: 0.05,
         bf16_tflops: 0.05, memory_gb_per_s: 10}}
  slow: {{name: CPU slow, profile: {folder}/slow.yaml, memory_gib: 8, fp32_tflops: 0.05, fp16_tflops: 0.05,
         bf16_tflops: 0.05, memory_gb_per_s: 10}}
groups:
  fast: {{gpu: fast, count: 4, gpus_per_node: 1, intra_gbit_per_s: 8, intra_latency_us: 200, inter_gbit_per_s: 8,
         inter_latency_us: 200}}
  slow: {{gpu: slow, count: 4, gpus_per_node: 1, intra_gbit_per_s: 8, intra_latency_us: 200, inter_gbit_per_s: 8,
         inter_latency_us: 200}}
"""
LAYER_MS = {"fast": Cost(forward=20.0, backward=40.0), "slow": Cost(forward=60.0, backward=120.0)}
"""Milliseconds of a layer for a micro-batch of whatever size."""
SIZES, STREAMS = (1, 2, 4), (1, 2, 4)
LAYERS = 4
MODEL = (
    *("model=tiny", f"model.layers={LAYERS}", "model.hidden=32", "model.vocab_size=128", "model.sequence_length=16"),
    *("train=demo", "container=none", "executor=local"),
)
"""So small that this machine spends its time on nothing but sleep."""
TRAIN = ("train.checkpoint=false", "train.log_interval=1", "train.lr_warmup_iterations=1", "profile.timeline=false")


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    words: tuple[str, ...]
    """Words of a launch, without its cluster."""
    noise: str | None = None
    """That is forecast, where a rule follows it."""
    rehearsed: bool = True
    slept: bool = True


def _case(
    name: str, nodes: str, batch: int, *more: str, noise: str | None = None, rehearsed: bool = True, slept: bool = True
) -> Case:
    plan = {"tensor": 1, "partition": "null", "micro_batch_size": 1, "global_batch_size": batch, "node_order": nodes}
    words = (*MODEL, *TRAIN, *(f"parallel.{key}={value}" for key, value in plan.items()), *more)
    return Case(name=name, words=words, noise=noise, rehearsed=rehearsed, slept=slept)


TWO, THREE = ("parallel.pipeline=1", "parallel.data=2"), ("parallel.pipeline=1", "parallel.data=3")
PIPELINES = ("parallel.pipeline=2", "parallel.data=2")
SOLVED, EVEN = "parallel.shares=6-2", "parallel.shares=null"
REBALANCED, ANY_SIZE = "adapt.rebalance=true", "adapt.micro_batch_sizes=[2,4]"
BOUNDS = ("adapt.lower=4", "adapt.upper=24", "adapt.every=3")
CASES = (
    _case(
        *("noise, solved shares", "fast+slow", 8, *TWO, SOLVED, *BOUNDS),
        *("adapt.rule=noise", "adapt.smoothing=2", "train.samples=160"),
        noise="8,30",
    ),
    _case(
        *("similarity, even shares", "fast+slow", 8, *TWO, EVEN, *BOUNDS, "adapt.rule=similarity", "train.samples=160"),
        noise="8,30",
    ),
    _case(
        *("goodput, rebalanced", "fast+slow", 8, *TWO, EVEN, *BOUNDS, REBALANCED),
        *("adapt.rule=goodput", "adapt.smoothing=2", "train.samples=160"),
        noise="8,30",
    ),
    _case("fixed batch, rebalanced", "fast+slow", 8, *TWO, EVEN, REBALANCED, "adapt.every=3", "train.iterations=16"),
    _case(
        *("noise, two pipelines", "fast+slow+fast+slow", 8, *PIPELINES, EVEN, *BOUNDS),
        *("adapt.rule=noise", "adapt.smoothing=2", "train.samples=160"),
        noise="8,30",
    ),
    _case(
        *("goodput, two ZB-H1 pipelines, rebalanced", "fast+slow+fast+slow", 12, *PIPELINES, EVEN, *BOUNDS, REBALANCED),
        *("parallel.schedule=zb_h1", "adapt.rule=goodput", "adapt.smoothing=2", "train.samples=160"),
        noise="8,30",
    ),
    _case(
        *("fixed batch, sizes", "fast+slow", 16, *TWO, EVEN, REBALANCED, ANY_SIZE),
        *("adapt.every=3", "train.iterations=16"),
    ),
    _case(
        *("goodput, two pipelines, sizes", "fast+slow+fast+slow", 12, *PIPELINES, EVEN, *BOUNDS, REBALANCED, ANY_SIZE),
        *("adapt.rule=goodput", "adapt.smoothing=2", "train.samples=300"),
        noise="8,60",
        slept=False,
    ),
    _case(
        *("similarity, three replicas, sizes", "fast+slow*2", 12, *THREE, EVEN, *BOUNDS, REBALANCED, ANY_SIZE),
        *("adapt.rule=similarity", "train.samples=300"),
        noise="8,60",
        slept=False,
    ),
    _case(
        *("fixed batch, streams", "fast+slow", 16, *TWO, EVEN, REBALANCED, "adapt.streams=[1,2]"),
        *("adapt.every=3", "train.iterations=16"),
        rehearsed=False,
    ),
)


def write_cluster(folder: Path) -> Path:
    """Makes a cluster of fast nodes and slow ones, whose profiles say what their layers take; streams run without
    slowing each other down."""
    experiment = compose((*MODEL, "parallel.partition=null"))
    for name, layer in LAYER_MS.items():
        profile = given_profile(experiment, f"CPU {name}", layer)
        costs = [replace(cost, micro_batch_size=size) for cost in profile.costs for size in SIZES]
        whole = {"forward": LAYERS * layer.forward, "backward": LAYERS * layer.backward}
        times = [StepTimes(workers=streams, data=0.0, **whole, update=0.0, copy=0.0) for streams in STREAMS]
        steps = [
            Steps(
                model=experiment.model.name,
                precision=experiment.train.precision,
                host=name,
                micro_batch_size=size,
                most_workers=max(STREAMS),
                memory_bytes=1 << 33,
                times=times,
            )
            for size in SIZES
        ]
        text = profile_text(replace(profile, costs=costs, steps=steps), "benchmarks.simulation")
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    file = folder / "sleepers.yaml"
    file.write_text(CLUSTER.format(folder=folder), encoding="utf-8")
    return file
