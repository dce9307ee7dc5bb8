"""What torch's compiler fuses on GPUs is few kernels, and keeps no large result between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.test_stand_in import HEADER, ran

pytestmark = pytest.mark.skipif(not HEADER.exists(), reason="Triton builds its launcher with Python's headers")
MARKS = """
    import ctypes, os, sys, torch
    mark = ctypes.CDLL(None).standin_mark
    def marked(function):
        function()  # compiles it
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mark(b"begin 1")
        function()
        mark(b"end 1")
        return torch.cuda.max_memory_allocated() - before
"""


def test_the_loss_of_many_logits_is_few_kernels_and_no_copy_of_them(tmp_path: Path) -> None:
    program = """
        from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
        from megatron_ext.parallel.tensor_parallel import TensorGroup
        logits = torch.zeros(1, 256, 50304, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        labels = torch.zeros(1, 256, dtype=torch.int64, device="cuda")
        def loss():
            logits.grad = None
            vocab_cross_entropy(logits * 1.0, labels, 50257, TensorGroup()).backward()
        grown = marked(loss)
        assert grown < 2.1 * logits.numel() * 2, grown  # the product, whose gradient takes its place, and autograd's
    """
    (found,) = ran(tmp_path, program, MARKS, iteration=1)
    of_logits = [name for name in found.kernels if name.startswith("triton_")]
    assert 2 <= len(of_logits) <= 3, found.kernels
    assert sum(found.kernels.values()) <= 24, found.kernels


def test_a_dropout_is_one_kernel_each_way_and_one_for_the_rows(tmp_path: Path) -> None:
    program = """
        from megatron_ext.tasks.dropout import dropout, key_of, rows_of
        x = torch.zeros(2, 128, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        gradient = torch.zeros_like(x)
        numbers, places = torch.arange(2, device="cuda"), torch.arange(128, device="cuda")
        def once():
            x.grad = None
            dropout(x, 0.1, rows_of(key_of(1, "x"), numbers, places)).backward(gradient)
        marked(once)
    """
    (found,) = ran(tmp_path, program, MARKS, iteration=1)
    assert sum(found.kernels.values()) == 3, found.kernels
    assert not found.waits
