"""python -m benchmarks.freedoms [--results FILE] [--seconds N]: what each freedom of a plan brings on shipped clusters.

Of each cluster the fastest even plan that `tdpp search` finds (one tensor size, one number of replicas, equal shares)
stands beside the fastest with unequal shares, which the search finds too, and beside the fastest that is found here
with replicas by stage or a tensor size by stage. Those are looked for among stages of one kind of node each, in the
order of an estimate, for so many CPU seconds; that none is found faster is no proof that there is none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

from conf.schema.parallel import Schedule
from conf.schema.partition import NodeOrder, Partition, in_runs
from fasop.costs.hardware import NodeKind
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.candidates import tensor_sizes
from fasop.search.inputs import Inputs, read
from fasop.search.run import best_plans
from fasop.simulation.on_nodes import times_on
from fasop.simulation.predict import predict_plan

XL = ("model=xl", "train.precision=fp16")
CASES = {
    "1 x 4 A100 + 7 x 4 A10, batch 64": ("cluster=a100x1_a10x7", *XL, "parallel.global_batch_size=64"),
    "8 x 4 A10, batch 64": ("cluster=a10x8", *XL, "parallel.global_batch_size=64"),
    "8 x 8 A100 + 8 x 8 A10, batch 64": ("cluster=a100x8_a10x8", *XL, "parallel.global_batch_size=64"),
    "8 x 8 A100 + 8 x 8 A10, batch 512": ("cluster=a100x8_a10x8", *XL, "parallel.global_batch_size=512"),
}
MOST_STAGES = 9
"""Of a plan with unlike stages."""
SMALL = 32
"""GPUs of a cluster of which many ways are looked at: stages may also take half a node."""


class Stages(NamedTuple):
    """Stages of one kind of node each, in their order, and where the nodes lie."""

    kinds: tuple[NodeKind, ...]
    tensors: tuple[int, ...]
    replicas: tuple[int, ...]


def best_unlike(inputs: Inputs, seconds: float, *, tensors: bool) -> tuple[float, str]:
    """Seconds of the fastest plan that is found, and the plan: with unlike tensor sizes, or with one and unlike numbers
    of replicas."""
    until, found = time.process_time() + seconds, (float("inf"), "none fits")
    ranked = sorted(((estimate(inputs, one), one) for one in stages_of(inputs, tensors)), key=lambda row: row[0][0])
    for (_, layers), one in ranked:
        if time.process_time() > until:
            break
        for schedule in (Schedule.zb_h1, Schedule.one_f_one_b):
            plan = placed(inputs, one, layers, schedule)
            predicted = predict_plan(plan)
            fits = all(stage.memory_gib <= stage.limit_gib for stage in predicted.stages)
            if fits and predicted.iteration_s < found[0]:
                found = predicted.iteration_s, named(plan)
    return found


def stages_of(inputs: Inputs, tensors: bool) -> Iterator[Stages]:
    """The fastest kind's nodes before and behind those of the other kinds, each cut into stages."""
    kinds = sorted(inputs.kinds, key=lambda kind: sum(_layer(inputs, kind, 1)))
    sizes = [size for size in tensor_sizes(inputs.training, kinds) if tensors or size == 1]
    for first in range(kinds[0].group.count + 1):
        runs = [(kinds[0], first), *((k, k.group.count) for k in kinds[1:]), (kinds[0], kinds[0].group.count - first)]
        runs = [(kind, count * kind.gpus) for kind, count in runs if count]
        for own in product(sizes, repeat=len(kinds)):
            if tensors == (len(set(own)) == 1):
                continue
            size = dict(zip((kind.name for kind in kinds), own, strict=True))
            small = sum(gpus for _, gpus in runs) <= SMALL
            most = 5 - tensors if small else 3 - tensors
            parts = [[*_parts(gpus, max(1, kind.gpus // (1 + small)), most)] for kind, gpus in runs]
            for widths in product(*parts):
                if not 2 <= sum(map(len, widths)) <= MOST_STAGES:
                    continue
                flat = [(kind, width) for (kind, _), some in zip(runs, widths, strict=True) for width in some]
                if any(width % size[kind.name] for kind, width in flat):
                    continue
                found = Stages(
                    tuple(kind for kind, _ in flat),
                    tuple(size[kind.name] for kind, _ in flat),
                    tuple(width // size[kind.name] for kind, width in flat),
                )
                if tensors or len(set(found.replicas)) > 1:
                    yield found


def _parts(total: int, unit: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many GPUs into at most so many stages, each a multiple of `unit`."""
    if total == 0:
        yield ()
    elif most:
        for width in range(unit, total + 1, unit):
            yield from ((width, *rest) for rest in _parts(total - width, unit, most - 1))


def _layer(inputs: Inputs, kind: NodeKind, tensor: int) -> tuple[float, float]:
    """Seconds of a layer, and of embedding and head together."""
    parallel = replace(inputs.training.parallel, tensor=tensor)
    times = times_on(kind, replace(inputs.training, parallel=parallel))
    both = [part.forward + part.backward for part in (times.layer, times.embedding, times.head)]
    return both[0], both[1] + both[2]


def estimate(inputs: Inputs, one: Stages) -> tuple[float, list[int]]:
    """Seconds of an iteration without messages and sums, and the layers of each stage that balance it."""
    costs = [_known(inputs, kind, tensor) for kind, tensor in zip(one.kinds, one.tensors, strict=True)]
    layers, last = [0] * len(costs), len(costs) - 1

    def load(stage: int, more: int) -> float:
        beside = costs[stage][1] / 2 if stage in (0, last) else 0.0
        return ((layers[stage] + more) * costs[stage][0] + beside) / one.replicas[stage]

    for _ in range(inputs.training.blocks.layers):
        layers[min(range(len(costs)), key=lambda stage: load(stage, 1))] += 1
    trip = sum(count * cost[0] for count, cost in zip(layers, costs, strict=True))
    slowest = max(load(stage, 0) for stage in range(len(costs)))
    return inputs.training.parallel.global_batch_size * slowest + trip / 2, layers


_COSTS: dict[tuple[int, str, int], tuple[float, float]] = {}


def _known(inputs: Inputs, kind: NodeKind, tensor: int) -> tuple[float, float]:
    key = id(inputs), kind.name, tensor
    if key not in _COSTS:
        _COSTS[key] = _layer(inputs, kind, tensor)
    return _COSTS[key]


def placed(inputs: Inputs, one: Stages, layers: Sequence[int], schedule: Schedule) -> PlacedTraining:
    """On whole nodes, micro-batches of one sample."""
    gpus = [(kind, tensor * count) for kind, tensor, count in zip(*one, strict=True)]
    nodes = [
        kind
        for _, run in groupby(gpus, key=lambda row: row[0].name)
        for kind, count in [_together([*run])]
        for _ in range(count)
    ]
    parallel = replace(
        inputs.training.parallel,
        tensor=one.tensors[0] if len(set(one.tensors)) == 1 else in_runs(one.tensors, "-"),
        data=max(one.replicas),
        replicas=in_runs(one.replicas, "-"),
        pipeline=len(layers),
        partition=str(Partition(tuple(layers))),
        schedule=schedule,
        sharded_optimizer=True,
        node_order=str(NodeOrder(tuple(kind.name for kind in nodes))),
    )
    return PlacedTraining(
        training=replace(inputs.training, parallel=parallel), partition=Partition(tuple(layers)), nodes=nodes
    )


def _together(run: Sequence[tuple[NodeKind, int]]) -> tuple[NodeKind, int]:
    """A kind, and how many of its nodes neighbouring stages have."""
    return run[0][0], sum(gpus for _, gpus in run) // run[0][0].gpus


def named(plan: PlacedTraining) -> str:
    p = plan.training.parallel
    return f"tensor {p.tensor}, replicas {p.replicas or p.data}, {p.partition}, {p.schedule}, {p.node_order}"


def of_case(words: Sequence[str], seconds: float) -> dict[str, object]:
    inputs = read(words)
    outcome = best_plans(inputs, Arguments(top=1))
    best, even = outcome.plans[0], outcome.even
    found: dict[str, object] = {
        "even_ms": None if even is None else round(even.total * 1e3, 1),
        "even_plan": None if even is None else named(even),
    }
    shares = best.total if best.parallel.shares else None
    found["shares_ms"] = None if shares is None else round(shares * 1e3, 1)
    found["shares_plan"] = None if shares is None else f"{named(best)}, shares {best.parallel.shares}"
    for name, tensors in (("replicas", False), ("tensor", True)):
        try:
            took, plan = best_unlike(inputs, seconds, tensors=tensors)
        except SearchError as error:
            took, plan = float("inf"), str(error)
        found[f"{name}_ms"] = round(took * 1e3, 1) if took < float("inf") else None
        found[f"{name}_plan"] = plan
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What each freedom of a plan brings on the shipped clusters.")
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU seconds for each kind of unlike stages")
    args = parser.parse_args()
    found = {name: of_case(words, args.seconds) for name, words in CASES.items()}
    print("| cluster and batch | even plan | unequal shares | replicas by stage | tensor size by stage |")
    print("|---|---|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {' | '.join(_cell(one, freedom) for freedom in ('even', 'shares', 'replicas', 'tensor'))} |")
    if args.results is not None:
        args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _cell(one: dict[str, object], freedom: str) -> str:
    even, took = one["even_ms"], one[f"{freedom}_ms"]
    if not isinstance(took, float):
        return "none faster" if freedom == "shares" else "none found"
    gain = "" if freedom == "even" or not isinstance(even, float) else f" ({even / took - 1:+.1%})"
    return f"{took:.1f} ms{gain}"


if __name__ == "__main__":
    main()
