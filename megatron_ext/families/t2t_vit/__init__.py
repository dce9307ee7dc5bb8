"""Tokens-to-Token ViT: a transformer over tokens that are joined step by step (Yuan et al. 2021)."""

from __future__ import annotations

from typing import List, Tuple

from megatron_ext.contract.models.images import VisionTransformerFamily, encoder, linear, norm, side_after
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import ImageBlock, Shapes

KERNELS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
"""Kernel, stride and padding of the three soft splits."""


class _T2tVit(VisionTransformerFamily):
    name = "t2t_vit"
    summary = "The same over tokens that are joined step by step (Tokens-to-Token ViT)."
    what_shrinks = "splits"
    options = (*VisionTransformerFamily.options, "width")

    def smallest_image(self, model: ModelConfig) -> int:
        """The soft splits behind the first one leave one token at least."""
        return KERNELS[0][0] - 2 * KERNELS[0][2]

    def patches(self, model: ModelConfig) -> int:
        return sides(model)[-1] ** 2

    def image_blocks(self, model: ModelConfig) -> Tuple[ImageBlock, ...]:
        tokens, width = self.patches(model) + 1, model.width
        parameters: Shapes = {}
        products, channels = 0, model.channels
        for number, side in enumerate(sides(model)[:2]):
            inputs = channels * KERNELS[number][0] ** 2
            name = f"tokens.{number}"
            parameters.update(norm(f"{name}.norm", inputs))
            parameters.update(linear(f"{name}.kqv", inputs, 3 * width))
            parameters.update(linear(f"{name}.out", width, width))
            parameters.update(norm(f"{name}.mlp_norm", width))
            parameters.update(linear(f"{name}.mlp_in", width, width))
            parameters.update(linear(f"{name}.mlp_out", width, width))
            features = width // 2
            products += side**2 * (3 * inputs * width + 3 * width**2 + 4 * width * features)
            channels = width
        last = width * KERNELS[2][0] ** 2
        parameters.update(linear("project", last, model.hidden))
        parameters["class_token"] = (model.hidden,)
        products += self.patches(model) * last * model.hidden
        first = ImageBlock("embedding", "embedding", parameters, products, (tokens, model.hidden), False)
        return (first, *encoder(model, tokens, qkv_bias=False))


def sides(model: ModelConfig) -> List[int]:
    """Tokens a side behind each soft split."""
    assert model.image_size is not None
    found, side = [], model.image_size
    for kernel, stride, padding in KERNELS:
        side = side_after(side, kernel, stride, padding)
        found.append(side)
    return found


FAMILY = _T2tVit()
