"""python -m benchmarks.whole_commands [--fasop FOLDER] [--iidp FOLDER] [--pipedream FOLDER] [--rounds N]: CPU seconds.

The searches of tdpp and of the public tools, each as a user's whole command: a process of its own from its start to its
end, imports included. The commands of a comparison take turns, all equally often, with one thread each
(`OMP_NUM_THREADS=1`, which the public tools need less time with). CPU seconds are user and system time of the process
and of what it waited for. Of each checkout given (`FASOP/` of github.com/AvatarHwang/FASOP, github.com/unist-ssl/IIDP,
github.com/msr-fiddle/pipedream) a copy is used. The figures go into benchmarks/results/whole-commands.json, and the
tables of them into the pages of docs/.

What old programs need in order to run today is put before them: names of today's PyTorch and a number of GPUs for
IIDP's, a graphviz that draws nothing for PipeDream's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/whole-commands.json"
TDPP = (sys.executable, "-m", "tdpp")
GPUS = (128,)
"""GPUs of the two kinds of IIDP's quickstart together."""
PER_GPU = 256
"""Samples."""
IIDP = """
import os, runpy, torch
torch.distributed._GradBucket = torch.distributed.GradBucket
torch.cuda.device_count = lambda: 4
kept, fdopen = [], os.fdopen
os.fdopen = lambda *given: kept.append(fdopen(*given)) or kept[-1]
runpy.run_module("iidp.config.api.configuration_solver", run_name="__main__")
"""
"""It opens its standard output twice, and the first is closed with the second unless it is kept."""
PIPEDREAM = """
import runpy, sys, types
class Digraph:
    node = edge = render = lambda self, *args, **more: None
sys.modules["graphviz"] = types.ModuleType("graphviz")
sys.modules["graphviz"].Digraph = Digraph
sys.setrecursionlimit(100000)
runpy.run_path("optimizer/optimizer_graph_hierarchical.py", run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    shown: str
    """The command as a user types it."""
    argv: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Holds the measurements of a command, one for each round."""

    command: str
    cpu_s: list[float]
    mib: int
    """Largest resident memory of any round."""


def tdpp(words: str, folder: Path = ROOT) -> Command:
    return Command(shown=f"tdpp {words}", argv=[*TDPP, *words.split()], folder=folder)


def fasop(checkout: Path) -> Iterator[list[Command]]:
    home = checkout / "home"
    home.mkdir()
    where = {"HOME": str(home), "PWD": str(checkout)}  # it deletes files in ~/tmp and writes to $PWD/main_logs

    def public(words: str) -> Command:
        argv = [sys.executable, "FASOP.py", *words.split()]
        return Command(shown=f"python FASOP.py {words}", argv=argv, folder=checkout, environment=where)

    mixed = "search experiment=seed_a100x1_a10x7"
    one, alike = "parallel.schedule=one_f_one_b", "search experiment=seed_a10x8"
    same = f"{one} parallel.zero=0 leave_out=false by_stage=false"  # what the public tool searches
    yield [tdpp(f"{alike} {same}"), tdpp(f"{alike} {one}"), public("--type gpt2XL")]
    yield [
        tdpp(f"{mixed} {same}"),
        tdpp(f"{mixed} {one}"),
        tdpp(mixed),
        public("--type gpt2XL --heterogeneous"),
    ]
    bert = "search cluster=a100x1_a10x7 cluster.groups.gpu2.count=3 model=bert-large train.precision=fp16"
    bert += " parallel.global_batch_size=256"
    yield [tdpp(f"{bert} {same}"), tdpp(f"{bert} {one}"), public("--type bert --heterogeneous")]


