"""Families of images: what leaves each block, its parameters and its operations."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import List, NamedTuple, Tuple

from megatron_ext.contract.models.model import IMAGES, SIZES, Family, ModelConfig
from megatron_ext.contract.models.pieces import ImageBlock, Shapes, Stack


class ImageFamily(Family):
    """Classes of images. No formula says what its blocks take."""

    learns = IMAGES
    measured = True
    counts_all = True
    lacks: Tuple[str, ...] = SIZES
    what_shrinks = "pools"
    """What leaves less of an image from block to block, in words."""
    options: Tuple[str, ...] = ("label_smoothing", "image_size", "channels", "classes")
    needs: Tuple[str, ...] = ("image_size", "classes")

    def smallest_image(self, model: ModelConfig) -> int:
        """Pixels of a side for which something is left after the last convolution, pool or split."""
        return 1

    def values_of_norm(self, model: ModelConfig) -> int:
        """The fewest values of a channel that a batch norm has of a sample; 2 where there is none."""
        return 2


class VisionTransformerFamily(ImageFamily):
    """Layers of a transformer over an image's tokens."""

    counts_all = False
    lacks: Tuple[str, ...] = ("sequence_length", "vocab_size", "padded_vocab_size")
    options: Tuple[str, ...] = (*ImageFamily.options, "attention_dropout", "ffn_hidden", "hidden_dropout", "drop_path")

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        return (Stack("layer", "layers", model.layers, model.sequence_length),)

    def all_kinds(self, model: ModelConfig) -> Tuple[Tuple[str, int], ...]:
        return (("embedding", 1), *model.kinds(), ("head", 1))

    def patches(self, model: ModelConfig) -> int:
        """Tokens of an image, without the class token."""
        raise NotImplementedError


class Window(NamedTuple):
    """How a convolution moves over an image."""

    stride: int
    padding: int
    pool: int
    """Kernel of the pool behind it, whose stride is 2; 0: there is none."""


class StackedFamily(ImageFamily):
    """Convolutions in a row, and three linear layers behind them."""

    pipedream_layers: Tuple[str, ...] = ("Conv2d", "Linear")
    most_places = 1
    """Places a side that the first linear layer sees, at most: larger maps are averaged."""
    drops_first = False
    """Whether dropout stands before a linear layer, and not behind it."""
    needs: Tuple[str, ...] = (*ImageFamily.needs, "ffn_hidden")
    options: Tuple[str, ...] = (*ImageFamily.options, "ffn_hidden", "hidden_dropout", "width")

    def window(self, model: ModelConfig, number: int) -> Window:
        """How the convolution of this number moves."""
        raise NotImplementedError

    def classifier(self, model: ModelConfig, channels: int, side: int) -> List[ImageBlock]:
        """Three linear layers."""
        inputs = channels * min(side, self.most_places) ** 2
        ends = [(inputs, model.inner), (model.inner, model.inner), (model.inner, classes_of(model))]
        return [
            ImageBlock(
                f"linear.{number}",
                f"linear-{before}-{after}" + "-logits" * (number == 2),
                linear("linear", before, after),
                before * after,
                (after,),
            )
            for number, (before, after) in enumerate(ends)
        ]


@lru_cache(maxsize=64)
def image_blocks(model: ModelConfig) -> Tuple[ImageBlock, ...]:
    """All blocks in their order, of a model of one of the families of images."""
    return model.traits.image_blocks(model)


def counted_blocks(model: ModelConfig) -> List[str]:
    """The names of those that a partition counts."""
    return [block.name for block in image_blocks(model) if block.counted]


def image_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for block in image_blocks(model) for shape in block.parameters.values())


def image_operations(model: ModelConfig) -> int:
    """Floating-point operations of a sample's forward pass: two for each product of a matrix or convolution."""
    return 2 * sum(block.products for block in image_blocks(model))


def depths_of(model: ModelConfig) -> Tuple[int, ...]:
    """Blocks of each stage of a resnet or vgg."""
    return tuple(int(part) for part in (model.depths or "").split("-"))


def classes_of(model: ModelConfig) -> int:
    assert model.classes is not None
    return model.classes


def side_after(side: int, kernel: int, stride: int, padding: int) -> int:
    """Places a side behind a window that moves over so many."""
    return (side + 2 * padding - kernel) // stride + 1


def encoder(model: ModelConfig, tokens: int, qkv_bias: bool) -> List[ImageBlock]:
    """The layers of a vision transformer, and its head."""
    hidden, inner = model.hidden, model.inner
    layer: Shapes = {
        **norm("attention_norm", hidden),
        **linear("qkv", hidden, 3 * hidden, qkv_bias),
        **linear("attention_out", hidden, hidden),
        **norm("mlp_norm", hidden),
        **linear("mlp_in", hidden, inner),
        **linear("mlp_out", inner, hidden),
    }
    products = tokens * (4 * hidden**2 + 2 * hidden * inner) + 2 * tokens**2 * hidden
    layers = [ImageBlock(f"layers.{n}", "layer", layer, products, (tokens, hidden)) for n in range(model.layers)]
    head: Shapes = {**norm("norm", hidden), **linear("linear", hidden, classes_of(model))}
    return [*layers, ImageBlock("head", "head", head, hidden * classes_of(model), (classes_of(model),), False)]


def convolution(number: int, inputs: int, outputs: int, kernel: int, side: int, after: int) -> ImageBlock:
    """Describe a convolution; `side` is that of its own result, and `after` that of a pool's behind it."""
    parameters: Shapes = {"conv.weight": (outputs, inputs, kernel, kernel), "conv.bias": (outputs,)}
    products = outputs * inputs * kernel**2 * side**2
    kind = f"conv-{inputs}-{outputs}-{side}" + "-pool" * (after != side)
    return ImageBlock(f"conv.{number}", kind, parameters, products, (outputs, after, after))


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
