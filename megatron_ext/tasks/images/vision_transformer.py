"""Layers and heads of transformers over the tokens of an image."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Callable, List, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.tasks.images.image_task import ImageTask, empty_linear
from megatron_ext.tasks.linear import WeightGradients, linear


class VisionTransformerTask(ImageTask):
    """An embedding of an image's tokens, layers, and a head."""

    qkv_bias = True
    """Whether queries, keys and values have biases."""

    @abstractmethod
    def embedding(self) -> nn.Module:
        """What makes tokens of an image."""

    def makers(self) -> List[Callable[[], nn.Module]]:
        model = self._model
        layers = [
            partial(Layer, model, self.qkv_bias, model.drop_path * number / max(1, model.layers - 1))
            for number in range(model.layers)
        ]
        return [self.embedding, *layers, partial(ClassHead, model)]


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

    @property
    def draws(self) -> bool:
        """Whether its training draws random numbers."""
        return bool(self.drop_path or self.attention_dropout)

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
        return self.linear(x)


def with_class_token(x: Tensor, token: Optional[Tensor]) -> Tensor:
    return x if token is None else torch.cat([token.expand(x.shape[0], 1, -1), x], 1)