def iidp(checkout: Path) -> Iterator[list[Command]]:
    folder = checkout / "examples/imagenet"
    quickstart = folder / "resnet50_quickstart"
    profiles = ("cluster_comp_profile_data", "cluster_mem_profile_data")
    for size in [size for name in profiles for size in (quickstart / name).iterdir()]:
        (size / "node1").rename(size / "node0")  # as its servers are called
        (size / "node2").rename(size / "node1")

    def both(config: str, batch: int) -> list[Command]:
        public = Command(
            shown=f"python -m iidp.config.api.configuration_solver -c {config} -gbs {batch}",
            argv=[sys.executable, "-c", IIDP, "-c", config, "-gbs", str(batch)],
            folder=folder,
            environment={"PYTHONPATH": str(checkout)},
        )
        return [tdpp(f"search iidp={config} parallel.global_batch_size={batch}", folder), public]

    yield both("resnet50_quickstart/config.json", 512)
    servers: dict[str, Any] = json.loads((quickstart / "cluster_info.json").read_text())
    for gpus in GPUS:
        larger = folder / f"gpus{gpus}"
        shutil.copytree(quickstart, larger)
        names = {f"{name}n{number}": name for name in servers for number in range(gpus // 8)}
        for size in [size for name in profiles for size in (larger / name).iterdir()]:
            for name, like in names.items():
                (size / name).symlink_to(like)
        (larger / "cluster_info.json").write_text(json.dumps({name: servers[like] for name, like in names.items()}))
        config = json.loads((quickstart / "config.json").read_text().replace(quickstart.name, larger.name))
        (larger / "config.json").write_text(json.dumps({**config, "available_servers": [*names]}))
        yield both(f"{larger.name}/config.json", gpus * PER_GPU)


def pipedream(checkout: Path) -> Iterator[list[Command]]:
    (checkout / "out").mkdir()

    def short(command: str) -> str:
        return re.sub(r"profiler/\w+/profiles/", "", command)

    def three(model: str) -> list[Command]:
        profile = f"profiler/image_classification/profiles/{model}/graph.txt"
        words = f"-f {profile} -n 16 -b 3125000000 --activation_compression_ratio 1 -o out"
        theirs = Command(
            shown=short(f"python optimizer_graph_hierarchical.py {words}"),
            argv=[sys.executable, "-c", PIPEDREAM, *words.split()],
            folder=checkout,
            environment={"PYTHONPATH": f"{checkout}:{checkout / 'optimizer'}"},
        )
        ours = f"search graph={profile} levels=16 bandwidths=3.125e9"
        mine = [tdpp(words, checkout) for words in (ours, f"{ours} compression=1 reference=true")]
        return [*(replace(one, shown=short(one.shown)) for one in mine), theirs]

    yield from map(three, ("vgg16", "resnet50", "resnet101"))


PUBLIC: dict[str, tuple[Callable[[Path], Iterator[list[Command]]], str]] = {
    "fasop": (fasop, "docs/search.md"),
    "iidp": (iidp, "docs/iidp.md"),
    "pipedream": (pipedream, "docs/pipedream.md"),
}
"""Comparisons of a copy of a checkout, and the page that shows them."""


def once(command: Command) -> tuple[float, int]:
    """CPU seconds and MiB of one run.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **command.environment}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command.argv,
            cwd=command.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            output.seek(0)
            last = output.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{command.shown}\n{last}\nended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024


def compared(commands: Sequence[Command], rounds: int) -> list[Figures]:
    """All commands, one after another, in each round."""
    runs = [[once(command) for command in commands] for _ in range(rounds)]
    return [
        Figures(
            command=command.shown, cpu_s=[round(cpu_s, 2) for cpu_s, _ in runs_of], mib=max(mib for _, mib in runs_of)
        )
        for command, runs_of in zip(commands, zip(*runs, strict=True), strict=True)
    ]


def section(comparisons: Iterator[list[Command]], rounds: int) -> dict[str, Any]:
    before, tables = os.getloadavg()[0], []
    for commands in comparisons:
        tables.append([vars(one) for one in compared(commands, rounds)])
        print(json.dumps(tables[-1], indent=1), flush=True)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "rounds": rounds,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "comparisons": tables,
    }


def text(found: dict[str, Any]) -> str:
    """A section's table, in Markdown."""
    first, last = found["load"]
    lines = [
        f"Measured on {found['date']}, {found['rounds']} rounds, {found['cpus']} cores with other work on them (load "
        f"{first} before, {last} after):",
        "",
    ]
    for rows in found["comparisons"]:
        lines += ["| command | CPU seconds | MiB |", "|---|---|---|"]
        for row in rows:
            least, most = (f"{(cpu_s := pick(row['cpu_s'])):.{1 if cpu_s >= 1 else 2}f}" for pick in (min, max))
            spread = least if least == most else f"{least} to {most}"
            lines.append(f"| `{row['command']}` | {spread} | {row['mib']} |")
        lines.append("")
    return "\n".join(lines)


def written(page: str, found: dict[str, Any]) -> str:
    """The page with another table of whole commands."""
    before, begin, rest = page.partition("<!-- whole commands -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise ValueError("the page has no part <!-- whole commands --> … <!-- end -->")
    return before + begin + text(found) + end + after


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="CPU seconds of whole commands, beside the public tools'.")
    for name in PUBLIC:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help="its checkout")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    for name, (comparisons, page) in PUBLIC.items():
        if (checkout := getattr(args, name)) is None:
            continue
        with tempfile.TemporaryDirectory() as made:
            copy = Path(made).resolve() / "checkout"
            shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "*.bin", "*.idx"))
            found = section(comparisons(copy), args.rounds)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**results, name: found}, indent=1) + "\n", encoding="utf-8")
        of = ROOT / page
        of.write_text(written(of.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
