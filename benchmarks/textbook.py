"""GPT-2 and Llama as in the textbooks: ordinary modules, nothing that knows of a pipeline."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig


def dropped(x: torch.Tensor, rate: float) -> torch.Tensor:
    """torch's dropout, which would be a kernel where it drops nothing."""
    return F.dropout(x, rate) if rate else x


class Block(nn.Module):
    """A transformer layer; its parts are called as in `megatron_ext.families.gpt.task`."""

    def __init__(self, model: ModelConfig, *, causal: bool = True) -> None:
        super().__init__()
        hidden = model.hidden
        self.causal = causal
        self.heads, self.rate, self.attention_rate = model.heads, model.hidden_dropout, model.attention_dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp_in, self.mlp_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).split(h, 2))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_rate, is_causal=self.causal)
        x = x + dropped(self.attention_out(attended.transpose(1, 2).reshape(b, s, h)), self.rate)
        inner = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        return x + dropped(self.mlp_out(inner), self.rate)


class LlamaBlock(nn.Module):
    """A layer of Llama; its parts are called as in `megatron_ext.tasks.language.transformer`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, self.width = model.hidden, model.hidden // model.heads
        self.heads = [model.heads, model.query_groups, model.query_groups]
        self.attention_norm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.qkv = nn.Linear(hidden, sum(self.heads) * self.width, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(hidden, 2 * model.inner, False), nn.Linear(model.inner, hidden, False)
        frequencies = model.rotary_base ** -(torch.arange(0, self.width, 2) / self.width)
        angles = torch.outer(torch.arange(model.sequence_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.attention_norm(x)).view(b, s, -1, self.width).transpose(1, 2)
        q, k, v = heads.split(self.heads, 1)
        attended = F.scaled_dot_product_attention(self._turn(q), self._turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(b, s, h))
        gate, up = self.mlp_in(self.mlp_norm(x)).chunk(2, -1)
        return x + self.mlp_out(F.silu(gate) * up)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin
