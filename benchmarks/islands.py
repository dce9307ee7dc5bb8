"""python -m benchmarks.islands [--every N] [--iterations N]: what islands cost in quality, and save in bytes.

A small GPT learns the bytes of Python's own library on two replicas: with gradients summed in every iteration, and as
two islands that meet every so many. Both are evaluated on held-out files after the same samples; bytes are those that
`traffic/` counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.launching.preflight import with_length
from launch.control.submit import submit
from launch.observe.look import observe
from megatron_ext.data.indexed_dataset import write_indexed

WAIT_S = 3600.0
MODEL = (
    *("model.layers=1", "model.hidden=64", "model.heads=4", "model.sequence_length=32", "model.vocab_size=256"),
    *("model.vocab_multiple=1", "parallel=single", "parallel.data=2", "parallel.micro_batch_size=16"),
    *("parallel.global_batch_size=32", "parallel.partition=null", "train.lr=1e-3", "train.min_lr=0"),
    *("train.lr_warmup_iterations=100", "train.save_interval=null", "train.checkpoint=false", "train.log_interval=50"),
    *("train.eval_iterations=100", "data.split='90,10,0'", "profile.timeline=false"),
    *("cluster.groups.local.count=1", "cluster.groups.local.gpus_per_node=2"),
)


def make_corpus(folder: Path) -> Path:
    """The files of Python's library, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    prefix = folder / "library"
    write_indexed(
        prefix, (np.frombuffer(file.read_bytes(), np.uint8).astype(np.uint16) for file in files), np.dtype(np.uint16)
    )
    return prefix


def trained(runs: Path, corpus: Path, iterations: int, *words: str) -> tuple[float, float]:
    """The loss on held-out files after training, and the bytes that all ranks sent."""
    settings = [
        *(f"runs_dir={runs}", f"data.prefix={corpus}", *MODEL),
        *(f"train.iterations={iterations}", f"train.eval_interval={iterations}", *words),
    ]
    run = submit(with_length(compose(settings)), settings)
    until = time.monotonic() + WAIT_S
    while not observe(run).over:
        if time.monotonic() > until:
            raise SystemExit(f"{' '.join(words)} took more than {WAIT_S:g} s")
        time.sleep(1.0)
    return last_evaluation(run), sum(sum(json.loads(file.read_text())["bytes"].values()) for file in traffic(run))


def last_evaluation(run: RunDir) -> float:
    """The newest loss on held-out samples."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return float(lines[-1]["valid_loss"])


def traffic(run: RunDir) -> list[Path]:
    return sorted((run.path / "traffic").glob("rank-*.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=50, help="iterations between two meetings")
    parser.add_argument("--iterations", type=int, default=3000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, corpus = Path(folder) / "runs", make_corpus(Path(folder))
        loss, sent = trained(runs, corpus, args.iterations)
        print(f"synchronous                     loss {loss:.4f}  bytes {sent:,.0f}", flush=True)
        for words in ("", "train.outer_lr=1 train.outer_momentum=0"):
            own, less = trained(runs, corpus, args.iterations, f"train.sync_every={args.every}", *words.split())
            print(
                f"islands, every {args.every:4} {words or 'as DiLoCo':45} loss {own:.4f} ({own / loss - 1:+.2%})  "
                f"bytes {less:,.0f} ({less / sent:.2%})  load {os.getloadavg()[0]:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
