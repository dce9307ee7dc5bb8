"""python -m benchmarks.megatron_core_accuracy: random plans of engine=megatron_core, predicted beside what they take.

`tdpp profile engine=megatron_core` measures a small model, dense and with experts, on this machine's cores. Plans are
drawn, predicted from this profile, and trained on CPU ranks. Because there are more ranks than cores, each layer also
sleeps, in both passes, for a time that the prediction knows: so most of the time of a layer is given, and the rest of
it, the schedule, messages, sums of gradients, all-to-alls and the optimizer are Megatron-Core's own. Layers sleep while
they are measured, too (`benchmarks.sleeping_layers`). No time of these runs goes into a prediction.

  --plans N   dense plans to draw (8), besides two with experts and three whose ranks share sequences
  --seed N    of the draw (3)
  --ahead     run before all other processes (SCHED_FIFO, for which one must be root): on a machine that others use
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from benchmarks import sleeping, sleeping_layers
from benchmarks.accuracy import Outcome, outcome, summary, told
from benchmarks.accuracy_cases import Case
from benchmarks.sleeping_layers import SLEEP
from conf.errors import ConfigError
from fasop.costs.hardware import NodeKind
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import Cost, LayerProfile
from fasop.costs.training import PlacedTraining, Training
from fasop.simulation.predict import predict_plan
from launch.commands import profile as profiling
from megatron_ext.core.families import CoreFamily

LAYERS = 8
MODEL = ("engine=megatron_core", "model=tiny", "model.sequence_length=32", f"model.layers={LAYERS}")
EXPERTS = (
    *("model.experts=4", "model.ffn_hidden=64", "model.swiglu=true", "model.normalization=RMSNorm"),
    "model.add_bias_linear=false",
)
TRAIN = (
    *("train=demo", "train.checkpoint=false", "train.iterations=4", "train.log_interval=1"),
    "train.lr_warmup_iterations=1",
)
MICRO_BATCHES = (1, 2)
MOST_RANKS = 8
MOST_SHARING = 4
"""Ranks of a plan with context parallelism: in each layer all of a group wait for each other, and so for a core."""


def drawn(count: int, seed: int) -> Iterator[Case]:
    """Yields `count` dense plans, two with experts and three with context parallelism, all of which the engine can
    run."""
    source = random.Random(seed)
    found: set[tuple[str, ...]] = set()
    kinds = ["dense"] * count + ["experts"] * 2 + ["context"] * 3
    while len(found) < len(kinds):
        kind = kinds[len(found)]
        plan = _draw(source, kind)
        if plan is None or plan in found:
            continue
        case = Case(name=kind, overrides=(*MODEL, *TRAIN, *plan))
        try:
            _ = case.experiment
        except ConfigError:  # a rule that the draw does not know
            continue
        found.add(plan)
        yield case


def _draw(source: random.Random, kind: str) -> tuple[str, ...] | None:
    """A plan's overrides; None for too many ranks, or one alone."""
    tensor, data, pipeline = (source.choice(sizes) for sizes in ((1, 1, 2), (1, 2), (1, 2, 3, 4)))
    context = source.choice((2, 4)) if kind == "context" else 1
    if kind == "experts":
        tensor, data = 1, 2
    if not 1 < tensor * data * pipeline * context <= (MOST_SHARING if kind == "context" else MOST_RANKS):
        return None
    chunks = source.choice((1, 2)) if pipeline > 1 else 1
    ends = sorted(source.choices(range(LAYERS + 1), k=pipeline * chunks - 1))
    partition = [end - begin for begin, end in zip([0, *ends], [*ends, LAYERS], strict=True)]
    size, of_each = source.choice(MICRO_BATCHES), source.choice((1, 2))
    own = {
        "tensor": tensor,
        "data": data,
        "pipeline": pipeline,
        "chunks": chunks,
        "schedule": "interleaved" if chunks > 1 else "one_f_one_b",
        "partition": "-".join(map(str, partition)),
        "micro_batch_size": size,
        "global_batch_size": size * data * pipeline * of_each,
        "sharded_optimizer": str(data * context > 1 and source.random() < 0.5).lower(),
        **({"expert": 2} if kind == "experts" else {}),
        **({"context": context} if context > 1 else {}),
    }
    return (*(EXPERTS if kind == "experts" else ()), *(f"parallel.{key}={value}" for key, value in own.items()))


