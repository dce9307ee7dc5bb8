"""The answers of PipeDream's public optimizer beside those of `fasop.graphs`, on all profiles that it ships.

    python -m benchmarks.public_pipedream --public CHECKOUT [--limit 120] [--results FILE]

Needs a checkout of the public PipeDream. Each of its answers is computed by its own program in a process of its own,
which is ended after `--limit` CPU seconds; graphviz is not needed, drawings are left out. How long the tools take is
measured by `benchmarks.whole_commands`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fasop.errors import SearchError
from fasop.graphs.division import Level, Options
from fasop.graphs.graph_text import graph_text, parse, read_graph
from fasop.graphs.own.on_levels import on_levels
from fasop.graphs.own.versioned_memory import VersionedMemory
from fasop.graphs.public.recurrence import divide

EQUAL = 1e-4
FLAT, NESTED = ((4,), (16,)), ((4, 4), (8, 2), (2, 2))
FAST, SLOW = 3.125e9, 1.25e9
COUNTED: dict[str, Any] = {"compression": 1.0}
OPTIONS: tuple[dict[str, Any], ...] = (
    COUNTED,
    {},
    {"compression": 4.0},
    {"straight": True, "compression": 1.0},
    {"fewer": True, "compression": 1.0},
    {"memory_bytes": 16e9, "compression": 1.0},
    {"memory_bytes": 4e9, "compression": 1.0},
)
PUBLIC = """
import json, os, resource, sys, types
graphviz = types.ModuleType("graphviz")
class Digraph:
    def node(self, *args, **more): pass
    def edge(self, *args, **more): pass
    def render(self, *args, **more): pass
graphviz.Digraph = Digraph
sys.modules["graphviz"] = graphviz
case = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (case["limit"], case["limit"]))
os.chdir(case["folder"])
sys.path[:0] = [case["folder"], os.path.dirname(case["folder"])]
import optimizer_graph_hierarchical as public
public.use_memory_constraint = case["memory"] is not None
public.memory_size, public.straight_pipeline = case["memory"], case["straight"]
public.use_fewer_machines, public.activation_compression_ratio = case["fewer"], case["compression"]
sys.setrecursionlimit(100000)
with open(os.devnull, "w") as nowhere:
    sys.stdout, out = nowhere, sys.stdout
    seconds = public.main(case["machines"], case["file"], case["rates"], case["memory"], case["straight"],
        case["memory"] is not None, case["fewer"], case["compression"], case["output"], True, True)
    sys.stdout = out
