"""`tdpp stop`: asks which run is meant, and ends it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from conf.errors import RunFolderError
from conf.reading.parser import Parser
from conf.run_folder.rundir import RunDir
from conf.visible import plural, visible
from launch.commands.run_arguments import add_run, chosen_run
from launch.control.notify import notify_end_if_possible
from launch.control.stop import SAVE_S, is_at_work, is_over, save_first, stop
from launch.errors import LaunchError
from launch.files.locks import is_launching, launcher, name_of, owner_of
from launch.judge.state import State, next_step, print_next, word_for
from launch.judge.verdict import decide, verdict_on
from launch.observe.look import observe
from launch.screen import agreed, can_be_asked
from megatron_ext.contract.worker import SAVED


def confirm(run: RunDir) -> None:
    """Asks whether the latest run is meant, which nobody has named. Raises LaunchError: it is not, or nobody is there
    to answer."""
    if not can_be_asked():
        raise LaunchError(f"without RUN this would stop the latest run, {run.name}; name it, or add --yes")
    if not agreed(f"the latest run is {run.name} ({verdict_on(run).state}); stop it?"):
        raise LaunchError(f"not confirmed; {run.name} keeps running")


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
        notify_end_if_possible(run)
        verdict = verdict_on(run)
        print(visible(f"{run.name} has already ended: {verdict.state}, {verdict.reason}; nothing to stop"))
        if RunDir.is_one(run.path):
            print_next(next_step(verdict.state, word_for(run)))
        return 0
    if arguments.run is None and not arguments.yes:
        confirm(run)
    if _saves(run, arguments.save):
        print(f"saving first, for at most {SAVE_S:.0f} s; Ctrl-C ends the run without it", file=sys.stderr, flush=True)
        print(visible(_saved_first(run)), end="", file=sys.stderr, flush=True)
    ended = stop(run)
    notify_end_if_possible(run)
    verdict = verdict_on(run)
    print(visible(f"{run.name}: {verdict.state}, {verdict.reason}; {ended}"))
    if not is_over(run):
        raise LaunchError(f"{run.name} was asked to stop, but has not ended yet; {_who_ends_it(run)}")
    if RunDir.is_one(run.path):  # one that never had a plan cannot be resumed, and no command can say more of it
        print_next(_next_step(run, verdict.state))
    return 0


def _next_step(run: RunDir, state: State) -> str:
    saved = observe(run).saved
    if saved is None or state is State.succeeded:
        return next_step(State.succeeded, word_for(run))
    owner, word = owner_of(run), word_for(run)
    as_owner = ""
    if owner != os.geteuid():  # root has stopped it, and may not resume it
        as_owner, word = f"runuser -u {shlex.quote(name_of(owner))} -- ", str(run.path)
    return f"{as_owner}tdpp launch resume={shlex.quote(word)}  # continues after iteration {saved}"


def _saved_first(run: RunDir) -> str:
    """Has the run save and end; where that gave nothing, a line that says why."""
    try:
        if not save_first(run):
            return f"no checkpoint was saved within {SAVE_S:.0f} s; ending the run\n"
        seen = observe(run)
    except KeyboardInterrupt:
        return "interrupted: ending the run without saving\n"
    except RunFolderError:  # it is ended, whatever its files hold
        return ""
    failed = [node for node in seen.nodes if node.exit_code not in (0, SAVED)]
    if not failed:
        lost = (seen.log[-1].iteration if seen.log else 0) - (seen.kept or seen.saved or 0)
        where = run.node_err(seen.nodes[0].name)
        return (
            f"the checkpoint could not be written: {plural(lost, 'iteration')} lost; see {where}\n" if lost > 0 else ""
        )
    how = "its agent is gone" if failed[0].exit_code is None else f"it exited with {failed[0].exit_code}"
    return f"node {failed[0].name} ended before it had saved: {how}; see {run.node_err(failed[0].name)}\n"


def _saves(run: RunDir, asked: bool | None) -> bool:
    """Whether to save first: if nobody says, where iterations would be lost. Raises LaunchError: it is asked for, but
    the run saves nothing."""
    if asked is False:
        return False
    try:
        seen = observe(run)
    except RunFolderError:  # it is ended, whatever its files hold
        return False
    if not seen.plan.resumable:
        if asked:
            raise LaunchError(
                f"--save: {run.name} saves no checkpoints (train.checkpoint=false, or a rehearsal); leave --save out"
            )
        return False
    lost = bool(seen.log) and seen.log[-1].iteration > (seen.saved or 0)
    return bool(asked) or (lost and decide(seen).state is State.running)


def parser() -> Parser:
    made = Parser(prog="tdpp stop", description="End a run and everything that belongs to it.")
    add_run(made)
    made.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        help="save a checkpoint first (default: if iterations would be lost); --no-save ends the run at once",
    )
    made.add_argument("--yes", action="store_true", help="without RUN: end the latest run without asking")
    return made


def _who_ends_it(run: RunDir) -> str:
    if is_launching(run):
        return f"it is still being launched by {launcher(run)}"
    return "'tdpp status' shows what is left of it; stop it again on the machine that it runs on"
