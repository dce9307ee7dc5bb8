"""Links between pairs of node groups as a table for `cluster.links`; and layer costs of the public FASOP artifact."""

from __future__ import annotations

import io
import math
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from conf.reading.files import write_whole
from conf.schema.experiment import Model
from conf.schema.values.links import KEY, from_file
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape
from launch.errors import LaunchError
from launch.profile.arguments import Arguments, Import
from launch.profile.findings import Found, medians
from launch.profile.link_fit import fit, rounded
from megatron_ext.contract.files import read_regular, why

Table = dict[str, dict[str, dict[str, Any]]]

LARGE = 2**16
"""Bytes from which on a message's size is worth a bandwidth of its own."""
POINTS = (LARGE, 2**20)
"""And the largest that was measured."""
OFF = 0.2
"""The part by which times of large messages may differ from those of one bandwidth."""


def measured_table(found: Found) -> Table:
    """Returns the links by row and column: medians of several pairs of nodes; of other numbers of ranks, of those that
    have most. Raises LaunchError: times do not grow with the size."""
    node_of = {rank: node for node, (_, ranks) in enumerate(found.nodes) for rank in ranks}
    times: dict[tuple[str, str], dict[int, list[Mapping[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for rank, content in found.ranks.items():
        for link in content.get("p2p", ()):
            ends = node_of[rank], node_of[link["to"]]
            if ends[0] != ends[1]:
                sharing = min(len(found.nodes[node][1]) for node in ends)
                times[found.groups[ends[0]], found.groups[ends[1]]][sharing].append(link["us_by_bytes"])
    table: Table = {}
    for row, column in sorted(times, key=lambda pair: [found.groups.index(name) for name in pair]):
        sharing, alike = max(times[row, column].items())
        table.setdefault(row, {})[column] = entry(medians(alike), sharing)
    return table


def entry(us_by_bytes: Mapping[int, float], sharing: int) -> dict[str, Any]:
    """One bandwidth, if it explains the times of large messages while `sharing` ranks of a node sent, or else points.
    Raises LaunchError: times do not grow with the size."""
    latency, slope = fit(us_by_bytes)
    off = max((abs(latency + size * slope - us) / us for size, us in us_by_bytes.items() if size >= LARGE), default=0.0)
    first = us_by_bytes[min(us_by_bytes)]
    busy = [
        (size, (us_by_bytes[size] - first) / sharing)
        for size in sorted({*POINTS, max(us_by_bytes)} & us_by_bytes.keys())
    ]
    if off > OFF and len(busy) > 1 and busy[0][1] > 0 and all(more > less for (_, less), (_, more) in pairwise(busy)):
        points = {size: rounded(8e-3 * size / us) for size, us in busy}
        return {"gbit_per_s_by_bytes": points, "latency_us": rounded(first)}
    return {"gbit_per_s": rounded(8e-3 * sharing / slope), "latency_us": rounded(latency)}


def override(table: Table) -> str:
    """The table as a word of a command line."""
    text = yaml.safe_dump(table, default_flow_style=True, sort_keys=False, width=1 << 30).strip()
    return shlex.quote(f"+{KEY}={text}")


def write_table(path: Path, table: Table, arguments: Arguments, comment: str) -> None:
    """Writes the table; with `add` beside the pairs that are there.

    Raises:
        ConfigError: what is there is no table.
        OutputError: it cannot be written.
    """
    whole: Table = from_file(str(path)) if arguments.add and path.exists() else {}
    for row, columns in table.items():
        whole.setdefault(row, {}).update(columns)
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    write_whole(path, lines + yaml.safe_dump(whole, sort_keys=False))


def imported(arguments: Import, model: Model) -> LayerProfile:
    """The profile of all files `<asked.files>_<tensor size>.npy`. Of the layers' times it has the median.

    Raises:
        LaunchError: there are none, or one is not of the model.
        ConfigError: the times cannot be.
    """
    folder, prefix = arguments.files.parent, arguments.files.name
    pattern = re.compile(re.escape(prefix) + r"_(\d+)\.npy")
    names = sorted(path.name for path in folder.glob("*.npy")) if folder.is_dir() else []
    files = {int(match[1]): folder / name for name in names if (match := pattern.fullmatch(name))}
    if not files:
        known = sorted({name.rpartition("_")[0] for name in names})
        raise LaunchError(
            f"import={arguments.files}: {folder} has no files {prefix}_<tensor size>.npy; "
            + (f"it has {', '.join(f'import={folder / name}' for name in known)}" if known else "it has no .npy files")
        )
    return LayerProfile(
        gpu=arguments.gpu,
        source=f"imported from {prefix}_{'|'.join(map(str, sorted(files)))}.npy, forward only; backward = "
        f"{arguments.backward_ratio:g} x forward, as given to the import",
        models={model.name: Shape.of(model)},
        costs=[_costs(path, tensor, arguments, model) for tensor, path in sorted(files.items())],
    )


def _costs(path: Path, tensor: int, arguments: Import, model: Model) -> ModelCosts:
    try:
        content = read_regular(path)
        seconds = np.load(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError, OverflowError, TypeError, SyntaxError, TokenError) as error:
        # a damaged header may ask for any type and size
        raise LaunchError(f"{path}: cannot be read as a numpy array: {why(error)}") from error
    if seconds.dtype.kind not in "fiu" or seconds.shape != (model.layers + 2,):
        raise LaunchError(
            f"{path} has {seconds.dtype} of shape {seconds.shape}, but model={model.name} of {model.layers} layers "
            f"needs {model.layers + 2} numbers (embedding, layers, head); choose the model of the file with model=… "
            f"or model.layers=…"
        )
    # The median would hide a bad layer among good ones.
    for number, value in enumerate(map(float, seconds)):
        if not 0 < value < math.inf:
            raise LaunchError(
                f"{path}: value {number} (counted from 0, the embedding) is {value:g} s; times must be above 0"
            )
    embedding, *layers, head = (float(value) * 1e3 for value in seconds)
    ratio = arguments.backward_ratio
    return ModelCosts(
        model=model.name,
        tensor=tensor,
        micro_batch_size=arguments.micro_batch_size,
        precision=arguments.precision,
        embedding=_cost(embedding, ratio),
        layer=_cost(statistics.median(layers), ratio),
        head=_cost(head, ratio),
    )


def _cost(forward_ms: float, ratio: float) -> Cost:
    return Cost(forward=rounded(forward_ms), backward=rounded(forward_ms * ratio))
