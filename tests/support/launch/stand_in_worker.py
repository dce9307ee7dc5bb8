"""A worker that trains nothing, in place of megatron_ext.worker: same files, exit codes and signals (docs/formats.md).

What it does is told by the environment, which tests give as `+cluster.environment.<NAME>=…`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ITERATION_S = float(os.environ.get("ITERATION_S", "0.02"))
FAIL_RANK = int(os.environ.get("FAIL_RANK", "-1"))
"""This rank raises an error in iteration 2; the others then tell of a symptom."""
SYMPTOM = "SYMPTOM" in os.environ
"""That error only says that another rank is lost."""
NAN = "NAN" in os.environ
LAST = int(os.environ.get("LAST", "1000000"))
"""No iteration after this one, although the exit code is 0."""
STRAY = "STRAY" in os.environ
"""Leaves a process behind that has left the process group."""
SAVED = 75
asked: list[int] = []
"""Signals that asked this rank to save and end."""
SHOW = "SHOW" in os.environ
"""Prints its environment."""
PRINTS_MB = int(os.environ.get("PRINTS_MB", "0"))
"""Writes so much to both outputs before the first iteration."""
FAIL_START = os.environ.get("FAIL_START")
"""The worker of this node rank fails at once."""
HANG_RANK = int(os.environ.get("HANG_RANK", "-1"))
"""This rank goes no further after iteration 2."""
LOUD = "<script>alert('loud')</script>\x1b[2J"
DEAF = "DEAF" in os.environ
"""Does not end when it is asked to."""

AGENT = os.environ.get("TDPP_AGENT")
"""The process that says what SIGTERM means, as long as it lives."""


def main(plan_path: Path, node_rank: int) -> int:
    run = plan_path.parent.parent if plan_path.parent.name == "plans" else plan_path.parent
    plan = json.loads(plan_path.read_text())
    node = plan["nodes"][node_rank]
    die_with_parent(signal.SIGTERM)
    ranks: dict[int, int] = {}
    signal.signal(signal.SIGUSR2, lambda *_: ask_to_save(ranks))
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if DEAF else lambda *_: left_to_agent(parent) or sys.exit(143))
    signal.signal(signal.SIGINT, signal.SIG_IGN if DEAF else lambda *_: sys.exit(143))
    if SHOW:
        print("\n".join(f"{name}={value}" for name, value in os.environ.items()), flush=True)
    for _ in range(PRINTS_MB):
        print(LOUD * (1_000_000 // len(LOUD)), flush=True)
        print(LOUD * (1_000_000 // len(LOUD)), file=sys.stderr, flush=True)
    if str(node_rank) == FAIL_START:
        print("no such device", file=sys.stderr)
        return 1
    if STRAY:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    for rank in node["ranks"]:
        pid = os.fork()
        if pid == 0:
            saves = plan["train"]["checkpoint"]
            signal.signal(signal.SIGUSR2, (lambda signum, _: asked.append(signum)) if saves else signal.SIG_IGN)
            die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN if AGENT else signal.SIG_DFL)
            os._exit(train(run, plan_path, plan, plan["ranks"][rank]))
        ranks[pid] = rank
    state = {rank: {"rank": rank, "pid": pid, "exit_code": None, "ended_unix": None} for pid, rank in ranks.items()}
    path = run / "nodes" / f"{node['name']}.ranks.json"
    failed = saved = False
    write(path, list(state.values()))
    while ranks and not failed:
        pid, status = os.wait()
        if pid not in ranks:  # a child from before the exec, which pyxis leaves behind
            continue
        code = os.waitstatus_to_exitcode(status)
        rank = ranks.pop(pid)
        state[rank] |= {"exit_code": code, "ended_unix": time.time()}
        write(path, list(state.values()))
        if code < 0:
            message = f"killed by {signal.Signals(-code).name}"
            error(run, plan, plan["ranks"][rank], "Killed", message, symptom=False)
        failed, saved = failed or code not in (0, SAVED), saved or code == SAVED
    for pid in ranks:
        os.kill(pid, signal.SIGKILL if AGENT else signal.SIGTERM)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as in the engine's worker
    return 1 if failed else SAVED if saved else 0


def left_to_agent(parent: int) -> bool:
    return AGENT is not None and os.getppid() == parent and Path("/proc", AGENT).exists()


def ask_to_save(ranks: dict[int, int]) -> None:
    for pid in ranks:
        with suppress(ProcessLookupError):  # it has just been waited for
            os.kill(pid, signal.SIGUSR2)


def train(run: Path, plan_path: Path, plan: dict, place: dict) -> int:
    rank, train = place["rank"], plan["train"]
    interval = train["log_interval"]
    latest = run / "checkpoints" / "latest"
    begun = saved(latest)
    together = Together(run, rank, len(plan["ranks"]))
    last_rank = rank == len(plan["ranks"]) - 1
    for iteration in range(begun + 1, min(train["iterations"], LAST) + 1):
        if asked:
            together.save_after(iteration)
        together.begun(iteration)
        time.sleep(ITERATION_S)
        if rank == FAIL_RANK and iteration == 2:
            print(f"[rank {rank}] error: out of luck", file=sys.stderr)  # first: the others' end may be this one's
            error(run, plan, place, "RuntimeError", "out of luck\nin detail", symptom=SYMPTOM)
            time.sleep(0.3)  # until the others have noticed
            return 1
        while rank == HANG_RANK and iteration > 2:
            time.sleep(1)
        while not together.all_begun(iteration):
            if FAIL_RANK >= 0 and (run / "errors" / f"rank-{FAIL_RANK:05d}.json").exists():
                error(run, plan, place, "PeerLost", "a rank is gone", symptom=True)
                return 1
            time.sleep(0.002)
        if last_rank and (iteration % interval == 0 or iteration == train["iterations"]):
            log(run, plan, iteration, interval)
        if iteration == together.last():
            if last_rank:
                save(plan_path, iteration)
            while saved(latest) < iteration:  # as in training: none ends before all is written
                time.sleep(0.01)
            return SAVED
    return 0


def saved(latest: Path) -> int:
    """The iteration of the latest checkpoint, 0 without one."""
    return int(latest.read_text().split("_")[1]) if latest.exists() else 0


def save(plan_path: Path, iteration: int) -> None:
    """Imports late what most runs of tests do without: starts are to be quick."""
    from megatron_ext.contract.plan import Plan
    from tests.support.launch import stand_in_checkpoint

    stand_in_checkpoint.save(Plan.read(plan_path), iteration)


class Together:
    """Keeps the ranks of a start in step, as messages do in training: none ends an iteration before all others have
    ended the one before, and all save after the same one. One file holds two numbers for each rank.
    """

    def __init__(self, run: Path, rank: int, ranks: int) -> None:
        self._file = os.open(run / "events" / f".together-{os.environ['TDPP_START']}", os.O_RDWR | os.O_CREAT)
        self._rank, self._ranks = rank, ranks

    def begun(self, iteration: int) -> None:
        """This rank is about to do an iteration; they count from 1."""
        self._tell(0, iteration)

    def all_begun(self, iteration: int) -> bool:
        return all(begun >= iteration for begun, _ in self._told())

    def save_after(self, iteration: int) -> None:
        """Asks all to save after an iteration that none of them has ended, unless one was chosen already."""
        if self.last() is None:
            self._tell(1, iteration)

    def last(self) -> int | None:
        """The iteration after which all save."""
        return min((last for _, last in self._told() if last), default=None)

    def _tell(self, which: int, value: int) -> None:
        os.pwrite(self._file, struct.pack("q", value), 16 * self._rank + 8 * which)

    def _told(self) -> list[tuple[int, int]]:
        told = os.pread(self._file, 16 * self._ranks, 0)
        return list(struct.iter_unpack("qq", told.ljust(16 * self._ranks, b"\0")))


def log(run: Path, plan: dict, iteration: int, interval: int) -> None:
    loss = float("nan") if NAN else 5.0 - iteration / 100
    total = plan["train"]["iterations"]
    print(f" iteration {iteration:8d}/{total:8d} | lm loss: {loss:.6E} |", flush=True)
    line = {"iteration": iteration, "unix": time.time(), "elapsed_ms": ITERATION_S * 1e3, "loss": loss, "nan": 0}
    line["consumed_samples"] = iteration * plan["global_batch_size"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def error(run: Path, plan: dict, place: dict, kind: str, message: str, symptom: bool) -> None:
    told = {key: place[key] for key in ("rank", "stage", "dp", "tp")}
    node = plan["nodes"][place["node"]]["name"]
    told["start"] = os.environ["TDPP_START"]
    content = told | {"node": node, "unix": time.time(), "type": kind, "message": message, "symptom": symptom}
    write(run / "errors" / f"rank-{place['rank']:05d}.json", content | {"traceback": ""})


def write(path: Path, content: object) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def die_with_parent(signum: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