print(json.dumps(seconds))
"""
"""A module whose `main` reads some of its arguments as globals."""


def profiles(public: Path) -> dict[str, Path]:
    return {file.parent.name: file for file in sorted(public.glob("profiler/*/profiles/*/graph.txt"))}


def cases(machines: tuple[tuple[int, ...], ...]) -> Iterator[tuple[list[Level], dict[str, Any]]]:
    for some in machines:
        for rate in (SLOW, FAST):
            rates = [rate * 10, rate][-len(some) :]
            for options in OPTIONS:
                yield [Level(machines=n, bytes_per_s=b) for n, b in zip(some, rates, strict=True)], options


def public_answer(public: Path, file: Path, levels: list[Level], options: dict[str, Any], limit: int) -> dict[str, Any]:
    """Its seconds and stages; or why there are none."""
    with tempfile.TemporaryDirectory() as output:
        case = {
            "folder": str(public / "optimizer"),
            "file": str(file),
            "machines": [level.machines for level in levels],
            "rates": [level.bytes_per_s for level in levels],
            "memory": options.get("memory_bytes"),
            "straight": options.get("straight", False),
            "fewer": options.get("fewer", False),
            "compression": options.get("compression"),
            "output": output,
            "limit": limit,
        }
        done = subprocess.run(
            [sys.executable, "-c", PUBLIC, json.dumps(case)], capture_output=True, text=True, check=False
        )
        if done.returncode < 0:
            return {"none": f"not within {limit} CPU s"}
        if done.returncode:
            return {"none": done.stderr.strip().splitlines()[-1]}
        pipeline, data_parallel = json.loads(done.stdout.splitlines()[-1])
        (written,) = Path(output).glob("gpus=*.txt")
        return {
            "pipeline_s": pipeline,
            "data_parallel_s": data_parallel,
            "stages": {node.name: node.stage for node in parse(written.read_text(), str(written)).nodes},
        }


def compared(public: Path, file: Path, levels: list[Level], options: dict[str, Any], limit: int) -> dict[str, Any]:
    try:
        ours = divide(read_graph(file), levels, Options(**options))
    except SearchError as error:
        ours, why = None, str(error)
    theirs = public_answer(public, file, levels, options, limit)
    row: dict[str, Any] = {
        "model": file.parent.name,
        "machines": "x".join(str(level.machines) for level in levels),
        "bytes_per_s": [level.bytes_per_s for level in levels],
        **options,
    }
    if options == COUNTED:
        row.update(own(file, levels))
    if ours is not None:
        row.update(pipeline_ms=round(ours.pipeline_s * 1e3, 4), replicas=ours.replicas)
    else:
        row["none"] = why
    if "none" in theirs:
        row["public_none"] = theirs["none"]
        return row
    if ours is None:
        row["equal"] = False
        return row
    off = max(
        abs(ours.pipeline_s / theirs["pipeline_s"] - 1), abs(ours.data_parallel_s / theirs["data_parallel_s"] - 1)
    )
    row["off"] = off
    row["equal"] = off < EQUAL
    row["same_stages"] = {node.name: node.stage for node in ours.graph.nodes} == theirs["stages"]
    return row


def own(file: Path, levels: list[Level]) -> dict[str, Any]:
    """Our own division."""
    found = on_levels(read_graph(file), levels, Options(**COUNTED), VersionedMemory())
    return {
        "own_ms": round(found.pipeline_s * 1e3, 4),
        "own_replicas": found.replicas,
        "own_note": found.notes[0],
    }


def round_trips(file: Path) -> bool:
    """Whether a profile that is read and written has the same lines, but for how a number's zeros are written."""
    text = file.read_text(encoding="utf-8")
    written = graph_text(read_graph(file))
    of, ours = (sorted(re.sub(r"(\d)\.0+\b", r"\1", one).strip("\n").split("\n")) for one in (text, written))
    return of == ours and parse(written, "written") == read_graph(file)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="PipeDream's public optimizer, beside ours.")
    parser.add_argument("--public", type=Path, required=True, help="its checkout")
    parser.add_argument("--models", nargs="+", help="only these profiles")
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds of one of its answers")
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args(argv)
    public = args.public.resolve()
    files = profiles(public)
    found: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "cpus": os.cpu_count()},
        "round_trips": {name: round_trips(file) for name, file in files.items()},
        "answers": [],
    }
    for name in args.models or files:
        for machines in (FLAT, NESTED):
            late = False
            for levels, options in cases(machines):
                if late:
                    continue
                row = compared(public, files[name], levels, options, args.limit)
                late = "CPU s" in row.get("public_none", "")
                found["answers"].append(row)
                print(json.dumps(row), flush=True)
    known = [row for row in found["answers"] if "equal" in row]
    found["compared"] = len(known)
    found["equal"] = sum(row["equal"] for row in known)
    found["same_stages"] = sum(row.get("same_stages", False) for row in known)
    found["most_off"] = max((row["off"] for row in known if "off" in row), default=None)
    own_rows = [row for row in known if "own_ms" in row and "pipeline_ms" in row]
    found["own_worse"] = sum(row["own_ms"] > row["pipeline_ms"] * (1 + 1e-6) for row in own_rows)
    found["own_better"] = sum(row["own_ms"] < row["pipeline_ms"] * (1 - 1e-6) for row in own_rows)
    print(json.dumps({key: value for key, value in found.items() if key != "answers"}, indent=1))
    if args.results:
        args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
