"""python -m benchmarks.rehearsal: the seed's run of 32 ranks, rehearsed on this machine.

Tells how long until the rehearsal is ready: from `tdpp launch`, as typed, until the moment at which all ranks begin
their first iteration; how much memory they then take together (proportional set size: shared pages count once); and
how far the time that really passed with the anchored clock is from the virtual clock's, which the tests hold equal to
`fasop.simulation.ranks.replay`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.run_folder.rundir import RunDir
from fasop.simulation.ranks.replay import StageTimes, simulate
from megatron_ext.contract.schedule.iteration import as_json, schedule
from reports.readers.events import read_rank

ITERATIONS = 8
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal took."""

    plan: dict[str, Any]
    phases_s: dict[str, float]
    """In the order in which they pass; ready after their sum."""
    mib: float
    """0 with the virtual clock: its ranks may have ended before their memory could be read."""
    iterations_ms: list[float]
    """All but the first."""

    @property
    def ready_s(self) -> float:
        return sum(self.phases_s.values())


def rehearse(clock: str) -> Rehearsal:
    """Launches the rehearsal and waits for its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launch.cli", "launch", "experiment=seed_a10x8", "executor=local"]
        command += [
            "container=none",
            f"executor.rehearse={clock}",
            "executor.wait=true",
            f"runs_dir={folder}",
        ]
        command += [f"train.iterations={ITERATIONS}", "train.log_interval=1"]
        typed = time.time()
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        mib = 0.0
        told = []
        assert launcher.stderr is not None
        for line in launcher.stderr:
            told.append(line)
            if clock == "anchored" and line.startswith(" iteration") and not mib:
                mib = _memory_mib(RunDir.find(Path(folder), None))
        if launcher.wait():
            raise SystemExit(f"the rehearsal failed:\n{''.join(told)}")
        run = RunDir.find(Path(folder), None)
        log = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        return Rehearsal(
            plan=run.read_json(run.plan),
            phases_s=_phases(run, typed),
            mib=mib,
            iterations_ms=[line["elapsed_ms"] for line in log[1:]],
        )


def _phases(run: RunDir, typed_unix: float) -> dict[str, float]:
    """Seconds from one moment to the next, as the run's files tell."""
    plan = run.read_json(run.plan)
    ranks = [read_rank(run.rank_events(place["rank"])) for place in plan["ranks"]]
    moments = {
        "launcher": run.plan.stat().st_mtime,
        "node agent": run.read_json(run.node_state(plan["nodes"][0]["name"]))["started_unix"],
        "import, fork, groups": max(rank.clock["start_ns"][0] + rank.wall_offset_ns for rank in ranks) / 1e9,
        "common start": min(rank.records["start_ns"][0] + rank.wall_offset_ns for rank in ranks) / 1e9,
    }
    begun = [typed_unix, *moments.values()]
    return {name: end - start for (name, end), start in zip(moments.items(), begun, strict=False)}


def _memory_mib(run: RunDir) -> float:
    """Memory of all ranks and of the process that forked them."""
    node = run.read_json(run.plan)["nodes"][0]["name"]
    ranks = [rank["pid"] for rank in run.read_json(run.node_ranks(node))]
    parent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    return sum(_proportional_kib(pid) for pid in [parent, *ranks]) / 1024


def _proportional_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def rehearsed_times(plan: Mapping[str, Any]) -> list[StageTimes]:
    """Nanoseconds by stage, from the plan.json of a rehearsal; of the replicas the first stands for all."""
    ranks = {rank["stage"]: rank["rank"] for rank in plan["ranks"] if rank["dp"] == rank["tp"] == 0}
    told = [plan["rehearsal"]["ranks"][ranks[stage]] for stage in range(plan["pipeline"])]
    return [
        StageTimes(
            forward=one["forward_ns"],
            backward=one["backward_ns"],
            send_forward=one["send_forward_ns"],
            send_backward=one["send_backward_ns"],
            busy_forward=one["busy_forward_ns"],
            busy_backward=one["busy_backward_ns"],
            one_way_out=one["one_way_out"],
        )
        for one in told
    ]


def simulated_ms(plan: dict[str, Any]) -> float:
    """The pipeline part of an iteration."""
    micro_batches = plan["global_batch_size"] // (plan["data"] * plan["micro_batch_size"])
    lists = schedule(plan["schedule"], plan["pipeline"], plan["chunks"], micro_batches)
    events = simulate(as_json(lists, plan["chunks"], micro_batches), rehearsed_times(plan))
    return max(event.end for event in events) / 1e6


def _tell_start(rehearsals: Sequence[Rehearsal]) -> None:
    best = min(rehearsals, key=lambda one: one.ready_s)
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in best.phases_s.items())
    others = ", ".join(f"{one.ready_s:.1f}" for one in rehearsals)
    print(f"{len(best.plan['ranks'])} ranks ready after {best.ready_s:.1f} s ({phases}); each time: {others} s")


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    virtual, anchored = [rehearse("virtual") for _ in range(3)], rehearse("anchored")
    _tell_start([*virtual, anchored])
    print(f"memory of them all {anchored.mib:,.0f} MiB")
    exact = statistics.median(virtual[0].iterations_ms)
    print(f"pipeline part, simulated {simulated_ms(virtual[0].plan):.1f} ms; iteration, virtual clock {exact:.1f} ms")
    median = statistics.median(anchored.iterations_ms)
    print(
        f"iteration, really passed {median:.1f} ms (anchored clock): {median / exact - 1:+.2%} of the virtual clock's"
    )


if __name__ == "__main__":
    main()
