"""In place of Megatron-LM's script: takes its options and no others, and prints its log lines; trains nothing.

With FAIL_RANK=<rank> in the environment, that rank raises an error in iteration 2.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import datetime
from pathlib import Path

OPTIONS = Path(__file__).parents[3] / "launch" / "golden" / "megatron_lm_options.txt"


def parser() -> argparse.ArgumentParser:
    """Knows every option of Megatron-LM by its name and number of values."""
    known = argparse.ArgumentParser(allow_abbrev=False)
    for line in OPTIONS.read_text().splitlines():
        if line.startswith("--"):
            name, values = line.split()
            if values == "0":
                known.add_argument(name, action="store_true")
            elif values == "1":
                known.add_argument(name)
            else:
                known.add_argument(name, nargs=int(values) if values.isdigit() else values)
    return known


def main() -> None:
    options = parser().parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stages = options.pipeline_model_parallel_layout.split("|")
    assert len(stages) == int(options.pipeline_model_parallel_size)
    assert world % (len(stages) * int(options.tensor_model_parallel_size)) == 0
    total, interval = int(options.train_iters), int(options.log_interval)
    for iteration in range(1, total + 1):
        time.sleep(0.02)
        if iteration == 2 and os.environ.get("FAIL_RANK") == str(rank):
            raise RuntimeError("out of luck")
        if rank == world - 1 and (iteration == 1 or iteration % interval == 0):
            log(iteration, total, int(options.global_batch_size))
        if iteration == 2:
            print(
                f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1000.50 | max allocated: 20{rank}0.25 | "
                "reserved: 3000.00 | max reserved: 3000.00",
                flush=True,
            )


def log(iteration: int, total: int, batch: int) -> None:
    print(
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{total:8d} | consumed samples: "
        f"{iteration * batch:12d} | elapsed time per iteration (ms): {20 + iteration:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): 1.5 | learning rate: 1.500000E-04 | global batch size: {batch:5d} | lm loss: "
        f"{5 - iteration / 100:.6E} | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
        "(min, max) time across ranks (ms):\n"
        f"    {'forward-backward '.ljust(48, '.')}: ({10 + iteration:.2f}, {15 + iteration:.2f})\n"
        f"    {'optimizer '.ljust(48, '.')}: (1.00, 2.00)",
        flush=True,
    )


if __name__ == "__main__":
    main()
