"""GPT-2 as in the textbooks: ordinary modules, nothing that knows of a pipeline."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from megatron_ext.contract.model import ModelConfig


class Block(nn.Module):
    """A transformer layer; its parts are called as in `megatron_ext.tasks.gpt`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden = model.hidden
        self.heads = model.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp_in, self.mlp_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).split(h, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(b, s, h))
        y: torch.Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return y
