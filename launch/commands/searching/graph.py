"""`tdpp search graph=FILE`: the best stages of a profiled graph, as a table, a CSV file and an annotated graph."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.pipedream.driver import ModelType
from conf.pipedream.export import DRIVERS, WRITTEN, files_of, package_folder
from conf.reading.files import check_writable, write_whole
from conf.schema.cluster import Cluster
from conf.schema.values.partition import NodeOrder
from fasop.errors import SearchError
from launch.screen import print_table, remark
from megatron_ext.contract.models.model import ModelConfig

if TYPE_CHECKING:
    from conf.schema.cluster import Cluster
    from fasop.graphs.arguments import Arguments
    from fasop.graphs.division import StageDivision
    from fasop.graphs.graph import Graph


USAGE = """usage: tdpp search graph=FILE levels=N[,N...] bandwidths=B[,B...] [memory_gb=N] [reference=true] ...
       tdpp search graph=FILE|GPU:FILE,GPU:FILE [cluster=CHOICE] [KEY=VALUE ...] ...
                   [straight=true] [fewer=true] [compression=N] [sync=sum|max] [csv=FILE]
                   [page=FILE] [graph_output=FILE] [export=DIR]

Divides a profiled graph into stages with replicas that run without a flush, as PipeDream does. FILE is a graph.txt of
its profiler, or of 'tdpp profile'. The machines are given as levels of a network, or as the nodes of a cluster.

  tdpp search graph=vgg16/graph.txt levels=4,4 bandwidths=1.25e10,1.25e9 graph_output=gpus=16.txt
  tdpp search graph=a100:a100/graph.txt,a10:a10/graph.txt cluster=a100x1_a10x7

  levels=4,2         4 machines that share a network, 2 such groups on the next level, and so on
  bandwidths=B,B     the bandwidth of each level's links, in bytes per second
  memory_gb=N        the memory of a machine, in 10^9 bytes; a cluster's GPUs have their own
  reference=true     compute exactly what PipeDream's public optimizer computes
  straight=true      use no replicas
  fewer=true         leave out machines that do not make it faster
  compression=N      send activations N times smaller; with reference=true, sending takes no time without this word
  sync=max           a stage with replicas takes the longer of compute and gradient all-reduce, as in the paper;
                     sync=sum: their sum, as in the public optimizer and in a run of tdpp
  csv=FILE           also write the stages to this file
  page=FILE          write a page with the stages, the graph, its cuts and the times of its operators
  graph_output=FILE  write the graph with the stage of each node (stage_id)
  export=DIR         write the stages into the folder of PipeDream's runtime for the model's type, with its files of
                     ranks and its driver's configurations"""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp search <argv>`, of which one word is graph=."""
    from fasop.graphs.arguments import parse
    from fasop.graphs.division import summary, table
    from fasop.graphs.graph_text import doubts, read_graph

    args = parse(argv)
    check_writable(args.csv, args.page, args.graph_output)
    if args.export is not None:
        check_folder(args.export)
    graphs = {gpu: read_graph(file) for gpu, file in args.graph.items()}
    odd = [f"{gpu}{': ' * bool(gpu)}{doubt}" for gpu, graph in graphs.items() for doubt in doubts(graph)]
    remark(*odd)
    division = _divided(args, graphs)
    print_table(*table(division))
    print(summary(division))
    remark(*division.notes)
    write_results(division, f"tdpp search {shlex.join(argv)}", args.csv, args.page, args.graph_output, odd)
    if args.export is not None:
        ranks, file = sum(replicas_of(division)), next(iter(args.graph.values()))
        of_levels = on_hosts(args.levels[0], ranks) if args.levels else None
        machines = of_levels or on_cluster(_cluster(args), division.node_order, ranks)
        kind = kind_of([node.description for node in division.graph.nodes])
        export(args.export, file.absolute().parent.name or file.stem, division, machines, kind)
    return 0


