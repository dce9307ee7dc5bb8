"""One page of every kind that the project writes, each made by the command that writes it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np

from conf.run_folder.gpu_lines import GpuProcess, GpuReading, GpuSample, entry_text
from conf.schema.train import Precision
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import Steps, StepTimes
from fasop.graphs.graph_text import graph_text
from launch import cli
from launch.commands.serving.library import Library
from launch.commands.serving.server import reply
from megatron_ext.data.indexed_dataset import write_indexed
from reports.pages import command_pages
from reports.pages.command_pages import Quality
from tests.support.profiled_graphs import branches
from tests.support.reports.legacy import Job, calls, log
from tests.support.reports.synthetic import UNIX_NS, Shape, make_run

FULL = Shape(pipeline=4, data=2, micro_batches=8, iterations=12, layers=9, slow={2: 1.4})
SMALL = Shape(pipeline=3, iterations=4, micro_batches=6)
CLUSTER = """
name: priced
gpus:
  a: {name: A, memory_gib: 40, fp32_tflops: 19, fp16_tflops: 300, bf16_tflops: 300, memory_gb_per_s: 1500}
  b: {name: B, memory_gib: 24, fp32_tflops: 6, fp16_tflops: 80, bf16_tflops: 80, memory_gb_per_s: 400}
groups:
  fast: {gpu: a, count: 2, gpus_per_node: 2, intra_gbit_per_s: 128, intra_latency_us: 5, inter_gbit_per_s: 40,
         inter_latency_us: 20, price_per_hour: 9.0}
  slow: {gpu: b, count: 2, gpus_per_node: 2, intra_gbit_per_s: 64, intra_latency_us: 5, inter_gbit_per_s: 10,
         inter_latency_us: 20, price_per_hour: 1.0}
