"""`tdpp logs`: what the nodes of a run wrote, and what the agents on them did."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.rundir import RunDir
from conf.visible import visible
from conf.words import Parser
from launch.agent_logs import agent_logs
from launch.arguments import add_run, chosen_run
from launch.errors import LaunchError
from launch.follow import LINE_S, LOOK_S, Log
from launch.glance import glance
from launch.observe import answers_to, complete
from launch.watch import SLURM_S

_BLOCK = 64 * 1024
_NAMED = 16
"""So many of a run's nodes are named in a message."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="tdpp logs", description="Print what the nodes of a run wrote.")
    add_run(parser)
    parser.add_argument("--node", help="only this node, such as local-0")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--err", action="store_true", help="stderr instead of stdout")
    which.add_argument("--gpu", action="store_true", help="the readings of its GPUs (docs/gpus.md)")
    which.add_argument("--agent", action="store_true", help="what its node agent printed, and the job's script")
    parser.add_argument("--tail", type=_count, metavar="N", help="of each file only the last N lines, and what follows")
    parser.add_argument("--raw", action="store_true", help="control characters as they are, also a terminal's orders")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run has ended")
    arguments = parser.parse_args(argv)
    run = chosen_run(arguments)
    plan = glance(run).plan
    names = [node["name"] for node in plan["nodes"]]
    if arguments.node is not None and arguments.node not in names:
        raise LaunchError(f"--node {arguments.node}: the run {run.name} has {_some(names)}")
    chosen = names if arguments.node is None else [arguments.node]
    logs: dict[Path, Log] = {}
    end = _End(run)
    over = not arguments.follow
    while True:
        # Before the logs are read, so that nothing written until the end is missed.
        over = over or end.is_here()
        for source, path in _files(run, plan, chosen, arguments):
            if path not in logs:
                logs[path] = Log(path, 0 if arguments.tail is None else tail_begin(path, arguments.tail))
            _print(source if len(chosen) > 1 else None, logs[path], over, str if arguments.raw else visible)
        sys.stdout.flush()
        if over:
            return 0
        time.sleep(LINE_S)


def _files(
    run: RunDir, plan: Mapping[str, Any], chosen: Sequence[str], which: argparse.Namespace
) -> list[tuple[str, Path]]:
    """What is to be printed, with whose it is."""
    if which.agent:
        found = agent_logs(run, plan, run.read_json(run.jobs)["jobs"])
        sources = found if which.node is None else chosen
        return [(source, path) for source in sources for path in found.get(source, [])]
    path_of = run.node_err if which.err else run.node_gpu if which.gpu else run.node_out
    return [(name, path_of(name)) for name in chosen]


def _print(source: str | None, log: Log, over: bool, shown: Callable[[str], str]) -> None:
    """What is new, with whose it is before each line; once the run is over also a last line that has no end."""
    prefix = "" if source is None else f"{source}: "
    while lines := log.new_lines():
        print("\n".join(f"{prefix}{shown(line)}" for line in lines))
    if over and (rest := log.rest()):
        print(f"{prefix}{shown(rest)}")


def tail_begin(path: Path, lines: int) -> int:
    """Where the last lines of a file begin, in bytes; 0 in one that is not there yet. It is read from its end."""
    try:
        with path.open("rb") as file:
            end = begin = file.seek(0, os.SEEK_END)
            if not lines:
                return end
            missing = lines + 1  # the newline before the first of them
            while begin > 0:
                size = min(_BLOCK, begin)
                begin -= size
                file.seek(begin)
                block = file.read(size)
                at = len(block)
                if begin + size == end and not block.endswith(b"\n"):
                    missing -= 1  # the last line has no newline of its own
                while missing and (at := block.rfind(b"\n", 0, at)) >= 0:
                    missing -= 1
                if not missing:
                    return begin + at + 1
    except FileNotFoundError:
        return 0
    return 0


class _End:
    """Whether a run is over: its files are looked at often, Slurm is asked seldom."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next_look = self._next_ask = -math.inf
        self._told = False

    def is_here(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        look = glance(self._run)
        if not look.asks and not look.unrecorded:
            return look.settled or complete(look, {}).over
        if now < self._next_ask:
            return False
        self._next_ask = now + SLURM_S
        answers = answers_to([look])
        if not isinstance(answers, LaunchError):
            return complete(look, answers).over
        if not self._told:  # the log goes on, whether or not Slurm answers
            print(f"tdpp: the end of {self._run.name} cannot be seen for now: {answers}", file=sys.stderr, flush=True)
        self._told = True
        return False


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines, such as --tail 20")
    return int(text)


def _some(names: Sequence[str]) -> str:
    others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"the nodes {', '.join(names[:_NAMED])}{others}"
