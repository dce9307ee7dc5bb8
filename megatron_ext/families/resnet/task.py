"""ResNet: bottlenecks with batch norms that every layout trains alike, for their statistics are a micro-batch's."""

from __future__ import annotations

from functools import partial
from typing import Callable, List, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.images import image_blocks
from megatron_ext.families.resnet import EXPANSION
from megatron_ext.tasks.images.image_task import ConvolutionalTask, empty_convolution, empty_linear
from megatron_ext.tasks.task import Running

MOMENTUM = 0.1
"""The part that an iteration's mean has in the running statistics."""


class ResNetTask(ConvolutionalTask):
    def makers(self) -> List[Callable[[], nn.Module]]:
        model, blocks = self._model, image_blocks(self._model)
        epsilon = model.norm_epsilon
        found: List[Callable[[], nn.Module]] = [partial(Stem, model.channels, model.width, epsilon)]
        for block in blocks[1:-1]:
            inner, inputs = block.parameters["conv_0.weight"][:2]
            halves = block.name.split(".")[1] != "0" and block.name.endswith(".0")
            found.append(partial(Bottleneck, inputs, inner, 2 if halves else 1, epsilon))
        classes, inputs = blocks[-1].parameters["linear.weight"]
        return [*found, partial(Pooled, inputs, classes)]


class BatchNorm(Running):
    """Over [batch, channels, height, width] (Ioffe and Szegedy 2015)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("gathered", torch.zeros(2 * width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape; in training by the micro-batch's own statistics, else by the running ones."""
        weight, bias = self.weight.float(), self.bias.float()
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.epsilon)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=self.epsilon)
        with torch.no_grad():
            self.gathered += torch.cat([mean, var])
        return y

    def update(self, mean: Tensor) -> None:
        """[2 x channels]: of the means and of the variances."""
        for running, found in zip((self.running_mean, self.running_var), mean.chunk(2)):
            running.lerp_(found, MOMENTUM)


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
        return self.linear(x.mean((2, 3)))


TASK = ResNetTask
