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
    torch.backends.cudnn.enabled = False  # as in the ranks: the stand-in has none of it
    model, count = plan.model, plan.micro_batches[0]
    images = model.image_size is not None
    one = (model.channels, model.image_size, model.image_size) if images else (model.sequence_length + 1,)
    dtype = torch.float32 if images else torch.int64

    def between(number: int) -> None:
        mark(f"micro {number}".encode() if number < count else b"rest")

    with CONTENDERS[contender](plan, "cuda") as step:
        for iteration in range(1, ITERATIONS + 1):
            mark(f"begin {iteration}".encode())
            pinned = [torch.zeros(plan.micro_batch_size, *one, dtype=dtype).pin_memory() for _ in range(count)]
            step([samples.to("cuda", non_blocking=True) for samples in pinned], between)
            mark(f"end {iteration}".encode())
        sys.stdout.flush()
        os._exit(0)  # threads of torch's own would end by aborting


if __name__ == "__main__":
    main(*sys.argv[1:])
