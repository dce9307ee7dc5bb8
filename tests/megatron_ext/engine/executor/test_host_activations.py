"""Activations that wait in the host's memory are the same ones: every layout trains the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.contract import parallel_config
from megatron_ext.engine.executor.host_activations import HostActivations
from tests.support.megatron_ext.engine_run import EngineRun

OFFLOADED = "parallel.offload=activations"
TWO = "parallel.data=1 parallel.pipeline=2 parallel.partition=1-2"
DROPPED = "model.hidden_dropout=0.1 model.attention_dropout=0.1"
LLAMA = "model.position_embedding_type=rope model.normalization=RMSNorm model.swiglu=true"
LAYOUTS = {
    "alone": "parallel.data=1 parallel.pipeline=1",
    "1f1b": f"{TWO} {DROPPED}",
    "gpipe-llama": f"{TWO} parallel.schedule=gpipe {LLAMA}",
    "zb-h1": f"{TWO} parallel.schedule=zb_h1",
    "interleaved": f"{TWO} parallel.chunks=2 parallel.partition=1-1-0-1 parallel.schedule=interleaved",
    "tensor": f"{TWO} parallel.tensor=2 parallel.sequence_parallel=true",
    "sharded": "parallel.data=2 parallel.pipeline=1 parallel.sharded_optimizer=true train.precision=bf16",
    "both": f"{TWO} parallel.offload=both",
    "compiled": "parallel.data=1 parallel.pipeline=1 train.compile=true",
}


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a tiny model keeps is enough."""
    monkeypatch.setattr(parallel_config, "LEAST_OFFLOADED", 256)


def assert_same(plain: EngineRun, offloaded: EngineRun) -> None:
    assert [line["loss"] for line in offloaded.metrics()] == [line["loss"] for line in plain.metrics()]
    expected, found = plain.state(), offloaded.state()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_the_same(layout: str, engine_run: Callable[..., EngineRun]) -> None:
    words = ["parallel.micro_batch_size=1", *layout.split()]
    plain = engine_run(*words, "parallel.offload=none", name="plain")
    offloaded = engine_run(OFFLOADED, *words, name="offloaded")
    for run in (plain, offloaded):
        assert run.go() == 0, run.stderr()
    assert_same(plain, offloaded)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("scale", torch.full((8, 64), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)) * self.scale)


def passed(layers: list[Layer], host: HostActivations | None) -> list[torch.Tensor]:
    """The gradients of three micro-batches, of which the first goes back last."""
    left = []
    for number in range(3):
        y = torch.linspace(-1, 1 + number, 8 * 16).view(8, 16).requires_grad_()
        for layer in layers:
            y = layer(y)
        if host is not None:
            host.passed(number)
        left.append(y)
    for number in (1, 2, 0):
        if host is not None:
            host.ahead(number)
        left[number].square().sum().backward()
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


def test_two_layers_at_most_are_here_and_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layers = [Layer() for _ in range(4)]
    expected = passed(layers, None)
    for layer in layers:
        layer.zero_grad()
    host, here, kept = HostActivations(torch.device("cpu")), [], set()
    host.keep(layers)
    drop = host._drop

    def counted(layer: object) -> None:
        drop(layer)
        known = [one for one in (host._newest, host._returning) if one is not None and one.here]
        here.append(len({id(one) for one in known}))

    monkeypatch.setattr(host, "_drop", counted)
    found = passed(layers, host)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert max(here) <= 2
    host.end()
    # Of a layer its input, the product before tanh and after, and what the narrow one takes; of weights and scale none.
    kept = {size: len(free) for size, free in host._free.items()}
    assert set(kept) == {4 * 8 * 16, 4 * 8 * 64}
    for layer in layers:
        layer.zero_grad()
    again = passed(layers, host)
    host.end()
    assert {size: len(free) for size, free in host._free.items()} == kept
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("parallel.recompute=full", "offload=activations cannot be combined with parallel.recompute=full: .* use"),
        ("parallel.recompute=selective", "offload=activations cannot be combined with parallel.recompute=selective"),
        ("parallel.streams=2 parallel=single", "offload=activations cannot be combined with parallel.streams=2"),
        ("parallel.schedule=pipedream", "offload=activations cannot be combined with parallel.schedule=pipedream"),
    ],
    ids=["recompute", "recompute-selective", "streams", "pipedream"],
)
def test_what_does_not_go_with_it_is_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["model=tiny", OFFLOADED, *words.split()])
