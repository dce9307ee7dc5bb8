"""python -m benchmarks.search [--results FILE]: how good the plans of a search are.

The two clusters of the public FASOP artifact (HPDC 2024) with GPT-2 XL: of every candidate, our partition beside those
of others, and beside the best of all where there are few, under our costs. Then a cluster of 1,024 nodes with 8 GPUs of
four types. How long searches take is measured by `benchmarks.whole_commands`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.compose import compose
from conf.schema.experiment import Gpu
from fasop.costs.hardware import NodeKind
from fasop.partition.baselines import amp, even, minmax, start
from fasop.partition.local_search import bottleneck, exhaustive, improved
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.proof import prove
from fasop.search.search import Best, Coverage, explore
from fasop.search.space.candidates import Candidates, Space
from fasop.search.space.choices import Choices

MEGATRON = ("engine=megatron_lm", "engine.checkout=/opt/megatron-lm", "train.precision=fp16")
CLUSTERS = {"8 x 4 A10": "seed_a10x8", "1 x 4 A100 + 7 x 4 A10": "seed_a100x1_a10x7"}
OTHERS = {"even": even, "the public FASOP's minmax": minmax, "AMP": amp, "smallest largest stage": bottleneck}
FEW = 300_000
"""Partitions that are all tried."""
LARGE = ("h100_80gb", "a100_80gb", "a100_40gb", "a10")


def search(space: Space, most: int) -> tuple[Coverage, Sequence[Plan]]:
    """The `most` best plans, and what was gone through for them."""
    best = Best(most)
    return explore([space], best), best.plans


def compare(experiment: str) -> dict[str, Any]:
    """Holds the times of one cluster, in milliseconds of an iteration."""
    inputs = read([f"experiment={experiment}", *MEGATRON])
    seen, plans = search(Space(inputs.training, inputs.kinds, Choices()), 1)
    best = prove(plans)[0]
    return {
        "sizes": seen.sizes,
        "best_ms": round(best.total * 1e3, 2),
        "best_plan": _plan(best),
        "no_partition_of_it_below_ms": round(best.bound * 1e3, 2),
        "others_partitions": others([*Space(inputs.training, inputs.kinds, Choices()).groups]),
    }


def others(groups: Sequence[Candidates]) -> dict[str, dict[str, float]]:
    """How much longer than ours others' partitions take, of all candidates where theirs fit into memory."""
    ratios: dict[str, list[float]] = {name: [] for name in (*OTHERS, "all partitions")}
    for group in groups:
        lines, layers = group.pipelines, group.layers
        _, ours = improved(lines, start(lines, layers, bottleneck(lines, layers)))
        for name, other in OTHERS.items():
            split = other(lines, layers)
            ratios[name] += (lines.iteration(split) / ours)[lines.fits(split)].tolist()
        if math.comb(layers + lines.stages - 1, layers) <= FEW:
            ratios["all partitions"] += (exhaustive(lines, layers)[1] / ours).tolist()
    return {name: _told(np.array(values)) for name, values in ratios.items()}


def _told(ratios: np.ndarray) -> dict[str, float]:
    return {
        "fit": len(ratios),
        "slower_than_ours": int((ratios > 1 + 1e-9).sum()),
        "faster_than_ours": int((ratios < 1 - 1e-9).sum()),
        "mean_percent_longer": round(100 * (float(ratios.mean()) - 1), 2),
        "most_percent_longer": round(100 * (float(ratios.max()) - 1), 2),
        "least_percent_longer": round(100 * (float(ratios.min()) - 1), 2),
    }


def large() -> dict[str, Any]:
    inputs = read(["cluster=a10x8", "model=13b", "parallel.global_batch_size=8192", "train.precision=bf16"])
    gpus = compose([f"+gpu@cluster.gpus.{gpu}={gpu}" for gpu in LARGE]).cluster.gpus
    kinds = [_nodes(inputs.kinds[0], gpu, gpus[gpu]) for gpu in LARGE]
    seen, plans = search(Space(inputs.training, kinds, Choices()), 10)
    return {
        "sizes": seen.sizes,
        "best_ms": round(plans[0].total * 1e3, 1),
        "best_plan": _plan(plans[0]),
    }


def _nodes(kind: NodeKind, name: str, gpu: Gpu) -> NodeKind:
    group = replace(kind.group, count=256, gpus_per_node=8)
    return replace(kind, name=name, gpu=replace(gpu, profile=None), profile=None, gpus=8, group=group)


def _plan(plan: Plan) -> str:
    p = plan.parallel
    return (
        f"tensor {p.tensor} x data {p.data} x pipeline {p.pipeline}, micro-batch {p.micro_batch_size}, {p.partition}, "
        f"{p.node_order}"
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="How good the plans of a search are.")
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    results: Path | None = parser.parse_args(argv).results
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    found: dict[str, Any] = {name: compare(experiment) for name, experiment in CLUSTERS.items()}
    found["1,024 nodes x 8 GPUs of 4 types, GPT-3 13B"] = large()
    text = json.dumps({"machine": machine, **found}, indent=1)
    print(text)
    if results is not None:
        results.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
