"""Convolutions in a row with three linear layers behind them: AlexNet and VGG."""

from __future__ import annotations

import math
from functools import partial
from typing import Callable, List, Optional

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.images import StackedFamily, image_blocks
from megatron_ext.tasks.images.image_task import ImageTask, empty_convolution, empty_linear
from megatron_ext.tasks.linear import WeightGradients, linear


class ConvolutionalTask(ImageTask):
    """Blocks with ReLU, whose weights begin as such blocks need."""

    def std_of_weight(self, weight: Tensor) -> float:
        """Return the standard deviation of He et al. 2015; the logits have no ReLU behind them."""
        outputs, inputs = weight.shape[0], weight[0].numel()
        if weight.dim() == 4:
            return math.sqrt(2.0 / (outputs * weight[0, 0].numel()))
        return math.sqrt((1.0 if outputs == self._model.classes else 2.0) / inputs)


class StackedTask(ConvolutionalTask):
    """AlexNet and VGG, whose descriptions say how they differ."""

    def makers(self) -> List[Callable[[], nn.Module]]:
        model, family, blocks = self._model, self._model.traits, image_blocks(self._model)
        assert isinstance(family, StackedFamily)
        found: List[Callable[[], nn.Module]] = []
        first = next(number for number, block in enumerate(blocks) if block.name == "linear.0")
        for number, block in enumerate(blocks[:first]):
            outputs, inputs, kernel, _ = block.parameters["conv.weight"]
            found.append(partial(Convolution, inputs, outputs, kernel, *family.window(model, number)))
        for number, block in enumerate(blocks[first:]):
            outputs, inputs = block.parameters["linear.weight"]
            places = 0 if number else family.most_places
            last, dropout = number == 2, model.hidden_dropout
            found.append(
                partial(Linear, inputs, outputs, dropout, places=places, drops_first=family.drops_first, last=last)
            )
        return found


class Convolution(nn.Module):
    """A convolution with ReLU, and a pool over `pool` x `pool` places, every second one, where there is one."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int, pool: int) -> None:
        super().__init__()
        self.conv = empty_convolution(inputs, outputs, kernel, stride, padding)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return F.max_pool2d(x, self.pool, 2) if self.pool else x


class Linear(nn.Module):
    """A linear layer of a classifier, which sees at most `places` x `places` of an image's map."""

    def __init__(
        self, inputs: int, outputs: int, dropout: float, *, places: int = 0, drops_first: bool, last: bool
    ) -> None:
        """Dropout comes before the layer (AlexNet), or behind it and its ReLU (VGG); the last one has no ReLU."""
        super().__init__()
        self.later: Optional[WeightGradients] = None
        """Where its weight's gradient is left to: VGG's largest matrix has three quarters of the model."""
        self.linear = empty_linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)
        self.places = places
        self.drops_first = drops_first
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        if self.places:
            side = min(x.shape[-1], self.places)
            x = (F.adaptive_avg_pool2d(x, side) if side < x.shape[-1] else x).flatten(1)
        if self.last:
            return self._linear(x)
        if self.drops_first:
            return F.relu(self._linear(self.dropout(x)))
        y: Tensor = self.dropout(F.relu(self._linear(x)))
        return y

    def _linear(self, x: Tensor) -> Tensor:
        return linear(x, self.linear.weight, self.linear.bias, self.later)
