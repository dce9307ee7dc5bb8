"""`tdpp init`: a new user's first files, a cluster and an experiment on it; or, after the word `model`, a model."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from conf.errors import reworded
from conf.reading.parser import Parser, option
from conf.reading.values import NoValue, above_0
from launch.commands import init_model
from launch.commands.init_model import check_composes, checked_name, free_path, write_all
from launch.errors import LaunchError
from launch.init import discover
from launch.init.machines import Found, answered, at_the_terminal, priced, usable, with_network
from launch.init.yaml_text import cluster_text, experiment_text, first_plan, plan_text
from launch.screen import can_be_asked, print_table, remark

NAME = "mine"
WAIT_S = 60
MODEL = "model"
NO_SLURM = (
    "only this machine is described, because Slurm's sinfo is not on PATH; for a Slurm cluster, use its login node or "
    "load its module, and repeat the command with --force; for machines that ssh reaches, add --hosts"
)
EPILOG = """examples:
  tdpp init                                cluster=mine and experiment=mine, as Slurm and its nodes report
  tdpp init lab --price a100=12.24         cluster=lab; a node with A100s costs $12.24 an hour
  tdpp init --hosts a:2,b:2                machines that ssh reaches, two ranks on each
  tdpp init model config.json mine-7b      a model from Hugging Face's config.json, as model=mine-7b"""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp init <argv>`; returns 0 once all is written."""
    if argv[:1] == [MODEL]:
        return init_model.main(argv[1:])
    arguments = parser().parse_args(argv)
    if ":" in arguments.name:
        raise LaunchError(
            f"{arguments.name!r} cannot name a configuration; if it is a host, give all hosts to --hosts, separated by "
            f"commas without spaces: --hosts a:2,b:2"
        )
    name = checked_name(arguments.name)
    paths = {group: free_path(name, group, arguments.force) for group in ("cluster", "parallel", "experiment")}
    given = dict(arguments.price)
    found = priced(usable(_found(arguments)), given)
    if arguments.network is not None:
        found = with_network(found, arguments.network)
    if can_be_asked():
        found = answered(found, at_the_terminal)
    plan = first_plan(found)
    texts = {
        "cluster": cluster_text(name, found, datetime.now().date().isoformat()),
        "parallel": plan_text(plan),
        "experiment": experiment_text(name, found),
    }
    check_composes(name, texts, f"experiment={name}")
    write_all(paths, texts)
    _tell(name, found, plan.why, paths)
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="tdpp init",
        description="Write your cluster, a plan and a first experiment into your folder of configurations.\n"
        "It asks Slurm and the nodes; without Slurm it looks at this machine.\n"
        "On a terminal it asks you for what no machine knows, such as prices.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "name", metavar="NAME", nargs="?", default=NAME, help="the name of all three files (default: %(default)s)"
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="HOST:RANKS,...", help="use these machines, written as in executor.hosts")
    where.add_argument("--local", action="store_true", help="use this machine alone, even if Slurm is there")
    made.add_argument(
        "--price",
        metavar="NAME=DOLLARS",
        type=option(_price),
        action="append",
        default=[],
        help="the price of a node per hour, by node group or GPU type; may be repeated",
    )
    made.add_argument(
        "--network", metavar="GBIT", type=option(above_0), help="the network between nodes, in Gbit/s out of each node"
    )
    made.add_argument(
        "--wait",
        metavar="SECONDS",
        type=option(_seconds),
        default=WAIT_S,
        help="how long to wait for a free node of each group, to query its GPUs (default: %(default)s)",
    )
    made.add_argument("--account", metavar="NAME", help="the account of all jobs, where Slurm wants one")
    made.add_argument("--qos", metavar="NAME", help="the quality of service of all jobs, where Slurm wants one")
    made.add_argument("--force", action="store_true", help="replace existing files")
    return made


def _found(arguments: argparse.Namespace) -> Found:
    charged = {key: value for key in ("account", "qos") if (value := getattr(arguments, key)) is not None}
    if arguments.hosts is not None:
        return discover.on_hosts([host.strip() for host in arguments.hosts.split(",")])
    if arguments.local:
        return discover.here()
    if shutil.which("sinfo") is None:
        return replace(discover.here(), notes=(NO_SLURM,))
    with reworded(LaunchError, "", "; 'tdpp init --local' writes this machine alone", of=LaunchError):
        return discover.on_slurm(arguments.wait, charged)


def _tell(name: str, found: Found, why: str, paths: Mapping[str, Path]) -> None:
    """What was found and written, and how to go on; what is to be checked goes to stderr."""
    of_groups = [f"{group.name}: {note}" for group in found.groups for note in (*group.notes, group.gpu.note) if note]
    remark(*found.notes, *of_groups)
    rows = [[group.name, str(group.count), _ranks(group.ranks), group.gpu.key] for group in found.groups]
    print_table(["group", "nodes", "ranks of a node", "device"], rows)
    print(f"\nwritten: {paths['cluster']}")
    print(f"written: {paths['parallel']}: {why}")
    print(f"written: {paths['experiment']}")
    print(
        f"""
next:
  tdpp data prepare --source stdlib --tokenizer byte --output data/stdlib
  tdpp doctor experiment={name}
  tdpp launch experiment={name}"""
    )


def _ranks(ranks: int | None) -> str:
    return "as planned" if ranks is None else str(ranks)


def _price(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, above_0(value)
    except NoValue:
        pass
    raise NoValue("must be NAME=DOLLARS with a price above 0, such as a100=12.24")


def _seconds(text: str) -> int:
    return max(1, round(above_0(text)))