def _divided(args: Arguments, graphs: Mapping[str, Graph]) -> StageDivision:
    from fasop.graphs.own.on_levels import on_levels
    from fasop.graphs.own.versioned_memory import VersionedMemory
    from fasop.graphs.public.recurrence import divide

    if args.reference:
        return divide(graphs[""], args.network, args.options)
    if args.levels:
        return on_levels(graphs[""], args.network, args.options, VersionedMemory())
    from fasop.costs.hardware import node_kinds
    from fasop.graphs.own.on_nodes import on_nodes

    kinds = node_kinds(_cluster(args))
    used = list(dict.fromkeys(kind.group.gpu for kind in kinds))
    if [*graphs] == [""] and len(used) == 1:
        graphs = {used[0]: graphs[""]}
    if set(graphs) != set(used):
        given = ",".join(f"{gpu}{':' * bool(gpu)}{file}" for gpu, file in args.graph.items())
        raise SearchError(
            f"graph={given}: the cluster has {', '.join(used)}, which need separate times; give "
            f"graph={','.join(f'{gpu}:FILE' for gpu in used)}"
        )
    profiles = [used.index(kind.group.gpu) for kind in kinds]
    return on_nodes([graphs[gpu] for gpu in used], profiles, kinds, args.options, VersionedMemory())


def _cluster(args: Arguments) -> Cluster:
    from conf.compose import compose_unchecked, to_object
    from conf.schema.cluster import Cluster

    return to_object(compose_unchecked(args.overrides), Cluster, "cluster")


def write_results(
    division: StageDivision,
    command: str,
    csv: Path | None,
    page: Path | None,
    graph_output: Path | None,
    doubts: Sequence[str] = (),
) -> None:
    """Writes the files that were asked for."""
    from fasop.graphs.division import csv_text
    from fasop.graphs.graph_text import graph_text

    if csv is not None:
        write_whole(csv, csv_text(division))
    if page is not None:
        from reports.pages.graph_page import render  # few ask for a page, and it is slow to import

        write_whole(page, render(command, division, doubts))
        print(page)
    if graph_output is not None:
        write_whole(graph_output, graph_text(division.graph))


def check_folder(folder: Path) -> None:
    """Raises SearchError, before the search, where no folder can be made, or nothing be written."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    check_writable(there / "export")


def replicas_of(division: StageDivision) -> list[int]:
    """Returns the number of replicas by stage, over all levels."""
    return [math.prod(stage.replicas) for stage in division.stages]


def on_hosts(each: int, ranks: int) -> list[str]:
    """`host:gpu` by rank, of hosts that have no names."""
    return [f"host{rank // each}:{rank % each}" for rank in range(ranks)]


def on_cluster(cluster: Cluster, node_order: str | None, ranks: int) -> list[str]:
    """The same for nodes of a cluster, called as tdpp calls them; a single one that is not Slurm's is this machine."""
    groups = list(cluster.groups.items())
    if len(groups) == 1 and groups[0][1].count == 1 and groups[0][1].partition is None:
        return [f"localhost:{rank}" for rank in range(ranks)]
    order = NodeOrder.parse(node_order).groups if node_order else [n for n, group in groups for _ in range(group.count)]
    seen: dict[str, int] = {}
    found: list[str] = []
    for name in order:
        seen[name] = seen.get(name, -1) + 1
        found += [f"{name}-{seen[name]}:{gpu}" for gpu in range(cluster.groups[name].gpus_per_node or 1)]
    return found[:ranks]


def kind_of(descriptions: Sequence[str]) -> ModelType:
    """Tells the kind of a profiled graph's model: what embeds words translates."""
    return ModelType.translation if any(one.startswith("Embedding") for one in descriptions) else ModelType.images


def export(
    folder: Path,
    name: str,
    division: StageDivision,
    machines: Sequence[str],
    kind: ModelType | None,
    batch: int | None = None,
    model: ModelConfig | None = None,
    partition: Sequence[int] | None = None,
) -> None:
    """Writes the files, and says which. Raises SearchError: there are some of another division, or they cannot be
    written."""
    from fasop.graphs.graph_text import graph_text

    replicas = replicas_of(division)
    package = folder / package_folder(name, sum(replicas))
    if package.exists():
        raise SearchError(f"export={folder}: {package} already exists; choose another folder, or delete it")
    files: Mapping[Path, str] = files_of(
        name, replicas, graph_text(division.graph), machines, kind, batch, model, partition
    )
    for file, text in files.items():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text)
    print(f"{package}: stages and ranks")
    for driver in [folder / file for file in files if file.parts[0] == DRIVERS]:
        print(f"{driver}: start it with 'tdpp launch pipedream={driver}'")
    if kind is None:
        remark("no driver configurations: the driver trains only image and translation models")
    if model is None:
        remark(f"no stage modules: PipeDream makes them from gpus={sum(replicas)}.txt")
    elif model.family not in WRITTEN:
        remark(f"no stage modules: they are written for {', '.join(WRITTEN)}, not for {model.family}")
