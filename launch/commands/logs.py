"""`tdpp logs`: what the nodes of a run wrote, and what the agents on them did."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from conf.errors import RunFolderError
from conf.reading.parser import Parser
from conf.run_folder.log_lines import WIDTH, for_people
from conf.run_folder.run_files import opened
from conf.run_folder.rundir import RunDir
from conf.visible import plural, visible
from launch.commands.run_arguments import add_run, chosen_run
from launch.control.follow import LINE_S, LOOK_S, Log
from launch.errors import LaunchError
from launch.files.run_files import agent_logs, read_run_files, read_submitted
from launch.observe.look import answers_to, finish_observation
from launch.screen import SLURM_S, some
from megatron_ext.contract.plan import Plan

_LINE_BYTES = 1 << 12
_TAIL_BYTES = 1 << 20
"""So far back are the last lines looked for, or `_LINE_BYTES` for each of them where that is more."""
_MOST_BYTES = 1 << 36
"""Nobody prints the whole of a larger log."""
_NAMED = 16
"""So many of a run's nodes are named in a message."""
_FAULTS = 3
"""So many files that cannot be read are named."""


class Format(StrEnum):
    """How lines of iterations and evaluations are printed."""

    short = "short"
    megatron = "megatron"


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    run = chosen_run(arguments)
    plan = read_run_files(run).plan
    names = plan.node_names
    if arguments.node is not None and arguments.node not in names:
        raise LaunchError(f"--node {arguments.node}: no such node; the run {run.name} has {_some(names)}")
    chosen = names if arguments.node is None else [arguments.node]
    logs: dict[Path, Log] = {}
    unread: dict[Path, RunFolderError] = {}
    end, printed = _End(run), False
    over = not arguments.follow
    while True:
        # Before the logs are read, so that nothing written until the end is missed.
        over = over or end.is_here()
        files = _files(run, plan, chosen, arguments)
        for source, path in files:
            if path in unread:
                continue
            try:
                if path not in logs:
                    logs[path] = Log(path, _begin(path, arguments.tail))
                printed |= _print(f"{source}: " if len(chosen) > 1 else "", logs[path], over, arguments)
            except RunFolderError as error:
                unread[path] = error
        sys.stdout.flush()
        if unread and (over or len(unread) == len(files)):
            raise LaunchError("; ".join(map(str, _first(list(unread.values())))))
        if over:
            if not printed and arguments.tail != 0:
                print(f"{run.name}: {_nothing(arguments)}", file=sys.stderr)
            return 0
        time.sleep(LINE_S)


def parser() -> Parser:
    made = Parser(prog="tdpp logs", description="Print the output of a run's nodes.")
    add_run(made)
    made.add_argument("--node", help="only this node, such as local-0")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--err", action="store_true", help="show stderr instead of stdout")
    which.add_argument("--gpu", action="store_true", help="show the GPU readings (docs/gpus.md)")
    which.add_argument("--agent", action="store_true", help="show the node agent's and the job script's output")
    made.add_argument(
        "--tail", type=_count, metavar="N", help="only the last N lines of each file, and what is added later"
    )
    made.add_argument(
        "--format",
        type=Format,
        choices=[*Format],
        default=Format.short,
        help=f"lines of iterations in {WIDTH} columns (short, the default), or as the files have them (megatron)",
    )
    made.add_argument(
        "--raw", action="store_true", help="do not escape control characters, including terminal escape sequences"
    )
    made.add_argument("-f", "--follow", action="store_true", help="keep printing until the run has ended")
    return made


def _first(errors: Sequence[RunFolderError]) -> list[object]:
    """Some of them, and how many more there are."""
    more = len(errors) - _FAULTS
    return [*errors[:_FAULTS], *([f"{plural(more, 'other file')} could not be read either"] if more > 0 else [])]


def _files(run: RunDir, plan: Plan, chosen: Sequence[str], which: argparse.Namespace) -> list[tuple[str, Path]]:
    """What is to be printed, with whose it is."""
    if which.agent:
        found = agent_logs(run, plan, read_submitted(run, len(plan.nodes)))
        sources = found if which.node is None else chosen
        return [(source, path) for source in sources for path in found.get(source, [])]
    path_of = run.node_err if which.err else run.node_gpu if which.gpu else run.node_out
    return [(name, path_of(name)) for name in chosen]


def _print(source: str, log: Log, over: bool, how: argparse.Namespace) -> bool:
    """What is new, with whose it is before each line; once the run is over also a last line that has no end. Returns
    whether there was anything."""

    def shown(line: str) -> str:
        text = line if how.format is Format.megatron else for_people(line, WIDTH - len(source))
        return f"{source}{text if how.raw else visible(text)}"

    printed = False
    while lines := log.new_lines():
        print("\n".join(map(shown, lines)))
        printed = True
    if over and (rest := log.rest()):
        print(shown(rest))
        printed = True
    return printed


def _nothing(which: argparse.Namespace) -> str:
    """What it means that there was nothing to print."""
    who = "the nodes" if which.node is None else f"node {which.node}"
    if which.err:
        return f"{who} wrote nothing to stderr: no errors, no warnings"
    if which.gpu:
        return f"no GPU readings of {who}: no GPU could be read there (docs/gpus.md)"
    if which.agent:
        return f"the agent and the job script of {who} wrote nothing"
    return f"{who} wrote nothing to stdout; '--err' shows stderr, '--agent' what the node agents wrote"


def _begin(path: Path, tail: int | None) -> int:
    """Where in a file to begin, in bytes; raises RunFolderError for one of which nobody can want the whole."""
    if tail is not None:
        return tail_begin(path, tail)
    with suppress(FileNotFoundError), opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _MOST_BYTES:
            raise RunFolderError(f"{path} has {size} bytes; print its end with --tail N")
    return 0


def tail_begin(path: Path, lines: int) -> int:
    """Where the last lines of a file begin, in bytes; 0 in one that is not there yet. It is looked at no further back
    than lines of a sensible length reach. Raises RunFolderError: it is not a regular file, or cannot be read."""
    with suppress(FileNotFoundError), opened(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - max(_TAIL_BYTES, lines * _LINE_BYTES)))
        lengths = deque(map(len, file), maxlen=min(lines, sys.maxsize))
        return file.tell() - sum(lengths)
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
        look = read_run_files(self._run)
        if not look.asks and not look.unrecorded:
            return look.settled or finish_observation(look, {}).over
        if now < self._next_ask:
            return False
        self._next_ask = now + SLURM_S
        answers = answers_to([look])
        if not isinstance(answers, LaunchError):
            return finish_observation(look, answers).over
        if not self._told:  # the log goes on, whether or not Slurm answers
            print(f"tdpp: cannot tell whether {self._run.name} has ended: {answers}", file=sys.stderr, flush=True)
        self._told = True
        return False


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines; give one, such as --tail 20")
    return int(text)


def _some(names: Sequence[str]) -> str:
    return f"the nodes {some(names, _NAMED)}"
