"""Attention in 16 bits on a CPU: as torch's own, without its slow backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conf.compose import compose
from megatron_ext.contract.models.pieces import Stack
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language import attention, transformer

SIZES = ["model=tiny", "parallel=single", "parallel.micro_batch_size=1", "model.hidden=32", "model.heads=4"]


def results(dtype: torch.dtype, causal: bool, padded: bool) -> list[Tensor]:
    """What a layer gives, and its gradients."""
    model = compose([*SIZES, "model.num_query_groups=2"]).model.sized(1)
    stack = Stack("layer", "layers", 1, 7, causal=causal)
    layer = transformer.TransformerLayer(model, TensorGroup(), stack, "none", "layers.0", 1)
    source = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source).mul(0.2).to(dtype)
    x = torch.randn(3, 7, 32, generator=source).to(dtype).requires_grad_()
    mask = (torch.arange(7) < torch.tensor([[7], [4], [1]])).long() if padded else None
    y = layer(x, torch.arange(3), mask)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(("causal", "padded"), [(True, False), (False, True), (False, False)])
def test_it_is_what_torch_computes(causal: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = results(torch.bfloat16, causal, padded)
    exact = results(torch.float32, causal, padded)
    monkeypatch.setattr(attention, "PLAIN_TOKENS", 0)
    for own, torchs, true in zip(plain, results(torch.bfloat16, causal, padded), exact, strict=True):
        scale = true.abs().max().item()
        assert (own - true).abs().max().item() < 0.03 * scale
        assert (torchs - true).abs().max().item() < 0.03 * scale


def test_torchs_own_is_taken_in_32_bits_and_where_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    core = F.scaled_dot_product_attention

    def counted(query: Tensor, *others: Tensor | None, **options: bool) -> Tensor:
        calls.append(query.dtype)
        return core(query, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    results(torch.bfloat16, True, False)
    assert calls == []
    results(torch.float32, True, False)
    assert calls == [torch.float32]
    monkeypatch.setattr(attention, "PLAIN_TOKENS", 6)
    results(torch.bfloat16, True, False)
    assert calls[1:] == [torch.bfloat16]