def compared(case: Case, profile: LayerProfile) -> Outcome:
    """A run whose layers compute and sleep, beside its prediction.

    A layer sleeps `SLEEP` for each sample of a micro-batch on a machine with a core for each rank. With fewer cores,
    ranks wait for each other to compute, and layers sleep longer in proportion. Where ranks share sequences, each
    sleeps as long.
    """
    experiment = case.experiment
    group = next(iter(experiment.cluster.groups.values()))
    parallel = experiment.parallel
    ranks = parallel.world_size
    factor = max(1.0, ranks / (os.cpu_count() or 1)) * parallel.context
    kind = NodeKind(
        name="local",
        group=replace(group, gpus_per_node=ranks),
        gpu=experiment.cluster.gpus[group.gpu],
        gpus=ranks,
        profile=_slowed(profile, factor),
    )
    plan = PlacedTraining(training=Training.of(experiment), partition=experiment.partition, nodes=[kind])
    prediction = predict_plan(plan)
    samples = parallel.micro_batch_size / parallel.context  # ranks of a group share each
    made = sleeping_layers.sleeping(CoreFamily.make, factor * samples)
    with mock.patch.object(CoreFamily, "make", made), tempfile.TemporaryDirectory() as folder:
        return outcome(case, prediction, sleeping.run(Path(folder), experiment, None))


def _slowed(profile: LayerProfile, factor: float) -> LayerProfile:
    """The same with the time that layers sleep, of which they slept `SLEEP` when they were measured."""

    def longer(layer: Cost, samples: int) -> Cost:
        slept = ((factor * samples - 1) * seconds * 1e3 for seconds in (SLEEP.forward, SLEEP.backward))
        forward, backward = slept
        return replace(layer, forward=layer.forward + forward, backward=layer.backward + backward)

    return replace(
        profile,
        costs=[
            replace(one, layer=longer(one.layer, one.micro_batch_size))
            for one in profile.costs
            if one.layer is not None
        ],
    )


def profiled(*model: str) -> LayerProfile:
    """What `tdpp profile` finds of layers that sleep, on as many ranks as there are cores."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/measured.yaml"
        sizes = f"micro_batches={','.join(map(str, MICRO_BATCHES))}"
        tensors = "tensor_sizes=1" if model else "tensor_sizes=1,2"
        written = (f"profile={file}", f"runs_dir={folder}", "seconds=10")
        code = profiling.main([*MODEL, *model, tensors, sizes, *written], worker=sleeping_layers.__name__)
        if code:
            raise SystemExit("the parts could not be measured")
        return read_profile(file)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_core_accuracy")
    parser.add_argument("--plans", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--ahead", action="store_true")
    given = parser.parse_args(argv)
    if given.ahead:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    profiles = {"dense": profiled(), "experts": profiled(*EXPERTS)}
    print("measured the parts of both models", flush=True)
    outcomes = []
    for case in drawn(given.plans, given.seed):
        parallel = case.experiment.parallel
        schedule = f"{parallel.schedule}, {parallel.micro_batches} micro-batches of {parallel.micro_batch_size}"
        sharded = ", sharded optimizer" if parallel.sharded_optimizer else ""
        shared = f", context {parallel.context}" if parallel.context > 1 else ""
        named = replace(case, name=f"{case.name}, {schedule}{sharded}{shared}", nodes="local")
        one = compared(named, profiles["experts" if case.name == "experts" else "dense"])
        print(f"{one.error:+7.1%}  {one.name}, {one.sizes}, {one.partition}: load {one.load:.1f}", flush=True)
        outcomes.append(one)
    print("\n".join([*told(outcomes), "", f"{summary(outcomes)}, {os.cpu_count()} cores"]))
    return int(max(abs(one.error) for one in outcomes) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
