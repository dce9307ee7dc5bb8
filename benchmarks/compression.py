"""python -m benchmarks.compression: the loss of a GPT over 500 iterations, with messages as they are and in 8 bits.

A byte-level GPT in four stages learns Python's own sources; of each seed there is a run of either. It prints the loss
of the training's parts, the held-out loss, and the bytes of activations and their gradients.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.adaptive import tdpp

WAYS = ("none", "int8")
ITERATIONS, PART = 500, 50
COMMON = (
    *("experiment=demo", "parallel=single", "parallel.pipeline=4", "parallel.partition=1-1-1-1"),
    *("parallel.micro_batch_size=4", "parallel.global_batch_size=8", f"train.iterations={ITERATIONS}"),
    *("train.log_interval=1", "train.eval_interval=500", "train.eval_iterations=20"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tdpp(folder, "data", "prepare", "--source", "stdlib", "--tokenizer", "byte", "--output", "data/stdlib")
        for seed in seeds:
            for way in WAYS:
                run = f"{way}{seed}"
                tdpp(folder, "launch", *COMMON, f"train.seed={seed}", f"parallel.compress={way}", f"name={run}")
                (ran,) = (folder / "runs" / run).glob("2*")
                print(f"seed {seed}, {way}: {_found(ran)}", flush=True)


def _found(run: Path) -> str:
    """What a run learned and sent, in words."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    held_out = [line["valid_loss"] for line in lines if "valid_loss" in line]
    parts = (mean(losses[end - PART : end]) for end in range(2 * PART, ITERATIONS + 1, 2 * PART))
    sent = [json.loads(file.read_text())["bytes"] for file in (run / "traffic").iterdir()]
    messages = sum(one["activations"] + one["gradients"] for one in sent)
    return (
        f"mean loss of the {PART} iterations before each hundredth {', '.join(f'{loss:.4f}' for loss in parts)}; "
        f"held out {held_out[-1]:.4f}; {messages / 1e6:.1f} MB between stages"
    )


if __name__ == "__main__":
    main()
