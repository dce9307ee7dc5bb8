"""A worker that trains nothing, in place of megatron_ext.worker: same files, exit codes and signals (docs/formats.md).

What it does is told by the environment, which tests give as `+cluster.environment.<NAME>=…`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ITERATION_S = float(os.environ.get("ITERATION_S", "0.02"))
FAIL_RANK = int(os.environ.get("FAIL_RANK", "-1"))
"""This rank raises an error in iteration 2; the others then tell of a symptom."""
NAN = "NAN" in os.environ
LAST = int(os.environ.get("LAST", "1000000"))
"""No iteration after this one, although the exit code is 0."""
STRAY = "STRAY" in os.environ
"""Leaves a process behind that has left the process group."""
DEAF = "DEAF" in os.environ
"""Does not end when it is asked to."""


def main(plan_path: Path, node_rank: int) -> int:
    run, plan = plan_path.parent, json.loads(plan_path.read_text())
    node = plan["nodes"][node_rank]
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if DEAF else lambda *_: sys.exit(143))
    if STRAY:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    ranks = {}
    for rank in node["ranks"]:
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(train(run, plan, plan["ranks"][rank]))
        ranks[pid] = rank
    state = {rank: {"rank": rank, "pid": pid, "exit_code": None, "ended_unix": None} for pid, rank in ranks.items()}
    path = run / "nodes" / f"{node['name']}.ranks.json"
    failed = False
    write(path, list(state.values()))
    while ranks and not failed:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        rank = ranks.pop(pid)
        state[rank] |= {"exit_code": code, "ended_unix": time.time()}
        write(path, list(state.values()))
        if code < 0:
            message = f"killed by {signal.Signals(-code).name}"
            error(run, plan, plan["ranks"][rank], "Killed", message, symptom=False)
        failed = failed or code != 0
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    return int(failed)


def train(run: Path, plan: dict, place: dict) -> int:
    rank, train = place["rank"], plan["train"]
    interval = train["log_interval"]
    for iteration in range(1, min(train["iterations"], LAST) + 1):
        time.sleep(ITERATION_S)
        if rank == FAIL_RANK and iteration == 2:
            error(run, plan, place, "RuntimeError", "out of luck\nin detail", symptom=False)
            print(f"[rank {rank}] error: out of luck", file=sys.stderr)
            time.sleep(0.3)  # until the others have noticed
            return 1
        if FAIL_RANK >= 0 and (run / "errors" / f"rank-{FAIL_RANK:05d}.json").exists():
            error(run, plan, place, "PeerLost", "a rank is gone", symptom=True)
            return 1
        if rank == len(plan["ranks"]) - 1 and (iteration % interval == 0 or iteration == train["iterations"]):
            log(run, plan, iteration, interval)
    return 0


def log(run: Path, plan: dict, iteration: int, interval: int) -> None:
    loss = float("nan") if NAN else 5.0 - iteration / 100
    total = plan["train"]["iterations"]
    print(f" iteration {iteration:8d}/{total:8d} | lm loss: {loss:.6E} |", flush=True)
    line = {"iteration": iteration, "unix": time.time(), "elapsed_ms": ITERATION_S * 1e3, "loss": loss, "nan": 0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def error(run: Path, plan: dict, place: dict, kind: str, message: str, symptom: bool) -> None:
    told = {key: place[key] for key in ("rank", "stage", "dp", "tp")}
    node = plan["nodes"][place["node"]]["name"]
    content = told | {"node": node, "unix": time.time(), "type": kind, "message": message, "symptom": symptom}
    write(run / "errors" / f"rank-{place['rank']:05d}.json", content | {"traceback": ""})


def write(path: Path, content: object) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def die_with_parent(signum: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
