"""What keeping histories, code, stacks, alarms and energy adds: python -m benchmarks.watching [--results FILE]

Every share is of CPU seconds in one process: what the functions take that are only there for this, imports that nothing
else needs included, of all the rest of the same command. For a run it is what the processes beside its ranks take in an
hour, of an hour of one core. Ranks themselves do nothing for it until one of them stands still.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.histories import record
from conf.compose import compose
from conf.run_folder.gpu_lines import GpuReading, GpuSample, Meter
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.machine.gpu_sampler import append
from launch.node.run_notices import ALARMS_S
from megatron_ext.contract.files import write_json

RUNS = 1000
ROUNDS = 5
HOUR_S = 3600.0
ADDED = {
    "failure rates for save_interval=auto": "launch.history.failures:mean_time_between_failures",
    "exclude=auto": "launch.commands.launching.excluded:with_excluded",
    "snapshot of the code": "launch.files.code_snapshot:keep_code",
}
"""What a launch does for this alone, and the function that does it."""
CODE = """
import torch
from torch import nn


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def data(split, seed):
    return [(torch.full((8,), float(number % 2)), number % 2) for number in range(64)]
"""
GPU = GpuSample(
    index=0, uuid="GPU-0", name="NVIDIA A10", utilisation=90, memory_used_mib=1, memory_total_mib=2, power_w=150,
    power_limit_w=150, temperature_c=60, processes=(), clocks=(), energy_j=1,
)  # fmt: skip


def spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    both = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def command(words: list[str]) -> None:
    """Runs a command of tdpp in this process, and prints what it took and what of that was added."""
    took = dict.fromkeys(ADDED, 0.0)
    cli, _ = importlib.import_module("launch.cli"), importlib.import_module("launch.commands.launch")
    for name, place in ADDED.items():
        module, function = place.split(":")
        before = spent()
        original: Callable[..., Any] = getattr(importlib.import_module(module), function)
        took[name] += spent() - before
        timed = _timed(original, took, name)
        for one in list(sys.modules.values()):
            if getattr(one, function, None) is original:
                setattr(one, function, timed)
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(words)
    print(json.dumps({"code": code, "all": spent(), **took}))


def _timed(function: Callable[..., Any], took: dict[str, float], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        before = spent()
        try:
            return function(*arguments, **named)
        finally:
            took[name] += spent() - before

    return timed


@contextlib.contextmanager
def folder_of_runs() -> Iterator[Path]:
    """A folder with a user's code in a git tree of 200 files, and RUNS runs that are over."""
    drawn = random.Random(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for number in range(RUNS):
            run = folder / "runs" / f"xl{number % 10}" / f"20260101-{number:06d}Z-{number:08x}"
            run.mkdir(parents=True)
            (run / "jobs.json").write_text("{}")
            (run / "history.json").write_text(json.dumps(asdict(record(number, drawn)), indent=1))
        code = folder / "code"
        for number in range(200):
            path = code / f"part{number % 10}" / f"module{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"x = {number}\n" * 200)
        (code / "model.py").write_text(CODE)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=code, check=True)
        yield folder


def launches(folder: Path) -> dict[str, float]:
    """The median share of each addition in a launch of the user's own model, without its end."""
    own = ["model=module", f"model.code={folder}/code/model.py:Model", "train.iterations=6", "executor.wait=false"]
    own += ["parallel=single", "parallel.partition=null", "parallel.micro_batch_size=1", "parallel.global_batch_size=2"]
    words = ["launch", *own, f"runs_dir={folder}/runs", "cluster.exclude=[auto]", "train.save_interval=auto"]
    shares: dict[str, list[float]] = {name: [] for name in ADDED}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}

    def told_by(*module: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *module], stdout=subprocess.PIPE, text=True, check=check, cwd=folder, env=environment
        )
        return done.stdout

    for _ in range(ROUNDS):
        told = told_by("benchmarks.watching", "--command", *words)
        told_by("launch.cli", "stop", "--yes", check=False)
        found = json.loads(told.splitlines()[-1])
        if found["code"]:
            raise SystemExit(f"the launch failed: {told}")
        rest = found["all"] - sum(found[name] for name in ADDED)
        for name, each in shares.items():
            each.append(found[name] / rest)
    return {name: statistics.median(each) for name, each in shares.items()}


def beside(folder: Path) -> dict[str, float]:
    """What the processes beside the ranks of a node of eight GPUs take in an hour, as a share of an hour of a core."""
    run = RunDir(folder / "beside")
    for made in (run.nodes, run.submitit):
        made.mkdir(parents=True)
    gpus = tuple(replace(GPU, index=place, uuid=f"GPU-{place}") for place in range(8))
    meter, readings, before = Meter(), 360, time.process_time()
    for number in range(1, readings + 1):
        reading = GpuReading(unix=10 * number, host="h", number=number, interval_s=10, gpus=gpus)
        append(run.node_gpu("a-0"), reading)
    written, start = time.process_time() - before, time.process_time()
    for number in range(1, readings + 1):
        meter.add(GpuReading(unix=10 * number, host="h", number=number, interval_s=10, gpus=gpus))
        write_json(run.node_energy("a-0"), {"gpus": [asdict(gpu) for gpu in meter.gpus]})
    summed = time.process_time() - start
    alarms = alarm_look(run) * HOUR_S / ALARMS_S
    return {"readings of GPUs": written / HOUR_S, "sums of energy": summed / HOUR_S, "alarms": alarms / HOUR_S}


def alarm_look(run: RunDir) -> float:
    """CPU seconds of a look for alarms at a run of 100,000 iterations and eight ranks, its process included."""
    run.write_json(run.plan, make_plan(compose(["experiment=seed_a10x8"]), "xl/1").as_json())
    lines = [
        json.dumps({"iteration": number, "unix": number, "elapsed_ms": 1000.0, "loss": 4.0, "nan": 0, "grad_norm": 1.0})
        for number in range(100_000)
    ]
    run.metrics.write_text("".join(f"{line}\n" for line in lines))
    run.write_json(run.notify, {"command": [], "webhook": None})
    before = spent()
    subprocess.run([sys.executable, "-P", "-m", "launch.on_end", str(run.path), "alarms"], check=True)
    return spent() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="a file for the figures, JSON")
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.command:
        command(arguments.command)
        return
    load = os.getloadavg()[0]
    with folder_of_runs() as folder:
        shares = {"launch": launches(folder), "run": beside(folder)}
    for what, each in shares.items():
        for name, share in each.items():
            print(f"{what}: {name} {share:.3%}")
    print(f"load {load:.1f} on {os.cpu_count()} cores")
    if arguments.results is not None:
        kept = {"runs": RUNS, "rounds": ROUNDS, "load": round(load, 1), **shares}
        arguments.results.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
