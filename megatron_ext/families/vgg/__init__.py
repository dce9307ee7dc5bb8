"""VGG: stages of convolutions and three linear layers (Simonyan and Zisserman 2015)."""

from __future__ import annotations

from itertools import accumulate
from typing import List, Tuple

from megatron_ext.contract.models.images import ImageFamily, StackedFamily, Window, convolution, depths_of
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import ImageBlock

WIDTHS = (1, 2, 4, 8, 8)
"""Widths of its stages, as multiples of the first one."""


class _Vgg(StackedFamily):
    name = "vgg"
    summary = "Stages of convolutions and three linear layers, such as VGG-16."
    most_places = 7
    needs = (*ImageFamily.needs, "depths", "ffn_hidden")
    options = (*StackedFamily.options, "depths")

    def smallest_image(self, model: ModelConfig) -> int:
        return 1 << len(depths_of(model))

    def window(self, model: ModelConfig, number: int) -> Window:
        """A pool stands behind the last convolution of each stage."""
        return Window(1, 1, 2 if number + 1 in accumulate(depths_of(model)) else 0)

    def image_blocks(self, model: ModelConfig) -> Tuple[ImageBlock, ...]:
        assert model.image_size is not None
        blocks: List[ImageBlock] = []
        channels, side = model.channels, model.image_size
        for stage, depth in enumerate(depths_of(model)):
            width = model.width * WIDTHS[stage]
            for number in range(depth):
                pools = number == depth - 1
                blocks.append(convolution(len(blocks), channels, width, 3, side, side // 2 if pools else side))
                channels = width
            side //= 2
        return (*blocks, *self.classifier(model, channels, side))


FAMILY = _Vgg()
