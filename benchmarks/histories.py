"""python -m benchmarks.histories [--runs N]: CPU seconds in which `tdpp nodes` judges eight hosts by N runs on all of
them (10,000), where one is 10 % slow."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.history.record import HostRecord, RunRecord, as_json
from launch.judge.state import State

HOSTS = [f"gpu2-{number:03d}" for number in range(1, 9)]
SLOW = HOSTS[2]
HOUR_S = 3600.0


def record(number: int, drawn: random.Random) -> RunRecord:
    hosts, order = [], drawn.sample(HOSTS, len(HOSTS))
    for stage, host in enumerate(order):
        took = (5.0 + stage) * (1.1 if host == SLOW else 1.0) * drawn.gauss(1.0, 0.03)
        uuids = tuple(f"GPU-{host}-{gpu}" for gpu in range(4))
        work = {f"{drawn.choice('abc')}{stage}": took}
        links = {f"{stage} {order[stage + 1]}": 2.0 * drawn.gauss(1.0, 0.1)} if stage + 1 < len(order) else {}
        hosts.append(
            HostRecord(
                host=host,
                node=f"gpu2-{stage}",
                gpu="a10",
                uuids=uuids,
                driver="550.54.15",
                rank_hours=4.0,
                work=work,
                links=links,
            )
        )
    began = number * HOUR_S
    return RunRecord(
        run=f"xl/{number}", state=State.succeeded, began_unix=began, ended_unix=began + HOUR_S, hosts=tuple(hosts)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    count, drawn = parser.parse_args().runs, random.Random(0)
    with tempfile.TemporaryDirectory() as runs:
        for number in range(count):
            folder = Path(runs) / f"xl{number % 10}" / f"20260101-000000Z-{number:08x}"
            folder.mkdir(parents=True)
            (folder / "jobs.json").write_text("{}")
            (folder / "history.json").write_text(json.dumps(as_json(record(number, drawn)), indent=1))
        command = [sys.executable, "-m", "launch.cli", "nodes", "--runs-dir", runs]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(*told[len(HOSTS) + 1 :], sep="\n")
    print(
        f"{count} runs of {len(HOSTS)} hosts: {used.ru_utime + used.ru_stime:.2f} CPU s, load {os.getloadavg()[0]:.1f}"
    )
    if len(told) != len(HOSTS) + 2 or not told[-1].startswith(f"{SLOW}: slow"):
        raise SystemExit(f"{SLOW} alone should be slow")


if __name__ == "__main__":
    main()
