"""python -m benchmarks.lost_nodes [--rounds N] [--seed N] [--memory]: how long a lost rank, agent or node costs.

Each round launches an elastic run on local nodes, in a layout drawn at random (stages, tensor groups, replicas), and
after its first checkpoint kills a rank, an agent, or an agent and its ranks at once. A row has the seconds from the
kill to the new plan and to the next logged iteration, and how many iterations were trained again. With `--memory`
checkpoints are in the memory of nodes (train.save_memory), and hardly any on disk. In the end one process trains as
long, and the largest difference of a loss is printed. A run that does not go on, or whose losses differ by more than
1e-5, ends the benchmark. Nodes that start at once share this machine's cores, so times are larger than on a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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
ON_DISK = ("train.save_interval=2",)
IN_MEMORY = ("train.save_interval=20", "train.save_memory=2")
SIZES = ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2))
"""Nodes, and ranks on each."""
MOST_APART = 1e-5


def layouts() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields the number of nodes and the words of every layout."""
    for nodes, gpus in SIZES:
        for tensor in range(1, gpus + 1):
            for stages in range(1, LAYERS + 1):
                replicas, rest = divmod(nodes * gpus, tensor * stages)
                if rest == 0:
                    cut = (f"parallel.pipeline={stages}", f"parallel.tensor={tensor}", f"parallel.data={replicas}")
                    cluster = (f"cluster.groups.local.count={nodes}", f"cluster.groups.local.gpus_per_node={gpus}")
                    yield nodes, (*cut, *cluster)


def wait_for(done: Callable[[], object], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"{what} took more than {WAIT_S:g} s")
        time.sleep(0.05)


def started(runs: Path, corpus: Path, words: Iterable[str]) -> RunDir:
    settings = [
        *(f"runs_dir={runs}", f"data.prefix={corpus}", "model.sequence_length=32", "parallel=single"),
        *("parallel.micro_batch_size=1", "parallel.global_batch_size=24", "train.iterations=1000000"),
        *("train.lr=3e-4", "train.min_lr=3e-5", "train.lr_warmup_iterations=0", "train.lr_decay_iterations=100"),
        *("train.log_interval=1", "train.keep_checkpoints=2", *words),
    ]
    return submit(with_length(compose(settings)), settings)


def stopped(run: RunDir, start: str) -> dict[int, float]:
    """Ends a run, and returns its losses by iteration."""
    run.write_json(run.save_request(start), {})
    wait_for(lambda: observe(run).over, "the end")
    lines = (json.loads(line) for line in run.metrics.read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines}


def one_round(run: RunDir, label: str, kind: str, victim: int) -> str:
    """Kills, and returns what that took as a row."""
    wait_for(run.latest_checkpoint.exists, "the first checkpoint")
    first = newest(run.metrics)["iteration"]
    wait_for(lambda: newest(run.metrics)["iteration"] > first + 4, "four more iterations")
    name = run.read_plan().node_names[victim]
    agent = run.read_json(run.node_state(name))["pid"]
    ranks = [entry["pid"] for entry in run.read_json(run.nodes / f"{name}.ranks.json")]
    killed, before = time.time(), newest(run.metrics)["iteration"]
    for pid in (*ranks, agent) if kind == "node" else ranks[:1] if kind == "rank" else (agent,):
        with suppress(ProcessLookupError):  # the other ranks of the node end with the first
            os.kill(pid, signal.SIGKILL)
    wait_for(run.plan_of("0.1").exists, "the new plan")
    planned = time.time()
    wait_for(lambda: newest(run.metrics)["unix"] > planned, f"{label}, {kind} {victim}: the next iteration")
    trains, again = newest(run.metrics)["unix"], before - newest(run.decisions)["iteration"]
    return f"{label:30} {kind:6} {victim}  {planned - killed:5.1f}  {trains - killed:5.1f}  {again:4}"


def newest(path: Path) -> Mapping[str, Any]:
    """The last line of a log."""
    return json.loads(path.read_text().rpartition("\n")[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    drawn, saves = random.Random(args.seed), IN_MEMORY if args.memory else ON_DISK
    print(f"load {os.getloadavg()[0]:.1f}")
    print("layout, killed, node, seconds to the new plan, to the next iteration, iterations trained again")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "text_document"
        tokens = np.random.default_rng(0)
        write_indexed(corpus, (tokens.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
        found: list[dict[int, float]] = []
        for _ in range(args.rounds):
            nodes, words = drawn.choice([*layouts()])
            kind, victim = drawn.choice(KILLS), drawn.randrange(nodes)
            label = " ".join(word.rpartition(".")[2] for word in words)
            run = started(Path(folder) / "runs", corpus, ["elastic.enabled=true", *saves, *words])
            print(one_round(run, label, kind, victim), flush=True)
            found.append(stopped(run, "0.1"))
        one = started(Path(folder) / "runs", corpus, ON_DISK)
        last = max(max(losses) for losses in found)
        wait_for(lambda: one.metrics.exists() and f'"iteration": {last},' in one.metrics.read_text(), "one process")
        expected = stopped(one, "0.0")
        apart = max(abs(loss / expected[of] - 1.0) for losses in found for of, loss in losses.items())
    print(f"losses beside those of one process: at most {apart:.1e} apart, over up to {last} iterations")
    if apart > MOST_APART:
        raise SystemExit(f"more than {MOST_APART:g}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
