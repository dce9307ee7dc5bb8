"""The console command `tdpp`: finds the command and hands over. It imports nothing before it knows which."""

from __future__ import annotations

import difflib
import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import TdppError
from conf.visible import shortened, visible

if TYPE_CHECKING:
    from conf.run_folder.rundir import RunDir
    from conf.schema.experiment import Experiment
    from fasop.search.prices import Run
    from fasop.search.search import Plan
    from fasop.tables.accuracy import Measured

INTERRUPTED = 130
NO_READER = 141
WRONG_USAGE = 2
OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS)
"""What is wrong with a path that a user gave, wherever it is noticed."""

COMMANDS = {
    "launch": ("launch.commands.launch", "start an experiment, or with -m a sweep of them"),
    "doctor": ("launch.commands.doctor", "check the machines of an experiment before it is launched"),
    "status": ("launch.commands.status", "judge a run: the verdict, then the evidence"),
    "logs": ("launch.commands.logs", "print what the nodes of a run wrote"),
    "stop": ("launch.commands.stop", "end a run, and everything that belongs to it"),
    "runs": ("launch.commands.runs", "list the runs with their verdicts"),
    "clean": (
        "launch.commands.clean",
        "remove what runs have left behind: unfinished launches, images, containers, locks",
    ),
    "search": ("fasop.cli", "find the best plan for a cluster and a model"),
    "profile": ("launch.commands.profile", "measure what models and messages take on a cluster's GPUs"),
    "report": ("reports.cli", "show runs as a page"),
    "data": ("data_prep.cli", "turn text into indexed data, and inspect it"),
    "completion": ("launch.commands.completion", "let a shell complete commands, groups, keys, values and runs"),
}
"""By name: the module with the command's `main`, and what the command does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tdpp <argv>`; returns its exit code (docs/exit-codes.md)."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what no encoding has
    os.umask(os.umask(0o022) | 0o022)  # what others could write to, they could have a job of ours run
    try:
        try:
            code = _run(argv)
        finally:
            sys.stdout.flush()  # here, where a device without room can be reported; also after argparse's --help
    except TdppError as error:
        print(visible(f"tdpp: error: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough; the rest of stdout goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:
        from conf.run_folder.rundir import is_full

        if error.errno in OF_PATHS and error.filename is not None:
            print(visible(shortened(f"tdpp: error: {error.filename}: {error.strerror}")), file=sys.stderr)
            return 1
        if not is_full(error):
            raise
        where = error.filename or "what the output goes to"
        print(f"tdpp: error: {where}: {error.strerror}; free some space there", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"tdpp {_version()}")
        return 0
    verb, *rest = argv
    if verb not in COMMANDS:
        print(_unknown(verb), file=sys.stderr)
        return WRONG_USAGE
    module = import_module(COMMANDS[verb][0])
    if verb in ("launch", "doctor"):
        return int(module.main(rest, preflight=preflight))
    if verb == "search":
        from launch.screen.table import print_table

        return int(module.main(rest, show=print_table, measure=_measure, draw=_draw_search))
    if verb == "completion":
        from fasop.search.arguments import WORDS as OF_SEARCH
        from launch.profile.arguments import WORDS as OF_PROFILE

        own = {"search": [*OF_SEARCH, "runs_dir"], "profile": [*OF_PROFILE], "launch": ["resume"]}
        return int(module.main(rest, commands=list(COMMANDS), own=own))
    if verb == "report":
        from launch.judge.findings import all_findings

        return int(module.main(rest, judge=all_findings))
    if verb == "data":
        return int(module.main(rest, draw=_draw_figures))
    return int(module.main(rest))


def _draw_figures(title: str, facts: Mapping[str, str], figures: Sequence[Mapping[str, Any]]) -> str:
    from reports.pages.figures_page import figures_page

    return figures_page(title, facts, figures)


def preflight(experiment: Experiment) -> list[str]:
    """Checks here what else would fail only on the ranks, when the nodes have been waited for; returns what is odd.

    Raises:
        TdppError: the data, `train.load` or `parallel.schedule_file` do not fit the experiment.
    """
    from data_prep.check import check_for_training
    from launch.errors import LaunchError
    from megatron_ext.checkpoints import meta
    from megatron_ext.contract import schedule_check
    from megatron_ext.contract.errors import EngineError

    doubts = check_for_training(experiment)
    model, parallel, train = experiment.model, experiment.parallel, experiment.train
    if train.load is not None:
        sizes = {key: getattr(model, key) for key in meta.MODEL}
        try:
            meta.to_load(Path(train.load), sizes, train.iterations)
        except EngineError as error:
            raise LaunchError(str(error)) from error
    if parallel.schedule_file is not None:
        path = Path(parallel.schedule_file)
        try:
            schedule_check.read(path, parallel.pipeline, parallel.chunks, parallel.micro_batches)
        except EngineError as error:
            raise LaunchError(
                f"parallel.schedule_file={error}; 'python -m megatron_ext.schedule' prints those that have a name"
            ) from error
    return doubts


def _measure(run: RunDir) -> Measured:
    from reports.facts.measured import measure  # only few searches compare with runs, and it is slow to import

    return measure(run)


def _draw_search(command: str, plans: Sequence[Plan], run: Run, searched: Sequence[str]) -> str:
    from reports.pages.search_page import render  # likewise: few ask for a page

    return render(command, plans, run, searched)


def usage() -> str:
    """The commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: tdpp COMMAND ...", "", *lines, "", "tdpp COMMAND --help tells more; tdpp --version."])


def _unknown(verb: str) -> str:
    near = difflib.get_close_matches(verb, COMMANDS, cutoff=0.65)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the commands are: {', '.join(COMMANDS)}"
    return f"tdpp: error: unknown command {verb!r}; {hint}"


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tdpp")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its source tree)"


if __name__ == "__main__":
    sys.exit(main())
