"""ResNet: bottlenecks of convolutions with batch norms (He et al. 2016)."""

from __future__ import annotations

import math
from typing import Dict, Tuple

from megatron_ext.contract.models.hf_config import HfConfig, unless
from megatron_ext.contract.models.images import (
    ImageFamily,
    classes_of,
    depths_of,
    image_blocks,
    linear,
    norm,
    side_after,
)
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import ImageBlock, Shapes

EXPANSION = 4
"""The outputs of a bottleneck are so many times its inner channels."""


class _ResNet(ImageFamily):
    name = "resnet"
    summary = "Bottlenecks of convolutions with batch norms, such as ResNet-50."
    model_types = ("resnet",)
    pipedream_layers = ("Conv2d", "Linear")
    pipedream_kernel = 2
    needs = (*ImageFamily.needs, "depths")
    options = (*ImageFamily.options, "width", "depths")

    def values_of_norm(self, model: ModelConfig) -> int:
        return min(block.gives[1] ** 2 for block in image_blocks(model)[:-1])

    def image_blocks(self, model: ModelConfig) -> Tuple[ImageBlock, ...]:
        assert model.image_size is not None
        channels, side = model.width, side_after(model.image_size, 7, 2, 3)
        stem: Shapes = {"conv.weight": (channels, model.channels, 7, 7), **norm("norm", channels)}
        products = channels * model.channels * 49 * side**2
        side = side_after(side, 3, 2, 1)
        blocks = [ImageBlock("stem", "stem", stem, products, (channels, side, side))]
        for stage, depth in enumerate(depths_of(model)):
            inner = model.width << stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                block = _bottleneck(f"stages.{stage}.{number}", channels, inner, side, stride)
                blocks.append(block)
                channels, side = block.gives[:2]
        head = linear("linear", channels, classes_of(model))
        return (*blocks, ImageBlock("head", "head", head, channels * classes_of(model), (classes_of(model),)))

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        config.must("layer_type", "bottleneck", "tdpp's ResNet has bottleneck blocks")
        config.must("hidden_act", "relu", "tdpp's ResNet uses ReLU")
        config.must("downsample_in_first_stage", False, "the first stage of tdpp's ResNet does not downsample")
        config.must(
            "downsample_in_bottleneck", False, "tdpp's ResNet downsamples in the 3 x 3 convolution of a bottleneck"
        )
        width, depths = config.size("embedding_size", 64), config.given("depths", [3, 4, 6, 3])
        if not isinstance(depths, list) or not all(type(depth) is int and depth > 0 for depth in depths):
            raise config.refuse("depths", depths, "must be a list of whole numbers of at least 1")
        widths = config.given("hidden_sizes", [256, 512, 1024, 2048])
        expected = [4 * width * 2**stage for stage in range(len(depths))]
        if widths != expected:
            raise config.refuse("hidden_sizes", widths, f"in tdpp they follow from embedding_size={width}: {expected}")
        config.notes.append("config.json gives no image size; model.image_size may be changed.")
        return {
            "depths": "-".join(map(str, depths)),
            **unless({"width": width}, width=64),
            "image_size": 224,
            **unless({"channels": config.size("num_channels", 3)}, channels=3),
            "classes": config.classes(),
        }


def _bottleneck(name: str, inputs: int, inner: int, side: int, stride: int) -> ImageBlock:
    outputs, after = inner * EXPANSION, side_after(side, 3, stride, 1)
    shapes = [(inner, inputs, 1, 1), (inner, inner, 3, 3), (outputs, inner, 1, 1)]
    sides = [side, after, after]
    parameters: Shapes = {}
    products = 0
    if inputs != outputs or stride > 1:
        shapes.append((outputs, inputs, 1, 1))
        sides.append(after)
    for part, shape, of in zip(("0", "1", "2", "shortcut"), shapes, sides):
        parameters[f"conv_{part}.weight"] = shape
        parameters.update(norm(f"norm_{part}", shape[0]))
        products += math.prod(shape) * of**2
    kind = f"bottleneck-{inputs}-{inner}-{side}" + "-halved" * (stride > 1)
    return ImageBlock(name, kind, parameters, products, (outputs, after, after))


FAMILY = _ResNet()
