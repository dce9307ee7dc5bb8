"""`tdpp status`: the verdict on a run, then what it rests on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from conf.reading.parser import Parser
from conf.run_folder.rundir import RunDir
from launch.commands.run_arguments import add_run, add_watch, chosen_run, parsed
from launch.judge.findings import Findings, findings
from launch.judge.state import State
from launch.judge.status_text import as_json, as_text, judged_as_json
from launch.judge.verdict import Verdict, verdict_without_plan
from launch.observe.look import observe
from launch.screen import View, watch


def main(argv: Sequence[str]) -> int:
    arguments = parsed(parser(), argv)
    run = chosen_run(arguments)

    def look() -> View:
        verdict = verdict_without_plan(run)
        if verdict is not None:
            return _view_without_plan(run, verdict, arguments.json)
        return _view(findings(run, observe(run)), arguments.json)

    if arguments.watch is not None:
        return watch(look, arguments.watch)
    view = look()
    view.show()
    return view.exit_code


def parser() -> Parser:
    made = Parser(prog="tdpp status", description="Judge a run. The exit code says the verdict.")
    add_run(made)
    made.add_argument(
        "--json", action="store_true", help="print everything as one JSON object (with --watch, one line per change)"
    )
    add_watch(made, "until it is over")
    return made


def _view_without_plan(run: RunDir, verdict: Verdict, as_object: bool) -> View:
    text = f"{run.name}: {verdict.state}, {verdict.reason}"
    return View(
        plain=json.dumps(judged_as_json(run, verdict)) if as_object else text,
        key=verdict,
        over=verdict.state is not State.starting,
        exit_code=verdict.exit_code,
    )


def _view(found: Findings, as_object: bool) -> View:
    seen, verdict = found.seen, found.verdict
    key = (
        (verdict.state, verdict.rule, seen.log[-1:], [str(job) for job in seen.jobs]),
        [(node.state, node.alive, node.exit_code) for node in seen.nodes],
        (found.mismatches, found.stderr, found.agents, found.faults),
    )
    text = json.dumps(as_json(found)) if as_object else as_text(found)
    screen = None
    if sys.stdout.isatty() and not as_object:
        from launch.commands.status_display import status_screen

        screen = status_screen(found)
    return View(
        plain=text, key=key, over=seen.over, exit_code=verdict.exit_code, on_slurm=bool(seen.jobs), screen=screen
    )
