"""Noise and similarity of a gradient are those of the gradients of its samples."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

from megatron_ext.contract.adaptive.noise import Halves, Measurement, measurement, noise_scale, similarity, sought_batch


def gradients_of_samples() -> np.ndarray:
    """[8, parameters], of a small network, each sample by itself."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    inputs, targets = torch.randn(8, 5).double(), torch.randint(0, 3, (8,))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    return torch.cat([part.flatten(1) for part in found.values()], dim=1).numpy()


def halves(even: np.ndarray, odd: np.ndarray, weight: float | None = None) -> Halves:
    """Of per-sample gradients; `weight` is the part of the loss that the even ones have."""
    part = len(even) / (len(even) + len(odd)) if weight is None else weight
    e = part * even.mean(0)
    whole = e + (1 - part) * odd.mean(0)
    return Halves(float(e @ e), float(whole @ whole), float(e @ whole), part, len(even), len(odd))


@pytest.mark.parametrize("size", [2, 3, 4], ids="{0} even of 8".format)
def test_over_all_ways_to_halve_a_batch_noise_and_signal_are_those_of_its_samples(size: int) -> None:
    own = gradients_of_samples()
    found = []
    for even in combinations(range(8), size):
        odd = [n for n in range(8) if n not in even]
        measured = measurement(halves(own[list(even)], own[odd]))
        assert measured is not None
        found.append(measured)
    variance = own.var(0, ddof=1).sum()
    assert np.mean([one.noise for one in found]) == pytest.approx(variance, rel=1e-9)
    square = own.mean(0) @ own.mean(0) - variance / 8
    assert np.mean([one.signal for one in found]) == pytest.approx(square, rel=1e-9)
    assert noise_scale(found) == pytest.approx(variance / square, rel=1e-9)


def test_halves_of_unlike_weight_are_compared_by_their_means() -> None:
    own = gradients_of_samples()
    a, c = own[:4].mean(0), own[4:].mean(0)
    measured = measurement(halves(own[:4], own[4:], weight=0.3))
    assert measured is not None
    assert measured.similarity == pytest.approx(a @ c / np.linalg.norm(a) / np.linalg.norm(c))
    assert measured.signal == pytest.approx(a @ c)
    assert measured.noise == pytest.approx(((a @ a + c @ c) / 2 - a @ c) * 4)


def test_the_sought_batch_has_the_similarity_that_is_sought() -> None:
    random = np.random.default_rng(1)
    truth = random.normal(size=40)
    scale = 40 * 9.0 / (truth @ truth)
    batch = 2 * round(sought_batch(0.3, scale) / 2)
    draws = truth + 3.0 * random.normal(size=(400, batch, 40))
    found = [measurement(halves(draw[::2], draw[1::2])) for draw in draws]
    known = [one for one in found if one is not None]
    assert similarity(known) == pytest.approx(0.3, abs=0.03)
    assert noise_scale(known) == pytest.approx(scale, rel=0.1)


def test_what_says_nothing_is_left_out() -> None:
    nothing = [
        Halves(1.0, 1.0, 1.0, 1.0, 4, 4),
        Halves(float("inf"), 1.0, 1.0, 0.5, 4, 4),
        Halves(1.0, float("nan"), 1.0, 0.5, 4, 4),
        Halves(1.0, 1.0, 1.0, 0.5, 4, 0),
    ]
    assert [measurement(one) for one in nothing] == [None] * 4
    assert noise_scale([Measurement(-0.1, -1.0, 2.0)]) == float("inf")
