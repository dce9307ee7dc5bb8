"""`tdpp stop`: asks which run is meant, and ends it."""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import RunFolderError
from conf.reading.values import Parser
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch.commands.of_runs.arguments import add_run, chosen_run
from launch.control.notify import tell_end_if_possible
from launch.control.stop import is_at_work, is_over, stop
from launch.errors import LaunchError
from launch.files.launch_lock import is_launching, launcher
from launch.judge.cut_off import verdict_on
from launch.screen.consent import agreed, can_be_asked


def confirm(run: RunDir) -> None:
    """Asks whether the latest run is meant, which nobody has named.

    Raises:
        LaunchError: it is not, or nobody is there to answer.
    """
    if not can_be_asked():
        raise LaunchError(f"without RUN this would stop the latest run, {run.name}; name it, or add --yes")
    if not agreed(f"the latest run is {run.name} ({verdict_on(run).state}); stop it?"):
        raise LaunchError(f"not confirmed; {run.name} goes on")


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    run = chosen_run(arguments)
    try:
        over = is_over(run)
    except RunFolderError as damage:
        if arguments.run is None or not is_at_work(run):
            raise
        print(visible(f"{run.name}: {stop(run)}; {damage}"))
        return 0
    if over:
        tell_end_if_possible(run)
        verdict = verdict_on(run)
        print(visible(f"{run.name} has already ended: {verdict.state}, {verdict.reason}; nothing to stop"))
        return 0
    if arguments.run is None and not arguments.yes:
        confirm(run)
    ended = stop(run)
    tell_end_if_possible(run)
    verdict = verdict_on(run)
    print(visible(f"{run.name}: {verdict.state}, {verdict.reason}; {ended}"))
    if not is_over(run):
        raise LaunchError(f"{run.name} was asked to stop, but has not ended yet; {_who_ends_it(run)}")
    return 0


def parser() -> Parser:
    made = Parser(prog="tdpp stop", description="End a run and everything that belongs to it.")
    add_run(made)
    made.add_argument("--yes", action="store_true", help="without RUN: end the latest run without asking")
    return made


def _who_ends_it(run: RunDir) -> str:
    if is_launching(run):
        return f"its launch goes on: {launcher(run)}"
    return "'tdpp status' shows what is left of it; stop it again on the machine that it runs on"
