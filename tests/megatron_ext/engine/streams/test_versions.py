"""The weights that passes meet: the public test of PipeDream, with one, two and three versions of them.

A model takes three micro-batches forward, then each backward, with an update after every one. With one version the
second and third backward pass meet changed weights, with two the third one does, with three none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.engine.streams.executor import Versions
from megatron_ext.timeline.recorder import Recorder

MICRO_BATCHES = 3


class Trained:
    """A model of some layers, whose updates are those of a stage."""

    def __init__(self, precision: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
        named = [*self.model.named_parameters()]
        train = make_plan(
            compose(["train.optimizer=sgd", "train.lr=0.5", "train.lr_policy=constant"]), "test/run"
        ).train
        self.flat = FlatWeights(named, precision, torch.device("cpu"))
        self.optimizer = Optimizer(self.flat, replace(train, clip_grad=0.0))
        self.versions = Versions(self.flat, self.optimizer)
        self.inputs = torch.randn(5, 10, dtype=precision)

    def forward(self, version: int) -> Tensor:
        """The loss of the same micro-batch."""
        self.versions.show(version)
        loss: Tensor = self.model(self.inputs).float().square().sum()
        return loss

    def gradient(self, loss: Tensor, version: int) -> Tensor:
        """Of a backward pass."""
        self.versions.show(version)
        before = self.flat.grad.clone()
        loss.backward()
        return self.flat.grad - before

    def update(self, needed: Sequence[int]) -> None:
        self.versions.update(needed, lambda: self.optimizer.step(Recorder(None), 0.5))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kept", "equal"), [(1, (False, False)), (2, (True, False)), (3, (True, True))], ids=["one", "two", "three"]
)
def test_gradients_are_those_of_the_forward_passes_weights_as_far_as_versions_are_kept(
    kept: int, equal: tuple[bool, bool], precision: torch.dtype
) -> None:
    """What a version that is no longer kept would have been is what the oldest one is that is."""
    trained = Trained(precision)
    losses = [trained.forward(0) for _ in range(MICRO_BATCHES)]
    gradients = []
    for made, loss in enumerate(losses):
        oldest = max(0, made - kept + 1)
        gradients.append(trained.gradient(loss, oldest))
        trained.update(range(max(0, made + 2 - kept), made + 1))
        assert trained.versions.most <= kept
    found = tuple(torch.equal(gradient, gradients[0]) for gradient in gradients[1:])
    assert found == equal


def test_a_kept_version_has_the_gradient_of_a_model_that_never_changed() -> None:
    trained, still = Trained(), Trained()
    loss = trained.forward(0)
    for version in range(3):
        trained.gradient(trained.forward(version), version)
        trained.update({0})
    wanted = still.gradient(still.forward(0), 0)
    assert torch.equal(trained.gradient(loss, 0), wanted)
    assert trained.versions.most == 2  # 0, and the newest


def test_an_update_that_is_left_out_gives_a_version_like_the_one_before() -> None:
    trained = Trained()
    trained.gradient(trained.forward(0), 0)
    trained.update({0})
    weight = trained.flat.weight.clone()
    trained.flat.grad.fill_(math.inf)
    trained.update({0, 1})
    assert trained.versions.newest == 2
    assert torch.equal(trained.flat.weight, weight)
    trained.gradient(trained.forward(2), 2)
    trained.update(())
    assert not torch.equal(trained.flat.weight, weight)
    trained.versions.restart()
    assert trained.versions.newest == 0
    assert torch.equal(
        next(trained.model.parameters()).data.flatten()[:3],
        trained.flat.view("0.weight", trained.flat.weight).flatten()[:3],
    )
