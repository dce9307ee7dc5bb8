"""python -m benchmarks.gpu.counted CONTENDER PLAN: four iterations under the tests' stand-in for CUDA, whose log is
given a mark before each micro-batch and after the last one."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from benchmarks.gpu.contenders import CONTENDERS
from megatron_ext.contract.plan import Plan

ITERATIONS = 4


def main(contender: str, path: str) -> None:
    plan = Plan.read(Path(path))
    mark = ctypes.CDLL(None).standin_mark
    size, count = (plan.micro_batch_size, plan.model.sequence_length + 1), plan.micro_batches[0]

    def between(number: int) -> None:
        mark(f"micro {number}".encode() if number < count else b"rest")

    with CONTENDERS[contender](plan, "cuda") as step:
        for iteration in range(1, ITERATIONS + 1):
            mark(f"begin {iteration}".encode())
            pinned = [torch.zeros(size, dtype=torch.int64).pin_memory() for _ in range(count)]
            step([tokens.to("cuda", non_blocking=True) for tokens in pinned], between)
            mark(f"end {iteration}".encode())
        sys.stdout.flush()
        os._exit(0)  # threads of torch's own would end by aborting


if __name__ == "__main__":
    main(*sys.argv[1:])
