"""Real runs whose workers are `stand_in_worker`, and their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.submit import submit
from launch.machine import processes
from tests.support import PATIENCE_S, ROOT

WORKER = "tests.support.launch.stand_in_worker"
FOREVER = ("train.iterations=100000",)
TWO_NODES = ("cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=2")


def no_data_needed(_experiment: object) -> tuple[str, ...]:
    """In place of data_prep's check: the stand-in reads none."""
    return ()


def start(runs: Path, *overrides: str) -> RunDir:
    """A run of four ranks, a line for every iteration, that has been submitted and nothing more."""
    settings = [f"runs_dir={runs}", "train.log_interval=1", "train.iterations=6", *overrides]
    return submit(compose(settings), settings, WORKER)


TDPP = [sys.executable, "-m", "tests.support.launch.tdpp_stand_in"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def tdpp(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """`tdpp` in a session of its own, which a closed terminal ends even where the tests run under nohup."""
    return subprocess.Popen(
        [*TDPP, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def done(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`tdpp`, to its end."""
    process = tdpp(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Looks for a quarter of the time at most: judging a run on hosts starts processes, and the run needs the cores."""
    until = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if condition():
            return
        assert time.monotonic() < until, "waited in vain"
        time.sleep(max(0.05, 3 * (time.monotonic() - begun)))


def wait_until_running(run: RunDir) -> None:
    """Until every rank of every node is there and an iteration is logged."""
    count = len(run.read_json(run.plan)["ranks"])
    wait_for(lambda: len(ranks(run)) == count and run.metrics.exists())


def token(run: RunDir) -> str:
    return run.read_json(run.jobs)["token"]


def controller(run: RunDir) -> int:
    return run.read_json(run.jobs)["jobs"][0]["pid"]


def agents(run: RunDir) -> list[int]:
    """Processes that submitit has started as tasks, also before they have told anything."""
    return sorted(pid for pid in processes.find(token(run)) if b"launch.start_agent" in command(pid))


def workers(run: RunDir, module: str = WORKER) -> list[int]:
    """Not the ranks, which are forks with the same command line."""
    found = {pid for pid in processes.find(token(run)) if module.encode() in command(pid)}
    return sorted(pid for pid in found if parent(pid) not in found)


def ranks(run: RunDir) -> dict[int, int]:
    """Process ids by rank."""
    told = [entry for path in run.nodes.glob("*.ranks.json") for entry in run.read_json(path)]
    return {entry["rank"]: entry["pid"] for entry in told}


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
