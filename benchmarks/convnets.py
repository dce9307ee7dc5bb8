"""A user's file of two models, which `benchmarks.accuracy` profiles, predicts and runs (docs/your-model.md)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, SIDE = 32, 24


class Convolution(nn.Module):
    def __init__(self, inputs: int = WIDTH) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Skipping(nn.Module):
    """Seven convolutions of one kind, of which each but the first is added to all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Convolution(1)
        self.layers = nn.ModuleList(Convolution() for _ in range(6))
        self.head = nn.Linear(WIDTH * SIDE * SIDE // 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(torch.flatten(F.max_pool2d(x, 4), 1))


def plain() -> nn.Sequential:
    """Eleven blocks of five kinds."""
    layers = [Convolution() for _ in range(7)]
    return nn.Sequential(
        Convolution(1), *layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(WIDTH * SIDE * SIDE // 16, 10)
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


class Noise(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Images in memory, so that reading them takes no time of an iteration."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.images = torch.randn(256, 1, SIDE, SIDE, generator=source)
        self.labels = torch.randint(10, (256,), generator=source)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.images[number], self.labels[number]


def data(split: str, seed: int) -> Noise:
    return Noise(seed)
