"""torch's own stacks of layers are followed layer by layer, whatever the layers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from megatron_ext.families.module.tracing import trace


class Crossed(nn.TransformerDecoderLayer):
    """A layer that calls otherwise what torch's decoder gives it without names."""

    def forward(self, x: Tensor, encoded: Tensor, **masks: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, encoded)


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(Crossed(8, 2, 16, dropout=0.0), 2)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, source)


def test_a_decoder_of_own_layers_is_followed_whatever_they_call_their_inputs() -> None:
    model, inputs = Decoding(), (torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    graph = trace(model, ["source", "target"], {}, Path(__file__), ())
    assert sum(node.op == "call_module" for node in graph.nodes) == 2
    assert torch.equal(fx.GraphModule(model, graph)(*inputs), model(*inputs))
