"""ViT: tokens of an image are its patches."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.families.vit import FAMILY
from megatron_ext.tasks.images.image_task import empty_convolution
from megatron_ext.tasks.images.vision_transformer import VisionTransformerTask, with_class_token


class VitTask(VisionTransformerTask):
    def embedding(self) -> nn.Module:
        return PatchEmbedding(self._model)


class PatchEmbedding(nn.Module):
    """Patches as tokens, with learned positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.patch_size is not None
        self.patch = empty_convolution(config.channels, config.hidden, config.patch_size, config.patch_size)
        self.position = nn.Parameter(torch.empty(FAMILY.patches(config) + config.class_token, config.hidden))
        self.class_token: Optional[nn.Parameter] = None
        if config.class_token:
            self.class_token = nn.Parameter(torch.empty(config.hidden))
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, tokens, hidden]."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        return self.dropout(with_class_token(x, self.class_token) + self.position)


TASK = VitTask
