"""The blocks of image models, as far as they are known without torch: parameters, operations, and what leaves each."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Dict, List, NamedTuple, Tuple

from megatron_ext.contract.models.model import ALEXNET, RESNET, T2T_VIT, VGG, VIT, ModelConfig

Shapes = Dict[str, Tuple[int, ...]]
T2T_KERNELS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
"""Kernel, stride and padding of the three soft splits of a T2T-ViT (Yuan et al. 2021)."""
ALEXNET_LAYERS = ((1, 11, 4, 2, True), (3, 5, 1, 2, True), (6, 3, 1, 1, False), (4, 3, 1, 1, False), (4, 3, 1, 1, True))
"""Width as a multiple of the first one, kernel, stride, padding, and whether a pool follows (Krizhevsky 2014)."""
VGG_WIDTHS = (1, 2, 4, 8, 8)
"""Of its stages, as multiples of the first one (Simonyan and Zisserman 2015)."""
MOST_OF_VGG, MOST_OF_ALEXNET = 7, 6
"""Places a side that the first linear layer sees, at most: larger maps are averaged."""
EXPANSION = 4
"""Of a bottleneck: its outputs are so many times its inner channels (He et al. 2016)."""


class ImageBlock(NamedTuple):
    """One block of the whole model."""

    name: str
    kind: str
    parameters: Shapes
    """Those that are trained."""
    products: int
    """Multiplications of a sample's forward pass."""
    gives: Tuple[int, ...]
    """The shape of what leaves it, of a sample: [channels, height, width], [tokens, hidden] or [numbers]."""
    counted: bool = True
    """Whether a partition counts it; else it is on the first or on the last stage."""


def depths_of(model: ModelConfig) -> Tuple[int, ...]:
    """Blocks of each stage of a resnet or vgg."""
    return tuple(int(part) for part in (model.depths or "").split("-"))


@lru_cache(maxsize=64)
def image_blocks(model: ModelConfig) -> Tuple[ImageBlock, ...]:
    """All blocks in their order, of a model of one of the families of images."""
    families = {VIT: _vit, T2T_VIT: _t2t_vit, RESNET: _resnet, VGG: _vgg, ALEXNET: _alexnet}
    return tuple(families[model.family](model))


def counted_blocks(model: ModelConfig) -> List[str]:
    """The names of those that a partition counts."""
    return [block.name for block in image_blocks(model) if block.counted]


def image_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for block in image_blocks(model) for shape in block.parameters.values())


def image_operations(model: ModelConfig) -> int:
    """Floating-point operations of a sample's forward pass: two for each product of a matrix or convolution."""
    return 2 * sum(block.products for block in image_blocks(model))


def smallest_image(model: ModelConfig) -> int:
    """Pixels of a side for which something is left after the last convolution, pool or split."""
    if model.family == VGG:
        return 1 << len(depths_of(model))
    if model.family == T2T_VIT:
        return T2T_KERNELS[0][0] - 2 * T2T_KERNELS[0][2]  # the soft splits behind it leave one token at least
    return 63 if model.family == ALEXNET else 1


def values_of_norm(model: ModelConfig) -> int:
    """The fewest values of a channel that a batch norm has of a sample; 2 where there is none."""
    if model.family != RESNET:
        return 2
    return min(block.gives[1] ** 2 for block in image_blocks(model)[:-1])


