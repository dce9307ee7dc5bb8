"""python -m benchmarks.public_measurements --public CHECKOUT: predicted iterations beside those that others measured.

CHECKOUT is vTrain's (Bang et al. 2024, https://github.com/VIA-Research/vTrain). It has the times of 1,440 runs of GPTs
on up to eight A100 in a node and of 108 on 64 to 512, by Megatron-DeepSpeed with full recomputation, and those of
all-reduces in a node, but no layer's. So what a layer and the head take is found from a few runs of each width, tensor
size and micro-batch, those with the fewest stages and replicas, and all others are predicted with it. No time of a
predicted run goes into its prediction. `--every N` predicts every Nth run in a node.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from conf.compose import compose
from conf.schema.experiment import Experiment
from fasop.costs.hardware import NodeKind
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape
from fasop.costs.profiles.steps import CollectiveTimes, Operation
from fasop.costs.training import PlacedTraining, Training
from fasop.simulation.predict import predict_plan

GPUS_OF_NODE = 8
CLUSTER = (
    "cluster=a10x8",
    "cluster.groups.gpu2.gres=null",
    "cluster.groups.gpu2.intra_gbit_per_s=1200",
    "cluster.groups.gpu2.inter_gbit_per_s=800",
    "cluster.gpus.a10.memory_gib=80",
)
"""A100 SXM: 150 GB/s in a node and four links of 200 Gbit/s between nodes, as vTrain's configurations say."""
OPTIMIZER_NS = 0.025
"""A parameter's step: Adam reads and writes about 40 bytes at 1.6 TB/s."""
SHORT = Cost(forward=0.02, backward=0.04)
"""An embedding's passes, in ms: small beside everything else."""
STEPS = 12
"""Of finding a layer's time: each is closer to it by far."""


@dataclass(frozen=True)
class Run:
    """A row of vTrain's tables: the columns' order."""

    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    ms: float = 0.0

    @property
    def profiled_as(self) -> tuple[int, int, int]:
        return self.hidden, self.tensor, self.micro_batch

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.data * self.micro_batch)


def runs(table: Path, *, skip: int) -> list[Run]:
    """Those whose tensor groups stay in a node: `tdpp profile` measures no others."""
    with table.open(encoding="utf-8-sig") as lines:
        rows = [row[skip:] for row in csv.reader(lines)][1:]
    every = [replace(Run(*map(int, row[:-1])), ms=float(row[-1])) for row in rows]
    return [run for run in every if run.tensor <= GPUS_OF_NODE]


def all_reduces(folder: Path) -> Iterator[CollectiveTimes]:
    """Of 2, 4 and 8 GPUs of a node, in place."""
    for ranks in (2, 4, 8):
        with (folder / f"AR_GPU{ranks}_1M_1024M_LUT").open(encoding="utf-8-sig") as lines:
            rows = [[float(row[0]), float(row[5])] for row in list(csv.reader(lines))[1:]]
        powers = {int(size): ns / 1e3 for size, ns in rows if int(size) & (int(size) - 1) == 0}
        yield CollectiveTimes(operation=Operation.all_reduce, ranks=ranks, us_by_bytes=powers)


