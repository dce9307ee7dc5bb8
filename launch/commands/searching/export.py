"""`export=DIR` of a search: the division as PipeDream's runtime takes it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.pipedream.driver import Kind
from conf.pipedream.export import DRIVERS, files_of, package_folder
from conf.pipedream.stage_source import WRITTEN
from conf.schema.cluster import Cluster
from conf.schema.values.partition import NodeOrder
from fasop.errors import SearchError
from launch.commands.output_files import check_writable, write
from megatron_ext.contract.models.model import ModelConfig

if TYPE_CHECKING:
    from fasop.graphs.division import Division


def check_free(folder: Path) -> None:
    """Raises SearchError, before the search, where no folder can be made, or nothing be written."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    check_writable(there / "export")


def replicas_of(division: Division) -> list[int]:
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


def kind_of(descriptions: Sequence[str]) -> Kind:
    """Tells the kind of a profiled graph's model: what embeds words translates."""
    return Kind.translation if any(one.startswith("Embedding") for one in descriptions) else Kind.images


def export(
    folder: Path,
    name: str,
    division: Division,
    machines: Sequence[str],
    kind: Kind | None,
    batch: int | None = None,
    model: ModelConfig | None = None,
    partition: Sequence[int] | None = None,
) -> None:
    """Writes the files, and says which.

    Raises:
        SearchError: there are some of another division, or they cannot be written.
    """
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
        write(target, text)
    print(f"{package}: stages and ranks")
    for driver in [folder / file for file in files if file.parts[0] == DRIVERS]:
        print(f"{driver}: start it with 'tdpp launch pipedream={driver}'")
    if kind is None:
        print("(no driver configurations: the driver trains only image and translation models)", file=sys.stderr)
    if model is None:
        print(f"(no stage modules: PipeDream makes them from gpus={sum(replicas)}.txt)", file=sys.stderr)
    elif model.family not in WRITTEN:
        print(f"(no stage modules: they are written for {', '.join(WRITTEN)}, not for {model.family})", file=sys.stderr)
