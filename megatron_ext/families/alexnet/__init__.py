"""AlexNet: five convolutions and three linear layers (Krizhevsky 2014)."""

from __future__ import annotations

from typing import List, Tuple

from megatron_ext.contract.models.images import StackedFamily, Window, convolution, side_after
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import ImageBlock

LAYERS = ((1, 11, 4, 2, True), (3, 5, 1, 2, True), (6, 3, 1, 1, False), (4, 3, 1, 1, False), (4, 3, 1, 1, True))
"""Width as a multiple of the first one, kernel, stride, padding, and whether a pool follows."""


class _AlexNet(StackedFamily):
    name = "alexnet"
    summary = "Five convolutions and three linear layers."
    most_places = 6
    drops_first = True

    def smallest_image(self, model: ModelConfig) -> int:
        return 63

    def window(self, model: ModelConfig, number: int) -> Window:
        _, _, stride, padding, pools = LAYERS[number]
        return Window(stride, padding, 3 if pools else 0)

    def image_blocks(self, model: ModelConfig) -> Tuple[ImageBlock, ...]:
        assert model.image_size is not None
        blocks: List[ImageBlock] = []
        channels, side = model.channels, model.image_size
        for number, (multiple, kernel, stride, padding, pools) in enumerate(LAYERS):
            side = side_after(side, kernel, stride, padding)
            after = side_after(side, 3, 2, 0) if pools else side
            blocks.append(convolution(number, channels, model.width * multiple, kernel, side, after))
            channels, side = model.width * multiple, after
        return (*blocks, *self.classifier(model, channels, side))


FAMILY = _AlexNet()