def patches(model: ModelConfig) -> int:
    """Tokens of an image, without the class token."""
    assert model.image_size is not None
    if model.family == VIT:
        assert model.patch_size is not None
        return (model.image_size // model.patch_size) ** 2
    return t2t_sides(model)[-1] ** 2


def t2t_sides(model: ModelConfig) -> List[int]:
    """Tokens a side behind each soft split."""
    assert model.image_size is not None
    sides, side = [], model.image_size
    for kernel, stride, padding in T2T_KERNELS:
        side = _side(side, kernel, stride, padding)
        sides.append(side)
    return sides


def _side(side: int, kernel: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - kernel) // stride + 1


def _vit(model: ModelConfig) -> List[ImageBlock]:
    assert model.patch_size is not None
    tokens = patches(model) + model.class_token
    patch = model.channels * model.patch_size**2
    embedding: Shapes = {
        "patch.weight": (model.hidden, model.channels, model.patch_size, model.patch_size),
        "patch.bias": (model.hidden,),
        "position": (tokens, model.hidden),
    }
    if model.class_token:
        embedding["class_token"] = (model.hidden,)
    first = ImageBlock(
        "embedding", "embedding", embedding, patches(model) * patch * model.hidden, (tokens, model.hidden), False
    )
    return [first, *_encoder(model, tokens, qkv_bias=True)]


def _t2t_vit(model: ModelConfig) -> List[ImageBlock]:
    tokens, width = patches(model) + 1, model.width
    parameters: Shapes = {}
    products, channels = 0, model.channels
    for number, side in enumerate(t2t_sides(model)[:2]):
        inputs = channels * T2T_KERNELS[number][0] ** 2
        name = f"tokens.{number}"
        parameters.update(_norm(f"{name}.norm", inputs))
        parameters.update(_linear(f"{name}.kqv", inputs, 3 * width))
        parameters.update(_linear(f"{name}.out", width, width))
        parameters.update(_norm(f"{name}.mlp_norm", width))
        parameters.update(_linear(f"{name}.mlp_in", width, width))
        parameters.update(_linear(f"{name}.mlp_out", width, width))
        features = width // 2
        products += side**2 * (3 * inputs * width + 3 * width**2 + 4 * width * features)
        channels = width
    last = width * T2T_KERNELS[2][0] ** 2
    parameters.update(_linear("project", last, model.hidden))
    parameters["class_token"] = (model.hidden,)
    products += patches(model) * last * model.hidden
    first = ImageBlock("embedding", "embedding", parameters, products, (tokens, model.hidden), False)
    return [first, *_encoder(model, tokens, qkv_bias=False)]


def _encoder(model: ModelConfig, tokens: int, qkv_bias: bool) -> List[ImageBlock]:
    """The layers of a vision transformer, and its head."""
    hidden, inner = model.hidden, model.inner
    layer: Shapes = {
        **_norm("attention_norm", hidden),
        **_linear("qkv", hidden, 3 * hidden, qkv_bias),
        **_linear("attention_out", hidden, hidden),
        **_norm("mlp_norm", hidden),
        **_linear("mlp_in", hidden, inner),
        **_linear("mlp_out", inner, hidden),
    }
    products = tokens * (4 * hidden**2 + 2 * hidden * inner) + 2 * tokens**2 * hidden
    layers = [ImageBlock(f"layers.{n}", "layer", layer, products, (tokens, hidden)) for n in range(model.layers)]
    head: Shapes = {**_norm("norm", hidden), **_linear("linear", hidden, _classes(model))}
    return [*layers, ImageBlock("head", "head", head, hidden * _classes(model), (_classes(model),), False)]


def _vgg(model: ModelConfig) -> List[ImageBlock]:
    assert model.image_size is not None
    blocks: List[ImageBlock] = []
    channels, side = model.channels, model.image_size
    for stage, depth in enumerate(depths_of(model)):
        width = model.width * VGG_WIDTHS[stage]
        for number in range(depth):
            pools = number == depth - 1
            blocks.append(_convolution(len(blocks), channels, width, 3, side, side // 2 if pools else side))
            channels = width
        side //= 2
    return [*blocks, *_classifier(model, channels * min(side, MOST_OF_VGG) ** 2)]


def _alexnet(model: ModelConfig) -> List[ImageBlock]:
    assert model.image_size is not None
    blocks: List[ImageBlock] = []
    channels, side = model.channels, model.image_size
    for number, (multiple, kernel, stride, padding, pools) in enumerate(ALEXNET_LAYERS):
        side = _side(side, kernel, stride, padding)
        after = _side(side, 3, 2, 0) if pools else side
        blocks.append(_convolution(number, channels, model.width * multiple, kernel, side, after))
        channels, side = model.width * multiple, after
    return [*blocks, *_classifier(model, channels * min(side, MOST_OF_ALEXNET) ** 2)]


def _convolution(number: int, inputs: int, outputs: int, kernel: int, side: int, after: int) -> ImageBlock:
    """Of which `side` is that of its own result, and `after` that of a pool's behind it."""
    parameters: Shapes = {"conv.weight": (outputs, inputs, kernel, kernel), "conv.bias": (outputs,)}
    products = outputs * inputs * kernel**2 * side**2
    kind = f"conv-{inputs}-{outputs}-{side}" + "-pool" * (after != side)
    return ImageBlock(f"conv.{number}", kind, parameters, products, (outputs, after, after))


def _classifier(model: ModelConfig, inputs: int) -> List[ImageBlock]:
    """Three linear layers."""
    ends = [(inputs, model.inner), (model.inner, model.inner), (model.inner, _classes(model))]
    return [
        ImageBlock(
            f"linear.{number}",
            f"linear-{before}-{after}" + "-logits" * (number == 2),
            _linear("linear", before, after),
            before * after,
            (after,),
        )
        for number, (before, after) in enumerate(ends)
    ]


def _resnet(model: ModelConfig) -> List[ImageBlock]:
    assert model.image_size is not None
    channels, side = model.width, _side(model.image_size, 7, 2, 3)
    stem: Shapes = {"conv.weight": (channels, model.channels, 7, 7), **_norm("norm", channels)}
    products = channels * model.channels * 49 * side**2
    side = _side(side, 3, 2, 1)
    blocks = [ImageBlock("stem", "stem", stem, products, (channels, side, side))]
    for stage, depth in enumerate(depths_of(model)):
        inner = model.width << stage
        for number in range(depth):
            stride = 2 if stage and not number else 1
            block = _bottleneck(f"stages.{stage}.{number}", channels, inner, side, stride)
            blocks.append(block)
            channels, side = block.gives[:2]
    head = _linear("linear", channels, _classes(model))
    return [*blocks, ImageBlock("head", "head", head, channels * _classes(model), (_classes(model),))]


def _bottleneck(name: str, inputs: int, inner: int, side: int, stride: int) -> ImageBlock:
    outputs, after = inner * EXPANSION, _side(side, 3, stride, 1)
    shapes = [(inner, inputs, 1, 1), (inner, inner, 3, 3), (outputs, inner, 1, 1)]
    sides = [side, after, after]
    parameters: Shapes = {}
    products = 0
    if inputs != outputs or stride > 1:
        shapes.append((outputs, inputs, 1, 1))
        sides.append(after)
    for part, shape, of in zip(("0", "1", "2", "shortcut"), shapes, sides):
        parameters[f"conv_{part}.weight"] = shape
        parameters.update(_norm(f"norm_{part}", shape[0]))
        products += math.prod(shape) * of**2
    kind = f"bottleneck-{inputs}-{inner}-{side}" + "-halved" * (stride > 1)
    return ImageBlock(name, kind, parameters, products, (outputs, after, after))


def _classes(model: ModelConfig) -> int:
    assert model.classes is not None
    return model.classes


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
