"""python -m benchmarks.search: how long a search takes, and how good its plans are.

The two clusters of the public FASOP artifact (HPDC 2024) with GPT-2 XL, whose own search takes about 8.5 CPU seconds
for its 592 candidates (known figure; the public tool is not run here). What its procedure does is done here as well, on
the same candidates and costs: one candidate at a time, its heuristic for the partition, one simulation in plain Python.
Then a cluster of 1,024 nodes with 8 GPUs of four types.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import replace

import numpy as np

from conf.compose import compose
from fasop.baselines import minmax
from fasop.candidates import Space, space
from fasop.hardware import NodeKind
from fasop.inputs import read
from fasop.pipelines import Pipelines
from fasop.search import Result, search
from fasop.simulate import StageTimes, pipeline_time, simulate
from megatron_ext.schedule import as_json, schedule

MEGATRON = ("engine=megatron_lm", "engine.checkout=/opt/megatron-lm", "train.precision=fp16")
CLUSTERS = {"8 x 4 A10": "seed_a10x8", "1 x 4 A100 + 7 x 4 A10": "seed_a100x1_a10x7"}
PUBLIC_S = 8.5
LARGE = ("h100_80gb", "a100_80gb", "a100_40gb", "a10")


def public_procedure(candidates: Space) -> float:
    """Seconds of an iteration of the best plan that the heuristic finds, by our costs."""
    best = np.inf
    for group in candidates.groups:
        for column in range(len(group.orders)):
            one = group.pipelines.take(np.array([column]))
            split = minmax(one, group.layers)
            if one.fits(split)[0]:
                replayed(one, split)
                best = min(best, one.iteration(split)[0])
    return best


def replayed(one: Pipelines, split: np.ndarray) -> float:
    """The pipeline part, by the simulator that replays an engine's schedule."""
    forward, backward = one.forward.of(split)[:, 0], one.backward.of(split)[:, 0]
    hops = one.hop[:, 0]
    times = [
        StageTimes(forward=[f], backward=[b], send_forward=hop, send_backward=hops[stage - 1])
        for stage, (f, b, hop) in enumerate(zip(forward, backward, hops, strict=True))
    ]
    lists = schedule(str(one.schedule), one.stages, 1, one.micro_batches)
    return pipeline_time(simulate(as_json(lists, 1, one.micro_batches), times))


def compare(name: str, experiment: str) -> tuple[float, float]:
    """Tells of one cluster; returns the CPU seconds of both procedures."""
    inputs = read([f"experiment={experiment}", *MEGATRON])
    space(inputs.training, inputs.kinds)  # once before: what is imported and remembered later is not measured
    begin = time.process_time()
    candidates = space(inputs.training, inputs.kinds)
    result = search(candidates, 1)
    ours = time.process_time() - begin
    begin = time.process_time()
    theirs = public_procedure(candidates)
    procedure = time.process_time() - begin
    best = result.plans[0]
    print(
        f"{name}: {result.candidates} plans fit, {candidates.too_large} do not; {ours:.3f} CPU s, and the best plan is"
    )
    print(f"  {best.total * 1e3:.1f} ms: {_plan(result)}")
    print(
        f"  the public procedure: {procedure:.1f} CPU s ({procedure / ours:.0f} times as long), {theirs * 1e3:.1f} ms"
    )
    return ours, procedure


def large() -> None:
    inputs = read(["cluster=a10x8", "model=13b", "parallel.global_batch_size=8192", "train.precision=bf16"])
    kinds = [_nodes(inputs.kinds[0], gpu) for gpu in LARGE]
    begin = time.process_time()
    result = search(space(inputs.training, kinds), 10)
    taken = time.process_time() - begin
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"1,024 x 8 GPUs of 4 types, GPT-3 13B: {result.candidates} plans fit; {taken:.1f} CPU s, {mib:.0f} MiB")
    print(f"  {result.plans[0].total * 1e3:.0f} ms: {_plan(result)}")


def _nodes(kind: NodeKind, name: str) -> NodeKind:
    gpu = compose([f"+gpu@cluster.gpus.another={name}"]).cluster.gpus["another"]
    group = replace(kind.group, count=256, gpus_per_node=8)
    return replace(kind, name=name, gpu=replace(gpu, profile=None), profile=None, gpus=8, group=group)


def _plan(result: Result) -> str:
    p = result.plans[0].parallel
    return (
        f"tensor {p.tensor} x data {p.data} x pipeline {p.pipeline}, micro-batch {p.micro_batch_size}, {p.partition}, "
        f"{p.node_order}"
    )


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    both = [compare(name, experiment) for name, experiment in CLUSTERS.items()]
    ours, procedure = (sum(times) for times in zip(*both, strict=True))
    print(
        f"both: {ours:.2f} CPU s; the public tool's known {PUBLIC_S} s are {PUBLIC_S / ours:.0f} times that, its "
        f"procedure here {procedure / ours:.0f} times"
    )
    large()


if __name__ == "__main__":
    main()
