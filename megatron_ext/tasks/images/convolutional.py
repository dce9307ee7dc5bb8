"""The blocks of AlexNet, VGG and ResNet."""

from __future__ import annotations

from typing import Optional

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.images import EXPANSION
from megatron_ext.tasks.images.batch_norm import BatchNorm
from megatron_ext.tasks.images.empty import empty_convolution, empty_linear
from megatron_ext.tasks.linear import WeightGradients, linear


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


class Stem(nn.Module):
    """The beginning of a ResNet."""

    def __init__(self, inputs: int, outputs: int, epsilon: float) -> None:
        super().__init__()
        self.conv = empty_convolution(inputs, outputs, 7, 2, 3, bias=False)
        self.norm = BatchNorm(outputs, epsilon)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(images))), 3, 2, 1)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; a stride is the second one's."""

    def __init__(self, inputs: int, inner: int, stride: int, epsilon: float) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        self.conv_0 = empty_convolution(inputs, inner, 1, bias=False)
        self.norm_0 = BatchNorm(inner, epsilon)
        self.conv_1 = empty_convolution(inner, inner, 3, stride, 1, bias=False)
        self.norm_1 = BatchNorm(inner, epsilon)
        self.conv_2 = empty_convolution(inner, outputs, 1, bias=False)
        self.norm_2 = BatchNorm(outputs, epsilon)
        self.conv_shortcut: Optional[nn.Conv2d] = None
        if inputs != outputs or stride > 1:
            self.conv_shortcut = empty_convolution(inputs, outputs, 1, stride, bias=False)
            self.norm_shortcut = BatchNorm(outputs, epsilon)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_0(self.conv_0(x)))
        y = F.relu(self.norm_1(self.conv_1(y)))
        y = self.norm_2(self.conv_2(y))
        if self.conv_shortcut is not None:
            x = self.norm_shortcut(self.conv_shortcut(x))
        return F.relu(x + y)


class Pooled(nn.Module):
    """The end of a ResNet: a linear layer over the mean of all places."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = empty_linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mean((2, 3)))
        return y
