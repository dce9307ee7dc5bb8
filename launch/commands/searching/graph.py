"""`tdpp search graph=FILE`: the best stages of a profiled graph, as a table, a CSV file and an annotated graph."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fasop.errors import SearchError
from launch.commands.output_files import check_writable, write
from launch.commands.searching.export import check_free, export, kind_of, on_cluster, on_hosts, replicas_of
from launch.screen import print_table

if TYPE_CHECKING:
    from conf.schema.experiment import Cluster
    from fasop.graphs.arguments import Arguments
    from fasop.graphs.division import Division
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


def asked(argv: Sequence[str]) -> bool:
    """Whether a command line of `tdpp search` is about a profiled graph."""
    return any(word.startswith("graph=") for word in argv)


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp search <argv>`, of which one word is graph=.

    Raises:
        TdppError: what is asked for cannot be read, divided or written.
    """
    from fasop.graphs.arguments import parse
    from fasop.graphs.doubts import doubts
    from fasop.graphs.graph_text import graph_text, read_graph
    from fasop.graphs.table import csv_text, summary, table

    args = parse(argv)
    for file in (args.csv, args.page, args.graph_output):
        if file is not None:
            check_writable(file)
    if args.export is not None:
        check_free(args.export)
    graphs = {gpu: read_graph(file) for gpu, file in args.graph.items()}
    odd = [f"{gpu}{': ' * bool(gpu)}{doubt}" for gpu, graph in graphs.items() for doubt in doubts(graph)]
    for doubt in odd:
        print(f"({doubt})", file=sys.stderr)
    division = _divided(args, graphs)
    print_table(*table(division))
    print(summary(division))
    for note in division.notes:
        print(f"({note})", file=sys.stderr)
    if args.csv is not None:
        write(args.csv, csv_text(division))
    if args.page is not None:
        from reports.pages.graph_page import render  # few ask for a page, and it is slow to import

        write(args.page, render(f"tdpp search {shlex.join(argv)}", division, odd))
        print(args.page)
    if args.graph_output is not None:
        write(args.graph_output, graph_text(division.graph))
    if args.export is not None:
        ranks, file = sum(replicas_of(division)), next(iter(args.graph.values()))
        of_levels = on_hosts(args.levels[0], ranks) if args.levels else None
        machines = of_levels or on_cluster(_cluster(args), division.node_order, ranks)
        kind = kind_of([node.description for node in division.graph.nodes])
        export(args.export, file.absolute().parent.name or file.stem, division, machines, kind)
    return 0


def _divided(args: Arguments, graphs: Mapping[str, Graph]) -> Division:
    from fasop.graphs.own.held import Held
    from fasop.graphs.own.on_levels import on_levels
    from fasop.graphs.public.answer import divide

    if args.reference:
        return divide(graphs[""], args.network, args.options)
    if args.levels:
        return on_levels(graphs[""], args.network, args.options, Held())
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
    return on_nodes([graphs[gpu] for gpu in used], profiles, kinds, args.options, Held())


def _cluster(args: Arguments) -> Cluster:
    from conf.compose import compose_unchecked, to_object
    from conf.schema.experiment import Cluster

    return to_object(compose_unchecked(args.overrides), Cluster, "cluster")
