"""`tdpp stop`: ends a run and makes sure that nothing of it is left."""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Sequence

from conf.rundir import RunDir
from launch import processes
from launch.agent import GRACE_S
from launch.arguments import add_run, chosen_run
from launch.observe import observe
from launch.provenance import user_name
from launch.verdict import decide

SUBMISSION_S = 3.0
"""A submission that was under way when the run was stopped has shown its processes by then."""


def stop(run: RunDir) -> int:
    """Ends every process of a run; returns how many were found. Takes at most some 15 s.

    The agents end their workers in order, and record it; what does not end that way is killed. An agent that has
    not started yet finds the request when it does.

    Raises:
        LaunchError: a process cannot be killed.
    """
    run.write_json(run.stop_request, {"unix": time.time(), "user": user_name(), "host": socket.gethostname()})
    jobs = run.read_json(run.jobs)
    token = jobs["token"]
    found = _find(token, SUBMISSION_S if not jobs["jobs"] else 0.0)
    agents = {node.pid for node in observe(run).nodes if node.pid and not node.ended}
    processes.send(agents & found, signal.SIGTERM)
    processes.wait_until_gone(token, GRACE_S + 2)
    processes.terminate(token, 1.0)
    return len(found)


def _find(token: str, patience_s: float) -> set[int]:
    until = time.monotonic() + patience_s
    while not (found := processes.find(token)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tdpp stop", description="End a run, and everything that belongs to it.")
    add_run(parser)
    run = chosen_run(parser.parse_args(argv))
    seen = observe(run)
    if seen.over and not processes.find(run.read_json(run.jobs)["token"]):
        print(f"{run.name} has ended already: {decide(seen).state}; nothing to stop")
        return 0
    count = stop(run)
    verdict = decide(observe(run))
    print(f"{run.name}: {verdict.state}, {verdict.reason}; {count} processes ended")
    return 0
