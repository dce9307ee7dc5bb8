"""`tdpp logs`: what the nodes of a run wrote."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from launch.arguments import add_run, chosen_run
from launch.errors import LaunchError
from launch.follow import LINE_S, LOOK_S, Log
from launch.observe import observe


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tdpp logs", description="Print what the nodes of a run wrote.")
    add_run(parser)
    parser.add_argument("--node", help="only this node, such as local-0")
    parser.add_argument("--err", action="store_true", help="stderr instead of stdout")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run has ended")
    arguments = parser.parse_args(argv)
    run = chosen_run(arguments)
    names = [node["name"] for node in run.read_json(run.plan)["nodes"]]
    if arguments.node is not None and arguments.node not in names:
        raise LaunchError(f"--node {arguments.node}: the run {run.name} has the nodes {', '.join(names)}")
    chosen = names if arguments.node is None else [arguments.node]
    logs = {name: Log(run.node_err(name) if arguments.err else run.node_out(name)) for name in chosen}
    over, next_look = not arguments.follow, time.monotonic()
    while True:
        if not over and time.monotonic() >= next_look:
            # Before the logs are read, so that nothing written until the end is missed.
            over, next_look = observe(run).over, time.monotonic() + LOOK_S
        _print_new(logs)
        if over:
            return 0
        time.sleep(LINE_S)


def _print_new(logs: dict[str, Log]) -> None:
    """With the node's name before each line, where there are several."""
    for name, log in logs.items():
        for line in log.new_lines():
            print(f"{name}: {line}" if len(logs) > 1 else line)
    sys.stdout.flush()
