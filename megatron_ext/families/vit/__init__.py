"""ViT: a transformer over the patches of an image (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from typing import Dict, Tuple

from megatron_ext.contract.models.hf_config import HfConfig, unless
from megatron_ext.contract.models.images import VisionTransformerFamily, encoder
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import ImageBlock, Shapes


class _Vit(VisionTransformerFamily):
    name = "vit"
    summary = "A transformer over the patches of an image that classifies it (docs/images.md), like the next four."
    model_types = ("vit",)
    needs = (*VisionTransformerFamily.needs, "patch_size")
    options = (*VisionTransformerFamily.options, "patch_size", "class_token")

    def patches(self, model: ModelConfig) -> int:
        assert model.image_size is not None and model.patch_size is not None
        return (model.image_size // model.patch_size) ** 2

    def image_blocks(self, model: ModelConfig) -> Tuple[ImageBlock, ...]:
        assert model.patch_size is not None
        tokens = self.patches(model) + model.class_token
        patch = model.channels * model.patch_size**2
        embedding: Shapes = {
            "patch.weight": (model.hidden, model.channels, model.patch_size, model.patch_size),
            "patch.bias": (model.hidden,),
            "position": (tokens, model.hidden),
        }
        if model.class_token:
            embedding["class_token"] = (model.hidden,)
        products = self.patches(model) * patch * model.hidden
        first = ImageBlock("embedding", "embedding", embedding, products, (tokens, model.hidden), False)
        return (first, *encoder(model, tokens, qkv_bias=True))

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        config.must("hidden_act", "gelu", "the MLP of tdpp's ViT uses GELU")
        config.must("qkv_bias", True, "the attention of tdpp's ViT has biases")
        return {
            **config.encoder(),
            "image_size": config.size("image_size", 224),
            "patch_size": config.size("patch_size", 16),
            **unless({"channels": config.size("num_channels", 3)}, channels=3),
            "classes": config.classes(),
        }


FAMILY = _Vit()
