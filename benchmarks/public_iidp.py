"""python -m benchmarks.public_iidp --public FOLDER [--results FILE]: shares, beside the public IIDP's own solver.

FOLDER is a checkout of github.com/unist-ssl/IIDP. Its solver and ours answer its quickstart (a V100 and a P100 server)
for every global batch that both can, and larger clusters of the same two kinds. How long the tools take is measured by
`benchmarks.whole_commands`.
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
import tempfile
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasop.shares.performance import recommended
from fasop.shares.public_files import Cluster, read_cluster
from fasop.shares.solution import Solution, best

QUICKSTART = Path("examples/imagenet/resnet50_quickstart")
BATCHES = range(256, 8193, 128)
GPUS = (64, 128, 512, 4096)
PUBLIC_UP_TO = 512
"""GPUs: with more, the public solver takes minutes or more."""
PER_GPU = 256
"""Samples."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[2].partition("\n")[0])
    parser.add_argument("--public", type=Path, required=True, help="a checkout of IIDP")
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args(argv)
    public = Public(args.public)
    cluster = public.cluster()
    results: dict[str, Any] = {"machine": {"python": platform.python_version(), "cpus": os.cpu_count()}}
    results["quickstart"] = quickstart(public, cluster)
    results["clusters"] = [many(public, cluster, gpus) for gpus in GPUS]
    print(json.dumps(results, indent=1))
    if args.results is not None:
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def quickstart(public: Public, cluster: Cluster) -> dict[str, Any]:
    """Both answers to every global batch."""
    ratios, without = list[float](), 0
    for batch in BATCHES:
        found, answer = solved(cluster, batch), public.seconds(cluster, batch)
        if answer is None:
            without += 1
        else:
            ratios.append(answer / found.seconds)
    return {
        "batches": len(BATCHES),
        "public_finds_none": without,
        "ours_worse": sum(ratio < 1 - 1e-12 for ratio in ratios),
        "ours_better": sum(ratio > 1 + 1e-12 for ratio in ratios),
        "public_longer_percent_most": round(100 * (max(ratios) - 1), 2),
    }


def many(public: Public, cluster: Cluster, gpus: int) -> dict[str, Any]:
    """The same two kinds of servers, many of each."""
    first, second = cluster.servers
    servers = tuple(
        replace(server, name=f"{server.name}n{number}") for server in (first, second) for number in range(gpus // 8)
    )
    larger, batch = replace(cluster, servers=servers), gpus * PER_GPU
    figures: dict[str, Any] = {"gpus": gpus, "batch": batch}
    figures["our_iteration_s"] = round(solved(larger, batch).seconds, 5)
    if gpus <= PUBLIC_UP_TO:
        answer = public.seconds(larger, batch)
        figures["public_iteration_s"] = None if answer is None else round(answer, 5)
    return figures


def solved(cluster: Cluster, batch: int) -> Solution:
    return best(cluster, batch, recommended(cluster.buckets_mib))


class Public:
    """The public solver. Of its package only what a solver needs is imported, for the rest asks for an old PyTorch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sys.path.insert(0, str(folder))
        for name in ("iidp", "iidp.config", "iidp.utils", "iidp.cluster", "iidp.train"):
            module = types.ModuleType(name)
            module.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = module
        helper = types.ModuleType("iidp.train.train_helper")
        vars(helper)["select_weight_sync_method"] = None
        sys.modules["iidp.train.train_helper"] = helper
        self.configurator = importlib.import_module("iidp.config.configurator")
        self.server = importlib.import_module("iidp.cluster.server")

    def cluster(self) -> Cluster:
        """Its quickstart's, whose profiles are in folders of other names than its servers."""
        with contextlib.chdir(self.folder / QUICKSTART.parent):
            return read_cluster(Path(QUICKSTART.name) / "config.json")

    def seconds(self, cluster: Cluster, batch: int) -> float | None:
        """Returns its best answer over all local batch sizes, as its command line asks for them."""
        profiles = self.folder / QUICKSTART
        folders = dict(
            zip(
                (server.gpu for server in cluster.servers[:: len(cluster.servers) - 1]), ("node1", "node2"), strict=True
            )
        )
        answers = []
        with tempfile.TemporaryDirectory() as made, contextlib.redirect_stdout(io.StringIO()):
            for size in cluster.measured:
                if batch % size or batch // size < sum(server.gpus for server in cluster.servers):
                    continue
                info, rank = self.server.GlobalServerInfo(), 0
                times = Path(made) / str(size)
                times.mkdir()
                for server in cluster.servers:
                    (times / server.name).symlink_to(
                        profiles / "cluster_comp_profile_data" / str(size) / folders[server.gpu]
                    )
                    about = {
                        "type": server.gpu,
                        "number": server.gpus,
                        "tfplos": 1,
                        "intra_network_bandwidth": server.bandwidth_within,
                        "inter_network_bandwidth": server.bandwidth_between,
                    }
                    info.add(self.server.ServerInfo(server.name, [*range(rank, rank + server.gpus)], about))
                    rank += server.gpus
                solver = self.configurator.IIDPStaticLocalBatchSizeConfigurator(
                    str(times),
                    str(profiles / "comm_profile_data"),
                    str(profiles / "bucket_profile_data"),
                    {gpu: measured.most_workers for gpu, measured in cluster.measured[size].items()},
                    size,
                    str(recommended(cluster.buckets_mib)),
                    info,
                    batch // size + 1,
                    4,
                )
                with contextlib.suppress(AssertionError):  # what it has no answer to
                    _, seconds, workers, _ = solver.solve_dynamic_programming(batch // size)
                    answers += [float(seconds)] if workers == batch // size else []
        return min(answers, default=None)


if __name__ == "__main__":
    sys.exit(main())
