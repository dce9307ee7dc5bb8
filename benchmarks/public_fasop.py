"""python -m benchmarks.public_fasop --public FOLDER [--results FILE]: BERT and T5, beside the public FASOP itself.

FOLDER is `FASOP/` of a checkout of github.com/AvatarHwang/FASOP. Its own functions are called on its one A100 node with
A10 nodes, sizes and costs. For every candidate of the public tool (sizes and node order) our partition stands beside
its own, both with its layer costs, in its simulator and with its gradient sums. Its 26 or 50 parts differ, so these are
partitions of unlike layers. `benchmarks.public_simulator` computes the same for many partitions at once, which is
checked at each candidate. Where its seconds are not those of the partition that it names, the shorter time counts as
its own. How long the tools take is measured twice: whole commands by `benchmarks.whole_commands`, and here the CPU
seconds of their functions, once all is imported and composed: for the same question (`ALSO`), and for all our options.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.public_simulator import PublicPipelines
from conf.schema.experiment import Schedule
from fasop.partition.baselines import start
from fasop.partition.local_search import bottleneck, shortest
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.simulation.linear import LayerOrder, Linear

ASKED = {
    "T5": "cluster=a100x1_a10x7 model=t5-3b parallel.global_batch_size=128",
    "bert": "cluster=a100x1_a10x7 cluster.groups.gpu2.count=3 model=bert-large parallel.global_batch_size=256",
}
"""The models, and in our words what the public tool is asked about them."""
ALSO = "parallel.recompute=none parallel.zero=0"
"""What makes ours the same question: the public tool computes nothing again, and of ZeRO knows what the first stage
takes of memory."""
MODELS = (*ASKED,)
EQUAL = 1e-6
"""The part of a time by which the same plan may differ: the public tool computes in 32 bit."""


class Public:
    """The public tool's functions, and what it is asked."""

    def __init__(self, name: str) -> None:
        self.estimate, self.pipe, placing, config, amp = (
            importlib.import_module(module)
            for module in ("estimate", "pipe", "device_placement", "model_config", "amp_utils")
        )
        self._gpu_for_stage, self._amp = placing.get_gpu_for_stage, amp.amp_no_placement_strategy
        self.model, self.batch, experiment = config.get_model_config(name, 16, True, False)
        (cluster,) = placing.get_all_cluster_combinations(name, False, True)
        self.nodes = len(cluster)
        a100, a10 = (torch.tensor([40e9]), torch.tensor([1840e9])), (torch.tensor([40e9]), torch.tensor([128e9]))
        kinds = {"A": (a100, "p4d.24xlarge"), "B": (a10, "g5.24xlarge")}
        self.orders = [[kinds[letter] for letter in order] for order in placing.device_placement(1, self.nodes - 1)]
        self.tool = self.estimate.FASOP(self.model, experiment, [*a100], [*a10], self.nodes)
        self.name = name

    def candidates(self) -> Iterator[dict[str, Any]]:
        """With their seconds an iteration."""
        for order in self.orders:
            known = None
            cluster, types = [[*node] for node, _ in order], [kind for _, kind in order]
            while found := self._amp(
                M=4, N=self.nodes, gbs=self.batch, known=known, num_layers=self.model["num_layers"]
            ):
                tensor, data, micro, known = found
                pipeline = 4 * self.nodes // (tensor * data)
                degrees = {
                    f"{key}_deg": torch.ones(1) * v
                    for key, v in zip(("tp", "dp", "pp"), (tensor, data, pipeline), strict=True)
                }
                args = (np.full((4, self.nodes), -1.0), self.batch, micro, cluster, self.model, degrees)
                with torch.no_grad():
                    result = self.tool(args, types, {"exhaustive": False, "gpu_type_lst": None})
                yield {
                    "sizes": (tensor, data, pipeline, micro),
                    "cluster": cluster,
                    "types": types,
                    "partition": [*result[1]],
                    "seconds": float(result[2]),
                }

    def ours(self, one: dict[str, Any]) -> tuple[float, float, float]:
        """Our partition's seconds, and the public one's again, both by the public costs and simulator; and the part of
        them by which `PublicPipelines`, in which we search, are wrong."""
        tensor, data, pipeline, micro = one["sizes"]
        ranks = {rank: rank // 4 for rank in range(4 * self.nodes)}
        of = {"mp": tensor, "dp": data, "pp": pipeline, "micro_bs": micro}
        degrees = {key: value if key == "micro_bs" else torch.ones(1) * value for key, value in of.items()}
        degrees.update(rank_map={}, rank_node_map=ranks)
        layers = self.estimate.get_layer_type(self.name, int(self.model["num_layers"]), pipeline)
        costs = [
            np.asarray(self.estimate.get_cost_e(is_a100, self.model, degrees, profile, layers, self.name))
            for is_a100, profile in ((True, self.tool.profile_cost_A100), (False, self.tool.profile_cost_A10))
        ]
        sent = np.asarray(self.estimate.get_cost_c(one["cluster"], self.model, degrees, {}, _layer=layers)[0])
        sent = np.concatenate([sent, sent[-1:]])  # it has none behind the last layer, where an empty stage may begin
        gpus = self._gpu_for_stage(pipeline, self.nodes, one["types"])
        embedding = 0.0
        if self.name != "T5":
            embedding = self.estimate.cost_all_reduce_embedding(self.model, one["cluster"], degrees, 4)

        def summed(partition: Sequence[int]) -> list[float]:
            found = self.estimate.dp_cost(None, one["cluster"], self.model, degrees, {}, [*partition], layers, 4, gpus)
            return [float(seconds) for seconds in found[1]]

        def seconds(partition: Sequence[int]) -> float:
            stages = self.pipe.get_stage_latency([*partition], *costs, sent, gpus)
            computed, ahead, back = (
                [getattr(stage, f"get_{what}_time")() for stage in stages] for what in ("comp", "for_send", "back_send")
            )
            count = self.batch // data // micro
            ends = self.pipe.schedule(pipeline, count, computed, ahead, back)[1]
            return max(float(end) + more for end, more in zip(ends, summed(partition), strict=True)) + float(embedding)

        if pipeline == 1:
            return seconds([len(layers)]), seconds(one["partition"]), 0.0
        kinds, number = np.unique(np.stack(costs), axis=1, return_inverse=True)
        rows = np.array([0 if gpu == "A100" else 1 for gpu in gpus])
        each = kinds[rows].T[..., np.newaxis]
        hop = np.zeros((pipeline, 1))
        hop[[0, -2], 0] = sent[0, [0, -1]]
        counts = np.zeros((kinds.shape[1], len(layers) + 1), int)
        counts[number.reshape(-1), np.arange(1, len(layers) + 1)] = 1
        none, sums = np.zeros((pipeline, 1)), 0 * each
        first = np.array([summed([some, len(layers) - some, *[0] * (pipeline - 2)]) for some in range(len(layers) + 1)])
        sums[number.reshape(-1)[::-1], 0, 0] = np.diff(first[:, 0])[::-1]
        lines = PublicPipelines(
            schedule=Schedule.one_f_one_b,
            micro_batches=self.batch // data // micro,
            forward=Linear(fixed=none, layer=each / 3),
            backward=Linear(fixed=none, layer=2 * each / 3),
            hop=hop,
            blocking=True,
            sums=Linear(fixed=none, layer=sums),
            shares_of_sums=(first[-1] / first[-1, 0] if data > 1 else np.ones(pipeline))[:, np.newaxis],
            optimizer=Linear(fixed=none, layer=0 * each),
            embedding=np.zeros(1),
            capacity=np.full((pipeline, 1), len(layers)),
            shares=np.full((1, *each.shape), 1e-6),
            basis=np.zeros(1, int),
            order=LayerOrder(counts=np.cumsum(counts, axis=1), extra=np.zeros(len(layers) + 1)),
            s_per_byte=none,
        )
        begin = start(lines, len(layers), bottleneck(lines, len(layers)))
        found, taken = shortest(lines, len(layers), begin)
        mine = seconds(found[:, 0].tolist())
        return mine, seconds(one["partition"]), abs((float(taken[0]) + float(embedding)) / mine - 1)


def our_cpu_s(name: str, also: str) -> float:
    """CPU seconds in which our search finds the best plan on all nodes, which it bounds as well."""
    inputs = read([*ASKED[name].split(), "train.precision=fp16", "parallel.schedule=one_f_one_b", *also.split()])
    begun = time.process_time()
    best_plans(inputs, Arguments(leave_out=False, by_stage=False))
    return time.process_time() - begun


def compared(name: str) -> dict[str, Any]:
    our_cpu_s(next(other for other in MODELS if other != name), "")  # imports what a search needs
    mine, with_all = our_cpu_s(name, ALSO), our_cpu_s(name, "")
    with contextlib.redirect_stdout(io.StringIO()):
        public = Public(name)
        begun = time.process_time()
        candidates = [*public.candidates()]
        theirs = time.process_time() - begun
        ratios, best, others = [], [], 0
        for one in candidates:
            faster, again, wrong = public.ours(one)
            if wrong > EQUAL:
                raise SystemExit(f"{one['sizes']}, {one['types']}: the public simulator says {wrong:.2%} other seconds")
            others += abs(again / one["seconds"] - 1) > 1e-3
            ratios.append(faster / min(again, one["seconds"]))
            best.append(faster)
    found = np.array(ratios)
    fastest = min(one["seconds"] for one in candidates)
    return {
        "candidates": len(candidates),
        "public_cpu_s": round(theirs, 1),
        "our_cpu_s": round(mine, 2),
        "our_cpu_s_with_all_options": round(with_all, 2),
        "its_seconds_are_of_another_partition_than_it_names": others,
        "ours_worse": int((found > 1 + EQUAL).sum()),
        "ours_better": int((found < 1 - EQUAL).sum()),
        "ours_percent_shorter_mean": round(100 * (1 - float(found.mean())), 2),
        "ours_percent_shorter_most": round(100 * (1 - float(found.min())), 2),
        "ours_percent_longer_most": round(max(0.0, 100 * (float(found.max()) - 1)), 3),
        "public_best_ms": round(1e3 * fastest, 2),
        "our_best_ms": round(1e3 * min(best), 2),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="BERT and T5, beside the public FASOP itself.")
    parser.add_argument("--public", type=Path, required=True, help="FASOP/ of its checkout")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {
        "machine": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cpus": os.cpu_count(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        }
    }
    results = args.results and args.results.resolve()
    sys.path.insert(0, str(args.public.resolve()))
    os.chdir(args.public)  # it reads its costs from there
    os.environ.setdefault("HOME", "/")
    torch.set_num_threads(1)
    for name in args.models:
        found[name] = compared(name)
    text = json.dumps(found, indent=1)
    print(text)
    if results:
        results.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