@cache
def experiment(run: Run, scatter: str) -> Experiment:
    parts = [run.layers // run.pipeline + (stage < run.layers % run.pipeline) for stage in range(run.pipeline)]
    sizes = {
        "model.hidden": run.hidden,
        "model.heads": run.heads,
        "model.layers": run.layers,
        "model.sequence_length": run.sequence,
        "cluster.groups.gpu2.count": max(1, run.gpus // GPUS_OF_NODE),
        "cluster.groups.gpu2.gpus_per_node": min(GPUS_OF_NODE, run.gpus),
        "parallel.tensor": run.tensor,
        "parallel.data": run.data,
        "parallel.pipeline": run.pipeline,
        "parallel.partition": "-".join(map(str, parts)),
        "parallel.micro_batch_size": run.micro_batch,
        "parallel.global_batch_size": run.batch,
        "parallel.scatter_messages": scatter,
    }
    words = (f"{key}={value}" for key, value in sizes.items())
    return compose(("model=xl", "train.precision=fp16", "parallel.recompute=full", *CLUSTER, *words))


def predicted(
    run: Run, layer: float, head: float, *, scatter: str, collectives: Sequence[CollectiveTimes] = ()
) -> float:
    """Milliseconds of an iteration if a layer's and the head's forward passes take as long; backward passes, twice."""
    whole = experiment(run, scatter)
    model, precision = whole.model, whole.train.precision
    group = whole.cluster.groups["gpu2"]
    costs = ModelCosts(
        model=model.name,
        tensor=run.tensor,
        micro_batch_size=run.micro_batch,
        precision=precision,
        embedding=SHORT,
        layer=Cost(forward=layer, backward=2 * layer),
        head=Cost(forward=head, backward=2 * head),
    )
    profile = LayerProfile(
        gpu="a100",
        source="found from measured iterations",
        models={model.name: Shape.of(model)},
        costs=[costs],
        optimizer_ns_per_parameter={precision: OPTIMIZER_NS},
        collectives=list(collectives),
    )
    gpu = replace(whole.cluster.gpus[group.gpu], name="a100")
    kind = NodeKind(name="a100", group=group, gpu=gpu, gpus=group.gpus_per_node or 0, profile=profile)
    nodes = [kind] * (group.count or 1)
    placed = PlacedTraining(training=Training.of(whole), partition=whole.partition, nodes=nodes)
    return predict_plan(placed).iteration_s * 1e3


Predict = Callable[[Run, float, float], float]


def of_two(few: Run, many: Run, predict: Predict) -> tuple[float, float]:
    """A layer's and the head's forward milliseconds, from runs of one stage with few and with many layers."""
    layer = head = 1.0
    for _ in range(STEPS):
        more = (many.ms - few.ms) - (predict(many, layer, head) - predict(few, layer, head))
        layer = max(1e-3, layer + more / (4 * few.micro_batches * (many.layers - few.layers)))
        head = max(1e-3, head + (few.ms - predict(few, layer, head)) / (3 * few.micro_batches))
    return layer, head


def of_one(run: Run, predict: Predict) -> tuple[float, float]:
    """The same from one run, whose head takes as many times a layer's time as it has times its operations."""
    share = 50257 / (12 * run.hidden + 2 * run.sequence)
    layer = 1.0
    for _ in range(STEPS):
        layer *= run.ms / predict(run, layer, share * layer)
    return layer, share * layer


def in_a_node(every: Sequence[Run], predict: Predict, each: int) -> Iterator[tuple[Run, float]]:
    """Runs with what is predicted: those of more stages, replicas or micro-batches than the two known of a profile."""
    for group in grouped(every).values():
        plain = [run for run in group if run.pipeline == 1]
        least = min((run.data, run.batch) for run in plain)
        known = sorted((run for run in plain if (run.data, run.batch) == least), key=lambda run: run.layers)
        times = of_two(known[0], known[-1], predict)
        others = [run for run in group if run not in known]
        yield from ((run, predict(run, *times)) for run in others[::each])


def over_nodes(every: Sequence[Run], predict: Predict) -> Iterator[tuple[Run, float]]:
    """The same of runs with more stages than the one known of a profile."""
    for group in grouped(every).values():
        known, *others = sorted(group, key=lambda run: run.pipeline)
        times = of_one(known, predict) if others else (0.0, 0.0)
        yield from ((run, predict(run, *times)) for run in others if run.pipeline > known.pipeline)


def grouped(every: Sequence[Run]) -> Mapping[tuple[int, int, int], list[Run]]:
    groups: dict[tuple[int, int, int], list[Run]] = defaultdict(list)
    for run in every:
        groups[run.profiled_as].append(run)
    return groups


def report(name: str, outcomes: Sequence[tuple[Run, float]]) -> None:
    print(f"{name}: {summary(outcomes)}")
    for stages in sorted({run.pipeline for run, _ in outcomes}):
        print(f"  {stages} stages: {summary([one for one in outcomes if one[0].pipeline == stages])}")
    for tensor in sorted({run.tensor for run, _ in outcomes}):
        print(f"  tensor {tensor}: {summary([one for one in outcomes if one[0].tensor == tensor])}", flush=True)


def summary(outcomes: Sequence[tuple[Run, float]]) -> str:
    errors = [ms / run.ms - 1 for run, ms in outcomes]
    absolute = [abs(error) for error in errors]
    mean, signed = statistics.mean(absolute), statistics.mean(errors)
    return f"{len(errors)} runs, mean error {mean:.1%}, with its sign {signed:+.1%}, worst {max(absolute):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public_measurements", description=__doc__)
    parser.add_argument("--public", metavar="CHECKOUT", type=Path, required=True)
    parser.add_argument("--every", metavar="N", type=int, default=1)
    given = parser.parse_args()
    measured = list(all_reduces(given.public / "trace" / "a100"))
    many = runs(given.public / "data" / "ground_truth_multi.csv", skip=1)
    for scatter, words in (("false", "each rank sends the whole message"), ("auto", "messages scattered")):
        outcomes = list(over_nodes(many, partial(predicted, scatter=scatter, collectives=measured)))
        report(f"on 64 to 512 GPUs, {words}", outcomes)
    few = runs(given.public / "data" / "ground_truth_single.csv", skip=0)
    inside = partial(predicted, scatter="false", collectives=measured)
    report("in a node of up to 8 GPUs", list(in_a_node(few, inside, given.every)))


if __name__ == "__main__":
    main()
