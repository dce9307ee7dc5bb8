"""T2T-ViT: tokens of an image are overlapping patches that are joined step by step."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.families.t2t_vit import FAMILY, KERNELS
from megatron_ext.tasks.images.image_task import empty_linear
from megatron_ext.tasks.images.vision_transformer import VisionTransformerTask, with_class_token

LEAST = 1e-8
"""Added to what the performer divides by."""


class T2tVitTask(VisionTransformerTask):
    qkv_bias = False

    def embedding(self) -> nn.Module:
        source = torch.Generator().manual_seed(zlib.crc32(b"features", self._plan.train.seed))
        return TokensToToken(self._model, source)


class TokensToToken(nn.Module):
    """Overlapping patches that two performers and a projection join into tokens (Yuan et al. 2021, figure 4)."""

    position: Tensor

    def __init__(self, config: ModelConfig, source: torch.Generator) -> None:
        """`source` draws the performers' random features, which are not trained."""
        super().__init__()
        inputs = config.channels
        tokens = []
        for kernel, _, _ in KERNELS[:2]:
            tokens.append(Performer(inputs * kernel**2, config.width, source))
            inputs = config.width
        self.tokens = nn.ModuleList(tokens)
        self.project = empty_linear(inputs * KERNELS[2][0] ** 2, config.hidden)
        self.class_token = nn.Parameter(torch.empty(config.hidden))
        self.register_buffer("position", _sinusoids(FAMILY.patches(config) + 1, config.hidden), persistent=False)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, tokens, hidden]."""
        x = images
        for performer, (kernel, stride, padding) in zip(self.tokens, KERNELS):
            side = (x.shape[-1] + 2 * padding - kernel) // stride + 1
            x = performer(F.unfold(x, kernel, 1, padding, stride).transpose(1, 2))
            x = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        kernel, stride, padding = KERNELS[2]
        x = self.project(F.unfold(x, kernel, 1, padding, stride).transpose(1, 2))
        return self.dropout(with_class_token(x, self.class_token) + self.position)


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
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _mapped(self, x: Tensor) -> Tensor:
        """The positive features of a softmax kernel, fp32."""
        x, features = x.float(), self.features.float()
        squares = x.square().sum(-1, keepdim=True) / 2
        return torch.exp(x @ features.t() - squares) / math.sqrt(len(features))


def _sinusoids(tokens: int, hidden: int) -> Tensor:
    """[tokens, hidden] (Vaswani et al. 2017)."""
    places = torch.arange(tokens, dtype=torch.float64)[:, None]
    waves = places / 10000 ** (2 * (torch.arange(hidden, dtype=torch.float64) // 2) / hidden)
    waves[:, 0::2], waves[:, 1::2] = waves[:, 0::2].sin(), waves[:, 1::2].cos()
    return waves.float()


TASK = T2tVitTask
