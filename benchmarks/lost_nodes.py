"""python -m benchmarks.lost_nodes [--rounds N] [--nodes N] [--seed N]: how long a lost rank, agent or node costs.

Each round launches an elastic run on local nodes of one rank each, in a layout drawn at random, and after its first
checkpoint kills a rank, an agent, or an agent and its ranks at once. A row has the seconds from the kill to the new
plan and to the next logged iteration; a run that does not go on ends the benchmark. Nodes that start at once share this
machine's cores, so times are larger than on a cluster.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.launching.preflight import with_length
from launch.control.submit import submit
from launch.observe.look import observe
from megatron_ext.data.indexed_dataset import write_indexed

WAIT_S = 300.0
LAYERS = 4
KILLS = ("rank", "agent", "node")


def layouts(nodes: int) -> Iterator[tuple[str, ...]]:
    """Words of the layouts with one rank on each of so many nodes."""
    for stages in range(1, min(nodes, LAYERS) + 1):
        if nodes % stages == 0:
            yield f"parallel.pipeline={stages}", f"parallel.data={nodes // stages}"


def wait_for(done: Callable[[], object], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"{what} took more than {WAIT_S:g} s")
        time.sleep(0.05)


def one_round(runs: Path, corpus: Path, words: tuple[str, ...], nodes: int, kind: str, victim: int) -> str:
    """Launches a run, kills, and returns what that took as a row."""
    settings = [
        *(f"runs_dir={runs}", f"data.prefix={corpus}", "model.sequence_length=32", "parallel=single"),
        *("parallel.micro_batch_size=1", "parallel.global_batch_size=24", "train.iterations=1000000"),
        *("train.log_interval=1", "train.save_interval=2", "train.keep_checkpoints=2", "elastic.enabled=true"),
        *(f"cluster.groups.local.count={nodes}", "cluster.groups.local.gpus_per_node=1", *words),
    ]
    run = submit(with_length(compose(settings)), settings)
    wait_for(run.latest_checkpoint.exists, "the first checkpoint")
    name = run.read_plan().node_names[victim]
    agent = run.read_json(run.node_state(name))["pid"]
    ranks = [entry["pid"] for entry in run.read_json(run.nodes / f"{name}.ranks.json")]
    killed = time.time()
    for pid in (*ranks, agent) if kind == "node" else ranks if kind == "rank" else (agent,):
        os.kill(pid, signal.SIGKILL)
    wait_for(run.plan_of("0.1").exists, "the new plan")
    planned = time.time()
    wait_for(lambda: newest(run) > planned, f"{' '.join(words)}, {kind} {victim}: the next iteration")
    row = f"{' '.join(words):45} {kind:6} {victim}  {planned - killed:5.1f}  {newest(run) - killed:5.1f}"
    run.write_json(run.save_request("0.1"), {})
    wait_for(lambda: observe(run).over, "the end")
    return row


def newest(run: RunDir) -> float:
    """When the newest iteration was logged."""
    line = run.metrics.read_text().splitlines()[-1]
    return float(line.partition('"unix": ')[2].partition(",")[0].rstrip("}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drawn = random.Random(args.seed)
    print(f"load {os.getloadavg()[0]:.1f}; layout, killed, node, seconds to the new plan, to the next iteration")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "text_document"
        tokens = np.random.default_rng(0)
        write_indexed(corpus, (tokens.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
        for _ in range(args.rounds):
            words = drawn.choice([*layouts(args.nodes)])
            kind, victim = drawn.choice(KILLS), drawn.randrange(args.nodes)
            print(one_round(Path(folder) / "runs", corpus, words, args.nodes, kind, victim), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