"""
ADAPTED = (
    {"iteration": 4, "before": 16, "global_batch_size": 20, "shares_before": [8, 8], "shares": [12, 8]},
    {"iteration": 8, "before": 20, "global_batch_size": 20, "shares_before": [12, 8], "shares": [12, 8]},
)
WITHOUT_A_NODE = {
    "iteration": 6,
    "start": "2",
    "nodes_before": ["g0-0", "g1-1", "g1-2"],
    "nodes": ["g0-0", "g1-1"],
    "shares_before": [6, 6, 6],
    "shares": [10, 8],
    "reason": "node g1-2 was lost",
}
PRICED = (
    *("search", "model=xl", "train=gpt2", "train.precision=fp16", "parallel.global_batch_size=32"),
    *("cluster=a100x8_a10x8", "cluster.groups.a100.count=1", "cluster.groups.a10.count=1", "tokens=1e7"),
    *("parallel.tensor=1", "parallel.recompute=none", "parallel.schedule=one_f_one_b"),
)


def write_every_page(folder: Path) -> dict[str, Path]:
    """Writes them below a folder; returns where, by what they are called."""
    return {
        **_runs(folder / "runs"),
        "many-timeline": _many(folder / "many"),
        **_log(folder / "logs"),
        **_plans(folder),
        "simulation": _simulation(folder),
        "learning": _learning(folder / "learning.html"),
        "data": _data(folder),
        "profile": _profile(folder / "profile.html"),
    }


def _run(*words: str | Path) -> None:
    code = cli.main([*map(str, words)])
    assert code in (0, None), words


def _runs(runs: Path) -> dict[str, Path]:
    """Pages of single runs, of several together, and of their list."""
    full, other, failed, rehearsal, fresh = (
        runs / name / f"20260101-00000{number}-aaaa"
        for number, name in enumerate(("tiny", "tiny", "tiny", "rehearsal", "fresh"))
    )
    for path, shape in (
        (full, FULL),
        (other, Shape(pipeline=4, data=2, micro_batches=8, iterations=12)),
        (failed, SMALL),
        (rehearsal, Shape(pipeline=3, iterations=4, micro_batches=6, rehearsal="virtual")),
        (fresh, SMALL),
    ):
        make_run(path, shape)
        _submitted(path, exit_code=int(path is failed))
    _learned(full, 0.55)
    _learned(other, 0.8)
    _decided(full)
    _gpus(full)
    _broken(failed)
    (fresh / "metrics.jsonl").write_text("")
    for file in (fresh / "events").iterdir():
        file.unlink()
    _run("report", runs / "tiny", "--output", runs / "all", "--runs-dir", runs)
    _run("report", full, other, "--output", runs / "two", "--runs-dir", runs)
    _run("report", rehearsal, fresh, "--runs-dir", runs)
    library = Library(runs)
    served = {"list": "/secret/", "error": "/secret/nothing"}
    for name, address in served.items():
        body = reply(library, "secret", "127.0.0.1", address).body
        still = re.sub(r'<meta http-equiv="refresh"[^>]*>', "", body)  # nothing is served here
        (runs / f"{name}.html").write_text(still)
    return {
        "run": runs / "all/tiny" / full.name / "index.html",
        "timeline": runs / "all/tiny" / full.name / "timeline.html",
        "failed": runs / "all/tiny" / failed.name / "index.html",
        "rehearsal": rehearsal / "report/index.html",
        "fresh": fresh / "report/index.html",
        "fresh-timeline": fresh / "report/timeline.html",
        "comparison": runs / "all/comparison.html",
        "difference": runs / "two/comparison.html",
        **{name: runs / f"{name}.html" for name in served},
    }


def _submitted(run: Path, exit_code: int) -> None:
    """Adds what a launch and the agents of its nodes write, for its verdict."""
    ended = {
        "start": "0.0",
        "job": None,
        "pid": 1,
        "started_unix": UNIX_NS / 1e9,
        "state": "ended",
        "exit_code": exit_code,
    }
    ended |= {"beat_unix": UNIX_NS / 1e9 + 60, "ended_unix": UNIX_NS / 1e9 + 60, "stopped": None, "reason": None}
    ended |= {"out_begin": 0, "err_begin": 0}
    for node in (run / "nodes").iterdir():
        node.write_text(json.dumps(json.loads(node.read_text()) | ended))
    plan = json.loads((run / "plan.json").read_text())
    job = {"id": "1", "nodes": list(range(len(plan["nodes"]))), "pid": 1, "host": "login1"}
    submitted = {"token": "1" * 32, "executor": "local", "submission": 0, "jobs": [job]}
    (run / "jobs.json").write_text(json.dumps(submitted))


def _lines(run: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _learned(run: Path, pace: float) -> None:
    """Adds an evaluation after every third iteration."""
    lines = _lines(run)
    for number, line in enumerate(lines[2::3], 1):
        loss = 3 + 7.8 * pace**number
        line |= {"valid_loss": loss, "valid_top-1": 0.9 * (1 - pace**number), "evaluation_s": 0.25}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _decided(run: Path) -> None:
    """Adds what it decided about its batch and its nodes."""
    why = {"learning_rate_factor": 1.118, "noise_scale": 33.3, "similarity": 0.11, "reason": "the noise scale grew"}
    decided = [line | why | {"consumed_samples": 16 * int(str(line["iteration"]))} for line in ADAPTED]
    (run / "decisions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (*decided, WITHOUT_A_NODE)))


def _gpus(run: Path) -> None:
    """Adds what its GPUs did, 20 readings of each."""
    drawn = random.Random(1)

    def sample(index: int) -> GpuSample:
        return GpuSample(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA A10",
            utilisation=drawn.randrange(60, 100),
            memory_used_mib=10_000 + 100 * index,
            memory_total_mib=22_731,
            power_w=drawn.randrange(90, 150),
            power_limit_w=150,
            temperature_c=60 + index,
            processes=(GpuProcess(pid=1, memory_mib=1, ours=True),),
        )

    for node in ("g0-0", "g1-1"):
        gpus = [tuple(map(sample, range(4))) for _ in range(20)]
        (run / f"nodes/{node}.gpu").write_text(
            "".join(
                entry_text(GpuReading(unix=UNIX_NS / 1e9 + 10 * at, host=node, number=at, interval_s=10, gpus=one))
                for at, one in enumerate(gpus, 1)
            )
        )


def _broken(run: Path) -> None:
    """As a run whose ranks failed before they logged anything."""
    message = "out of memory: 1.50 GiB were asked for, and 0.75 GiB of 22.20 GiB were free"
    for rank, symptom in enumerate((False, True, True)):
        failure = {
            **{"rank": rank, "stage": rank, "dp": 0, "tp": 0, "start": "0.0"},
            **{"node": "g0-0", "host": "host0"},
            "unix": UNIX_NS / 1e9 + rank,
            "type": "RuntimeError" if symptom else "OutOfMemoryError",
            "message": "the connection was closed by rank 0" if symptom else message,
            "symptom": symptom,
            "traceback": "Traceback (most recent call last):",
        }
        (run / f"errors/rank-{rank:05d}.json").write_text(json.dumps(failure))
    (run / "metrics.jsonl").write_text("")


def _log(folder: Path) -> dict[str, Path]:
    """Of Megatron-LM."""
    folder.mkdir()
    job = Job()
    (folder / "n067.out").write_text(log(job, calls(job)))
    _run("report", folder / "n067.out", "--runs-dir", folder)
    return {"log": folder / "n067.report/index.html", "log-timeline": folder / "n067.report/timeline.html"}


def _plans(folder: Path) -> dict[str, Path]:
    """Of searches."""
    found = {name: folder / f"{name}.html" for name in ("search", "front", "stages")}
    _run(*PRICED, "top=3", "leave_out=false", "by_stage=false", f"page={found['search']}")
    _run(*PRICED, "pareto=time", f"page={found['front']}")
    graph = folder / "graph.txt"
    graph.write_text(graph_text(branches()))
    _run("search", f"graph={graph}", "levels=4", "bandwidths=1e9", f"page={found['stages']}")
    return found


def _simulation(folder: Path) -> Path:
    cluster, page = folder / "priced.yaml", folder / "simulation.html"
    cluster.write_text(CLUSTER)
    plan = {"tensor": 1, "pipeline": 1, "data": 8, "global_batch_size": 16, "micro_batch_size": 2, "partition": "null"}
    _run(
        *("simulate", f"cluster={cluster}", "model=xl", "model.layers=2", "train=gpt2", "train.precision=fp16"),
        *("train.samples=40000", *(f"parallel.{key}={value}" for key, value in plan.items())),
        *("adapt.rule=noise", "adapt.upper=512", "adapt.every=10", "noise=20,600", f"page={page}"),
    )
    return page


def _learning(page: Path) -> Path:
    """Drawn from made-up curves: to train them takes torch, and a while."""
    samples = [64 * step for step in range(1, 9)]

    def quality(name: str, pace: float, seconds: float) -> Quality:
        means = [3 + 5 * pace**step for step in range(8)]
        return Quality(
            name=name,
            samples=samples,
            seconds=[seconds * step for step in range(1, 9)],
            means=means,
            lows=[mean - 0.1 for mean in means],
            highs=[mean + 0.1 for mean in means],
        )

    head = ("plan", "loss after 512 samples", "seconds to loss <= 4.00", "iteration ms")
    rows = [["flush", "3.14", "24.0", "6,000.0"], ["async", "3.35", "30.0", "4,000.0"]]
    notes = ["flush comes first to loss <= 4.00", "peak memory of this process: 512 MiB"]
    plans = [quality("flush", 0.6, 6.0), quality("async", 0.7, 4.0)]
    command = "tdpp rehearse learning experiment=demo parallel=flush.yaml,async.yaml train.until='loss<=4'"
    page.write_text(command_pages.learning_page(command, head, rows, notes, plans, "loss", 4.0))
    return page


def _many(runs: Path) -> Path:
    """A run of as many ranks as are folded, three of them slow."""
    run = runs / "tiny/20260101-000000-aaaa"
    make_run(run, Shape(pipeline=2, data=16, micro_batches=4, iterations=3, slow={20: 1.5, 21: 1.5, 22: 1.5}))
    _run("report", run, "--runs-dir", runs)
    return run / "report/timeline.html"


def _profile(page: Path) -> Path:
    """Drawn from made-up times: to measure them takes torch, and a while."""
    times = [
        StepTimes(workers=count, data=0.5, forward=10 * count**0.7, backward=20 * count**0.7, update=2, copy=0.1)
        for count in (1, 2, 4)
    ]
    steps = Steps(model="gnmt", precision=Precision.fp16, host="g0-0", micro_batch_size=32, times=times)
    known = {"device": "NVIDIA A10", "versions": {"cuda": "12.4"}, "buckets_mib": {"gnmt": [1.0, 25.5, 31.2, 12.8]}}
    profile = LayerProfile(gpu="A10", source="a test", steps=[steps], **known)
    page.write_text(
        command_pages.profile_page("tdpp profile model=gnmt streams=1,2,4 page=profile.html", {"a10": profile})
    )
    return page


def _data(folder: Path) -> Path:
    page, drawn = folder / "data.html", np.random.default_rng(1)
    lengths = drawn.lognormal(5, 1, 300).astype(int) + 1
    write_indexed(folder / "text", (drawn.integers(0, 2000, size=length) for length in lengths), np.dtype("<u2"))
    _run("data", "inspect", folder / "text", "--page", page)
    return page
