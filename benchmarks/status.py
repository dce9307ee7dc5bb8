"""What `tdpp status` costs on a run of 128 nodes with long logs: python -m benchmarks.status [--results FILE]

Makes two run folders of 128 nodes and 512 ranks that are at work: in one a single node has an .out and an .err of
100 MB each, in the other all nodes share as much. The baseline is what one does by hand, with grep, sort and tail over
the same files. CPU time is that of a fresh process and its children, beginning with the interpreter's own start; before
the first look the kernel is asked to forget the files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.node.worker_command import job_info

NODES = 128
LOG_BYTES = 100_000_000
BLOCK_BYTES = 1_000_000
ITERATIONS = 100_000
ROUNDS = 5
AIM_CPU_S = 0.5
PLAN = (
    "cluster=a100x1_a10x7",
    "model=xl",
    f"cluster.groups.gpu2.count={NODES - 1}",
    f"parallel.node_order=hgx+gpu2*{NODES - 1}",
    "parallel.tensor=4",
    "parallel.data=16",
    "parallel.pipeline=8",
    "parallel.partition=0-11-8-8-8-8-5-0",
    "parallel.global_batch_size=64",
    "parallel.micro_batch_size=1",
    f"train.iterations={2 * ITERATIONS}",
    "train.log_interval=1",
)
BY_HAND = (
    "grep -ahE ' iteration +[0-9]+/' nodes/*.out | tail -n 1; "
    "grep -ahv Warning nodes/*.err | sort | uniq -c | sort -rn | head -n 5; tail -qn 1 nodes/*.gpu; cat nodes/*.json"
)
OUT = ("[2026-11-21 10:20:30,{0:06d}] [INFO] rank {0} loaded shard {0} of the data set from the cache\n",)
ERR = (
    "/opt/lib/torch/utils/checkpoint.py:{0}: UserWarning: use_reentrant should be given explicitly\n",
    "NCCL INFO comm 0x{0:x} rank {0} nranks 512 cudaDev 0 busId 1{0:d} - Init COMPLETE\n",
    "[W1121 07:00:00.{0} socket.cpp:1] [c10d] The client socket cannot be initialized\n",
    "slow data: rank {0} waited {0} ms for sample {0}\n",
)


def make_run(path: Path, alone: bool) -> RunDir:
    """A run at work on hosts elsewhere. `alone` puts the long logs on one node."""
    run = RunDir(path)
    for folder in (run.nodes, run.errors):
        folder.mkdir(parents=True)
    plan = make_plan(compose(PLAN), "xl/long")
    run.config.touch()
    run.write_json(run.plan, plan.as_json())
    run.write_json(run.provenance, {"host": "elsewhere"})
    run.write_json(run.jobs, {"token": "t", "executor": "local", "submission": 0, "jobs": []})
    for rank, node in enumerate(plan.nodes):
        size = LOG_BYTES // NODES if not alone else LOG_BYTES if rank == NODES - 1 else 1000
        write_lines(run.node_out(node.name), size, OUT, job_info(plan, "xl", rank))
        write_lines(run.node_err(node.name), size, ERR)
    now = time.time()  # the logs above take a slow disk longer than a node or a run may be silent
    for rank, node in enumerate(plan.nodes):
        name = node.name
        state = {"node": name, "node_rank": rank, "start": "0.0", "job": None, "host": name, "pid": 1}
        state |= {"started_unix": now - ITERATIONS, "state": "running", "beat_unix": now, "ended_unix": None}
        state |= {"exit_code": None, "stopped": None, "reason": None, "doing": None, "out_begin": 0, "err_begin": 0}
        run.write_json(run.node_state(name), state)
        ranks = [{"rank": number, "pid": 1, "exit_code": None, "ended_unix": None} for number in node.ranks]
        run.write_json(run.node_ranks(name), ranks)
        run.node_gpu(name).write_text("")
    with run.metrics.open("w") as file:
        for iteration in range(1, ITERATIONS + 1):
            values = {"iteration": iteration, "unix": now - ITERATIONS + iteration, "elapsed_ms": 1000.0}
            file.write(json.dumps(values | {"loss": 4.0, "nan": 0, "grad_norm": 1.0, "tokens_per_s": 65536.0}) + "\n")
    return run


def write_lines(path: Path, size: int, templates: Sequence[str], head: str = "") -> None:
    """Lines of `size` bytes together after a head. A megabyte of them differs in its numbers, and comes again."""
    lines, written = [], 0
    for number, template in enumerate(cycle(templates)):
        if written >= min(size, BLOCK_BYTES):
            break
        lines.append(template.format(number))
        written += len(lines[-1])
    with path.open("w") as file:
        file.write(head)
        for _ in range(max(1, size // BLOCK_BYTES)):
            file.writelines(lines)


def forget(run: RunDir) -> None:
    """Has the kernel drop what it keeps of the files in memory."""
    os.sync()
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cpu_s(command: list[str], folder: Path) -> float:
    """CPU seconds of a process and its children, to its end."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": root}, check=False
    )
    assert done.returncode in (0, 1), done
    return spent() - before


def status_cpu_s(run: RunDir) -> float:
    return cpu_s([sys.executable, "-m", "launch.cli", "status", str(run.path)], run.path)


def measure(run: RunDir) -> dict[str, float]:
    """Median CPU seconds, of the first look and of those after it."""

    def first() -> float:
        forget(run)
        return status_cpu_s(run)

    def median_of(look: Callable[[], float]) -> float:
        return round(statistics.median(look() for _ in range(ROUNDS)), 3)

    return {
        "status_first": median_of(first),
        "status_again": median_of(lambda: status_cpu_s(run)),
        "by_hand": median_of(lambda: cpu_s(["sh", "-c", BY_HAND], run.path)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status", description=__doc__)
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    print(f"{NODES} nodes, CPU s (aim: {AIM_CPU_S}){'first':>14}{'again':>8}{'by hand':>9}")
    for name, alone in (("100 MB on one node", True), ("100 MB over all nodes", False)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(make_run(Path(folder) / "runs/xl/long", alone))
        first, again, by_hand = found[name].values()
        print(f"{name:42}{first:6.2f}{again:8.2f}{by_hand:9.2f}")
    if arguments.results is not None:
        machine = {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        }
        arguments.results.write_text(json.dumps({"machine": machine, "cpu_s": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
