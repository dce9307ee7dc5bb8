"""Modules as users write them, with their loss and their data: what `model.code` leads to in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES = 23
TOKENS, WIDTH, LENGTH = 17, 16, 6


class Made(torch.utils.data.Dataset):
    """Samples drawn from a seed; `kind` is what the model takes."""

    def __init__(self, kind: str, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.images = torch.randn(SAMPLES, 3, 8, 8, generator=source)
        self.labels = torch.randint(5, (SAMPLES,), generator=source)
        self.tokens = torch.randint(TOKENS, (SAMPLES, 2, LENGTH), generator=source)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        images, (source, target) = self.images[number], self.tokens[number]
        return {
            "image": lambda: (images, int(self.labels[number])),
            "picture": lambda: (images, images.roll(1, -1).numpy()),
            "tokens": lambda: (source, target),
            "pair": lambda: ((source, target), target.roll(-1)),
            "named": lambda: ({"target": target, "source": source}, {"next": target.roll(-1), "label": source[0]}),
        }[self.kind]()


class Residual(nn.Module):
    """A CNN with functional relu, add and flatten, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])
        self.second = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        for one, other in zip(self.first, self.second, strict=True):
            x = F.relu(x + other(self.relu(one(x))), inplace=True)
        x = F.max_pool2d(self.dropout(x), 2)
        return self.head(x.view(x.size(0), -1))


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Down(3, 4), Down(4, 8), Down(8, 8)
        self.up2, self.up1 = Down(16, 4), Down(8, 4)
        self.pool = nn.AvgPool2d(2)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.middle(self.pool(b))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2.0), a], dim=1))
        return self.last(a) + x


class Translator(nn.Module):
    """torch's own transformer, with one embedding for source, target and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.1, batch_first=True)
        self.register_buffer("scale", torch.tensor(WIDTH**0.5))

    def forward(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        ahead = torch.ones(target.shape[1], target.shape[1], device=target.device, dtype=torch.bool).triu(1)
        assert mask is None
        x = self.embedding(source) * self.scale + self.positions
        y = self.embedding(target) * self.scale + self.positions
        return F.linear(self.transformer(x, y, tgt_mask=ahead), self.embedding.weight)


class SharedEmbedding(nn.Module):
    """The head has the embedding's matrix, and one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.mix(x))
        x = x + torch.tanh(self.mix(x))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """Dropout over the results of an LSTM, which lie in memory by position first, then by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        found, _ = self.lstm(x)
        return self.head(self.dropout(found) + x)


class Attention(nn.Module):
    """Parameters of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        scores = (x @ self.query) @ memory.transpose(1, 2)
        scores = scores.masked_fill(padding.unsqueeze(1), -1e4)
        return torch.tanh(self.out(torch.cat([x, scores.softmax(-1) @ memory], -1)))


class Seq2Seq(nn.Module):
    """LSTMs that hand their state on, attention, skips, and a mask, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder1 = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.encoder2 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder1 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = Attention()
        self.decoder2 = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == 0
        x = self.source(source)
        x, _ = self.encoder1(x)
        memory, state = self.encoder2(x)
        memory = memory + x
        y = self.target(target)
        hidden, state = self.decoder1(y, state)
        context = self.attention(hidden, memory, padding)
        hidden2, _ = self.decoder2(torch.cat([context, y], -1), state)
        return self.head(hidden2 + hidden)


class TwoHeads(nn.Module):
    """Several inputs by name and several outputs, of which one is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.next = nn.Linear(WIDTH, TOKENS)
        self.label = nn.Linear(WIDTH, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Any]:
        hidden, last = self.gru(self.frozen(self.embedding(source)))
        y = hidden + self.embedding(target)
        return {"next": self.next(y), "more": (self.label(last[-1]), target)}


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def loss(outputs: Any, targets: Any) -> Tensor:
    """The mean over the micro-batch, of whatever these models give."""
    if isinstance(outputs, dict):
        label, target = outputs["more"]
        both = F.cross_entropy(outputs["next"].flatten(0, 1), targets["next"].flatten())
        return both + F.cross_entropy(label, targets["label"]) + 0.0 * target.sum()
    if outputs.dim() == 4:
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def data(split: str, seed: int) -> Made:
    return Made("image", seed)
