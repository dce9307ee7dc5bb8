"""The blocks of ViT and T2T-ViT."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.images import T2T_KERNELS, patches
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.tasks.images.empty import empty_convolution, empty_linear
from megatron_ext.tasks.linear import WeightGradients, linear

LEAST = 1e-8
"""Added to what the performer divides by."""


class PatchEmbedding(nn.Module):
    """Patches as tokens, with learned positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.patch_size is not None
        self.patch = empty_convolution(config.channels, config.hidden, config.patch_size, config.patch_size)
        self.position = nn.Parameter(torch.empty(patches(config) + config.class_token, config.hidden))
        self.class_token: Optional[nn.Parameter] = None
        if config.class_token:
            self.class_token = nn.Parameter(torch.empty(config.hidden))
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, tokens, hidden]."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        y: Tensor = self.dropout(_with_class_token(x, self.class_token) + self.position)
        return y


class Layer(nn.Module):
    """Pre-norm attention and MLP, of which a sample may skip each while the model is trained."""

    def __init__(self, config: ModelConfig, qkv_bias: bool, drop_path: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.later: Optional[WeightGradients] = None
        """Where weight gradients are put off to, under a schedule that splits the backward pass."""
        self.attention_dropout = config.attention_dropout
        self.drop_path = drop_path
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.attention_norm = nn.LayerNorm(config.hidden, config.norm_epsilon)
        self.qkv = empty_linear(config.hidden, 3 * config.hidden, qkv_bias)
        self.attention_out = empty_linear(config.hidden, config.hidden)
        self.mlp_norm = nn.LayerNorm(config.hidden, config.norm_epsilon)
        self.mlp_in = empty_linear(config.hidden, config.inner)
        self.mlp_out = empty_linear(config.inner, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        x = x + self._sometimes(self.dropout(self._attention(self.attention_norm(x))))
        return x + self._sometimes(self.dropout(self._mlp(self.mlp_norm(x))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        qkv = self._linear(self.qkv, x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        rate = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        return self._linear(self.attention_out, attended.transpose(1, 2).reshape(batch, tokens, hidden))

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self.dropout(F.gelu(self._linear(self.mlp_in, x)))
        return self._linear(self.mlp_out, inner)

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias, self.later)

    def _sometimes(self, x: Tensor) -> Tensor:
        """Drop-path: a sample has nothing or more of it (Huang et al. 2016)."""
        if not self.drop_path or not self.training:
            return x
        kept = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.drop_path
        return x * (kept / (1.0 - self.drop_path)).to(x.dtype)


class ClassHead(nn.Module):
    """Final norm and logits, of the class token or of the mean of all tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.classes is not None
        self.of_token = config.class_token
        self.norm = nn.LayerNorm(config.hidden, config.norm_epsilon)
        self.linear = empty_linear(config.hidden, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> [batch, classes]."""
        x = self.norm(x[:, 0]) if self.of_token else self.norm(x).mean(1)
        y: Tensor = self.linear(x)
        return y


class TokensToToken(nn.Module):
    """Overlapping patches that two performers and a projection join into tokens (Yuan et al. 2021, figure 4)."""

    position: Tensor

    def __init__(self, config: ModelConfig, source: torch.Generator) -> None:
        """`source` draws the performers' random features, which are not trained."""
        super().__init__()
        inputs = config.channels
        tokens = []
        for kernel, _, _ in T2T_KERNELS[:2]:
            tokens.append(Performer(inputs * kernel**2, config.width, source))
            inputs = config.width
        self.tokens = nn.ModuleList(tokens)
        self.project = empty_linear(inputs * T2T_KERNELS[2][0] ** 2, config.hidden)
        self.class_token = nn.Parameter(torch.empty(config.hidden))
        self.register_buffer("position", _sinusoids(patches(config) + 1, config.hidden), persistent=False)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, tokens, hidden]."""
        x = images
        for performer, (kernel, stride, padding) in zip(self.tokens, T2T_KERNELS):
            side = (x.shape[-1] + 2 * padding - kernel) // stride + 1
            x = performer(F.unfold(x, kernel, 1, padding, stride).transpose(1, 2))
            x = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        kernel, stride, padding = T2T_KERNELS[2]
        x = self.project(F.unfold(x, kernel, 1, padding, stride).transpose(1, 2))
        y: Tensor = self.dropout(_with_class_token(x, self.class_token) + self.position)
        return y


class Performer(nn.Module):
    """Attention of one head by random features, and an MLP of its width (Choromanski et al. 2021)."""

    features: Tensor

    def __init__(self, inputs: int, width: int, source: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.kqv = empty_linear(inputs, 3 * width)
        self.out = empty_linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = empty_linear(width, width)
        self.mlp_out = empty_linear(width, width)
        count = width // 2
        rows, _ = torch.linalg.qr(torch.randn(width, count, generator=source))
        self.register_buffer("features", rows.t().contiguous() * math.sqrt(count))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, inputs] -> [batch, tokens, width]."""
        key, query, value = self.kqv(self.norm(x)).chunk(3, -1)
        keys, queries = self._mapped(key), self._mapped(query)
        total = (queries * keys.sum(1, keepdim=True)).sum(-1, keepdim=True) + LEAST
        attended = queries @ (keys.transpose(1, 2) @ value.float()) / total
        x = value + self.out(attended.to(value.dtype))
        y: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return y

    def _mapped(self, x: Tensor) -> Tensor:
        """The positive features of a softmax kernel, fp32."""
        x, features = x.float(), self.features.float()
        squares = x.square().sum(-1, keepdim=True) / 2
        return torch.exp(x @ features.t() - squares) / math.sqrt(len(features))


def _with_class_token(x: Tensor, token: Optional[Tensor]) -> Tensor:
    return x if token is None else torch.cat([token.expand(x.shape[0], 1, -1), x], 1)


def _sinusoids(tokens: int, hidden: int) -> Tensor:
    """[tokens, hidden] (Vaswani et al. 2017)."""
    places = torch.arange(tokens, dtype=torch.float64)[:, None]
    waves = places / 10000 ** (2 * (torch.arange(hidden, dtype=torch.float64) // 2) / hidden)
    waves[:, 0::2], waves[:, 1::2] = waves[:, 0::2].sin(), waves[:, 1::2].cos()
    return waves.float()
