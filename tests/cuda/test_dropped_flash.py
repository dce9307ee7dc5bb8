"""Attention that drops weights without holding them is attention whose weights are dropped: Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import ROOT
from tests.support.cuda.machine import PYTHON

PROGRAM = """
import sys, torch
from megatron_ext.tasks.dropout import key_of, rows_of
from megatron_ext.tasks.language.attention import Dropped, attend


def compare(batch, heads, groups, sequence, tokens, width, causal, padded, rate, dtype):
    source = torch.Generator().manual_seed(1)
    shapes = (sequence, heads), (tokens, groups), (tokens, groups)
    given = [torch.randn(batch, *shape, width, generator=source).to(dtype) for shape in shapes]
    gradient = torch.randn(batch, sequence, heads, width, generator=source).to(dtype)
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for sample in range(batch):
        mask[sample, tokens - 11 * sample - 5 :] = 0
    rows = rows_of(key_of(1, "x"), torch.arange(7, 7 + batch), torch.arange(heads), torch.arange(sequence))

    def found(flash, of):
        leaves = [x.to(of, copy=True).requires_grad_() for x in given]
        parts = [x.transpose(1, 2) for x in leaves]  # not contiguous, as a layer's are not
        y = attend(*parts, causal, mask if padded else None, Dropped(rate, rows, holding=not flash))
        y.backward(gradient.to(of))
        return [y.detach(), *(x.grad for x in leaves)]

    for own, true in zip(found(True, dtype), found(False, torch.float32)):
        off = ((own.float() - true).abs().max() / true.abs().max()).item()
        assert off < (1e-5 if dtype == torch.float32 else 0.02), off


for case in sys.argv[1:]:
    print(case, flush=True)
    *sizes, causal, padded, rate, dtype = case.split()
    compare(*map(int, sizes), causal == "True", padded == "True", float(rate), getattr(torch, dtype))
"""
CASES = {
    "causal, in several blocks": "2 2 2 70 70 32 True False 0.1 float32",
    "16 bits": "1 2 2 130 130 64 True False 0.1 float16",
    "padded, shared heads, wide": "2 4 2 40 40 80 False True 0.3 float32",
    "padded, causal, odd": "2 3 1 37 37 20 True True 0.5 float32",
    "another stack's result": "1 2 2 33 90 16 False True 0.1 float32",
    "a short one": "1 2 1 90 33 16 False False 0.999 float32",
}


def test_results_and_gradients_are_those_of_weights_that_are_dropped(tmp_path: Path) -> None:
    """In one process, which takes as long to start as the cases do."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, program, *CASES.values()]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
