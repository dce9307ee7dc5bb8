"""The loss of many logits, of which some at a time are looked at in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.parallel import cross_entropy
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import DTYPES


@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(1, 11),
    padding=st.integers(0, 3),
    part=st.integers(1, 40),
    whole=st.booleans(),
    precision=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 99),
)
def test_loss_and_gradient_are_those_of_torch_in_whatever_parts_and_as_whole_passes(
    rows: int, vocabulary: int, padding: int, part: int, whole: bool, precision: str, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    dtype = DTYPES[precision]
    given = (5 * torch.randn(2, rows, vocabulary + padding, generator=source)).to(dtype)
    labels = torch.randint(vocabulary, (2, rows), generator=source)
    expected = given.clone().requires_grad_()
    loss = F.cross_entropy(expected[..., :vocabulary].float().flatten(0, 1), labels.flatten())
    (loss * 3.0).backward()
    mine = given.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "PART", part)
        patch.setattr(cross_entropy, "fuses", lambda _: whole)
        of_mine = vocab_cross_entropy(mine * 1.0, labels, vocabulary, TensorGroup())
        (of_mine * 3.0).backward()
    assert expected.grad is not None and mine.grad is not None
    torch.testing.assert_close(of_mine, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, expected.grad, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3, atol=1e-6)
    assert not mine.grad[..., vocabulary:].any()


class Largest(TorchDispatchMode):
    """The most numbers that an operation gave in fp32."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_no_more_than_some_logits_are_ever_there_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "PART", 1000)
    logits = torch.randn(2, 64, 100, dtype=torch.bfloat16).requires_grad_()
    with Largest() as largest:
        vocab_cross_entropy(logits * 1.0, torch.randint(90, (2, 64)), 90, TensorGroup()).backward()
    assert logits.grad is not None
    assert 500 < largest.numbers <= 1000


def test_a_second_backward_pass_is_refused() -> None:
    """The first one has made the gradient of the logits."""
    logits = (torch.randn(1, 2048, 2100) + 0.0).requires_grad_()
    loss = vocab_cross_entropy(logits * 1.0, torch.zeros(1, 2048, dtype=torch.int64), 2100, TensorGroup())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_passes_that_a_gpu_fuses_are_compiled_to_the_same(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's compiler for the CPU: one graph each, and the numbers of the parts."""
    labels = torch.randint(90, (2, 6))
    given = torch.randn(2, 6, 96)
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(cross_entropy, "fuses", lambda _: True)
            for name in ("_log_sums", "_gradient"):
                compiled = torch.compile(getattr(cross_entropy, name).plain, fullgraph=True)
                monkeypatch.setattr(cross_entropy, name, compiled)
        monkeypatch.setattr(cross_entropy, "PART", 1)
        logits = given.clone().requires_grad_()
        losses = cross_entropy.vocab_losses(logits * 1.0, labels, 90, TensorGroup(), smoothing)
        (losses * torch.arange(12.0)).sum().backward()
        found.append((losses.detach(), logits.grad))
    for of_parts, of_whole in zip(*found, strict=True):
        torch.testing.assert_close(of_whole, of_parts, rtol=1e-5, atol=1e-6)
