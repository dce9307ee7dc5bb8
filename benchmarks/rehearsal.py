"""python -m benchmarks.rehearsal: the seed's run of 32 ranks, rehearsed on this machine.

Tells how long until all ranks are ready, how much memory they take together (proportional set size: shared pages
count once), and how far the time that really passed with the anchored clock is from the virtual clock's, which the
tests hold equal to `fasop.simulate`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conf.compose import compose
from conf.rundir import RunDir
from fasop.simulate import StageTimes, pipeline_time, simulate
from launch.plan import make_plan
from megatron_ext.schedule import as_json, schedule

ITERATIONS = 8
ROOT = Path(__file__).resolve().parents[1]


def proportional_mib(parent: int) -> float:
    """Memory of a process and its children."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    total = 0
    for pid in [str(parent), *children]:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def simulated_ms(plan: dict[str, Any]) -> float:
    """The pipeline part of an iteration."""
    micro_batches = plan["global_batch_size"] // (plan["data"] * plan["micro_batch_size"])
    lists = schedule(plan["schedule"], plan["pipeline"], plan["chunks"], micro_batches)
    firsts = [plan["rehearsal"]["ranks"][stage * plan["data"]] for stage in range(plan["pipeline"])]
    times = [
        StageTimes(
            forward=own["forward_ns"],
            backward=own["backward_ns"],
            send_forward=own["send_forward_ns"],
            send_backward=own["send_backward_ns"],
        )
        for own in firsts
    ]
    return pipeline_time(simulate(as_json(lists, plan["chunks"], micro_batches), times)) / 1e6


def rehearse(clock: str) -> tuple[dict[str, Any], float, float, list[float]]:
    """(plan, seconds until ready, MiB, milliseconds per iteration but the first)."""
    given = ["experiment=seed_a10x8", "executor=local", "container=none", f"executor.rehearse={clock}"]
    experiment = compose([*given, f"train.iterations={ITERATIONS}", "train.log_interval=1"])
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for part in (run.nodes, run.events, run.errors):
            part.mkdir()
        plan = make_plan(experiment, "benchmark")
        run.write_json(run.plan, plan)
        command = [sys.executable, "-u", "-m", "megatron_ext.worker", str(run.plan), "0"]
        start = time.monotonic()
        worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        ready = mib = 0.0
        for line in worker.stdout:
            if line.startswith("REHEARSAL"):
                ready = time.monotonic() - start
                mib = proportional_mib(worker.pid)
        if worker.wait():
            raise SystemExit("the rehearsal failed")
        log = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        return plan, ready, mib, [line["elapsed_ms"] for line in log[1:]]


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    plan, ready, mib, virtual = rehearse("virtual")
    print(f"{len(plan['ranks'])} ranks ready after {ready:.1f} s with {mib:,.0f} MiB")
    exact = statistics.median(virtual)
    print(f"pipeline part, simulated {simulated_ms(plan):.1f} ms; iteration, virtual clock {exact:.1f} ms")
    _, ready, _, anchored = rehearse("anchored")
    median = statistics.median(anchored)
    print(
        f"iteration, really passed {median:.1f} ms (anchored clock): {median / exact - 1:+.2%} of the virtual clock's"
    )


if __name__ == "__main__":
    main()
