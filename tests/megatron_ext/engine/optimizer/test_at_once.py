"""An update as on a GPU, where torch decays, clips and steps in one pass: that of a CPU, in fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer import update_rules
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.engine.optimizer.update_rules import NORM_ROW
from megatron_ext.timeline.recorder import Recorder

WIDTH = 64
OPTIONS = {
    "adamw": ["train.optimizer=adamw"],
    "adamw-unclipped": ["train.optimizer=adamw", "train.clip_grad=0"],
    "adamw-bf16-averaged": ["train.optimizer=adamw", "train.precision=bf16", "train.ema=0.9"],
    "adamw-fp16": ["train.optimizer=adamw", "train.precision=fp16"],
    "adamw-fp16-unclipped": ["train.optimizer=adamw", "train.precision=fp16", "train.clip_grad=0"],
    "adamw-fp16-logmax": ["train.optimizer=adamw", "train.precision=fp16", "train.loss_scaler=logmax"],
    "adam": ["train.optimizer=adam"],
    "sgd": ["train.optimizer=sgd", "train.nesterov=true"],
    "sgd-without-momentum": ["train.optimizer=sgd", "train.momentum=0", "train.precision=bf16"],
    "lamb": ["train.optimizer=lamb"],
}


def train_of(*words: str) -> TrainConfig:
    plan = make_plan(compose(["train.weight_decay=0.1", "train.lr=0.05", "train.lr_policy=constant", *words]), "a/run")
    return plan.train


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Optimizer]:
    """Of a model, on a CPU; `at_once` as a GPU does it."""

    def make(train: TrainConfig, at_once: bool, cuts: Sequence[int] = (), layers: int = 3) -> Optimizer:
        if at_once and train.optimizer != "lamb":
            monkeypatch.setattr(update_rules, "updates_at_once", lambda device, of: True)
        else:
            monkeypatch.setattr(update_rules, "updates_at_once", lambda device, of: False)
        torch.manual_seed(1)
        model = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers))
        )
        formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        flat = FlatWeights([*model.named_parameters()], formats[train.precision], torch.device("cpu"))
        return Optimizer(flat, train, cuts=cuts)

    return make


def stepped(optimizer: Optimizer, seed: int, infinite: bool = False, early: int = 0) -> float:
    """The norm, after a step with the gradients of this seed."""
    gradient = torch.randn(len(optimizer._flat.grad), generator=torch.Generator().manual_seed(seed))
    optimizer._flat.grad.copy_(gradient * optimizer.scaler.scale)
    if infinite:
        optimizer._flat.grad[7] = math.inf
    recorder = Recorder(None)
    if early:
        optimizer.step_early(recorder, early, learning_rate(optimizer.updates, optimizer._train))
    norm = optimizer.step(recorder)
    assert not optimizer._flat.grad.any(), "the next iteration adds to zeros"
    return norm


def assert_alike(one: Optimizer, other: Optimizer) -> None:
    assert one.kinds == other.kinds
    for kind, expected in one.state().items():
        torch.testing.assert_close(other.state()[kind], expected, rtol=2e-6, atol=1e-7, msg=kind)
    torch.testing.assert_close(other._flat.weight, one._flat.weight)
    assert one.updates == other.updates and one.scaler == other.scaler


@pytest.mark.parametrize("words", OPTIONS.values(), ids=OPTIONS)
def test_an_update_at_once_is_that_of_single_passes(made: Callable[..., Optimizer], words: list[str]) -> None:
    train = train_of(*words)
    one, other = made(train, at_once=False), made(train, at_once=True)
    for seed in range(3):
        assert stepped(one, seed) == stepped(other, seed)
    if one.scaler.dynamic:
        assert not math.isfinite(stepped(one, 4, infinite=True))
        assert not math.isfinite(stepped(other, 4, infinite=True))
    restarted = made(train, at_once=True)
    restarted.load({kind: values.clone() for kind, values in other.state().items()}, other.updates)
    restarted.scaler = replace(other.scaler)
    for optimizer in (one, other, restarted):
        stepped(optimizer, 5)
    assert_alike(one, other)
    assert_alike(one, restarted)
    assert any(values.any() for kind, values in other.state().items() if kind != "momentum" or train.momentum)


def test_an_update_at_once_of_several_parts_or_another_buffer_is_the_same(made: Callable[..., Optimizer]) -> None:
    train = train_of("train.clip_grad=0")
    cuts = [4 * NORM_ROW + 5, 8 * NORM_ROW + 77]
    one, other = made(train, at_once=False), made(train, at_once=True, cuts=cuts)
    before = other._flat.weight
    for seed in range(2):
        assert stepped(one, seed) == pytest.approx(stepped(other, seed, early=cuts[0]), rel=1e-12)
    other.move(torch.empty_like(before))
    kept = before.clone()
    assert stepped(one, 3) == pytest.approx(stepped(other, 3, early=cuts[-1]), rel=1e-12)
    assert torch.equal(before, kept), "a version that passes still need has changed"
    assert_alike(one, other)


def test_no_tensor_that_a_gpu_steps_is_longer_than_torchs_kernels_count(
    made: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch 2.0 they count in 32 bits: 2^31 numbers in one tensor were too many."""
    assert update_rules.MOST <= 2**31 - 2**16
    monkeypatch.setattr(update_rules, "MOST", 1000)
    train = train_of()
    one, other = made(train, at_once=False), made(train, at_once=True)
    sizes = []

    def noted(weights: list[Tensor], *arguments: Any, **options: Any) -> None:
        sizes.extend(len(weight) for weight in weights)
        adamw(weights, *arguments, **options)

    monkeypatch.setattr(update_rules, "adamw", noted)
    for seed in range(2):
        stepped(one, seed)
        stepped(other, seed)
    assert sum(sizes) == 2 * len(other._flat.weight)
    assert max(sizes) <= 1000
    assert_alike(one, other)


class Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """That operators read and write; all of a tensor where they take it, twice where they change it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if views or name.startswith(("empty", "detach", "view")):
            return result
        given = [*zip(function._schema.arguments, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in function._schema.arguments if kwargs and one.name in kwargs]
        changed = set()
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not (writes and name.startswith(("zero_", "copy_", "fill_")))
            if writes and name.startswith("_fused") and argument.name == "grads":
                writes = (kwargs or {}).get("grad_scale") is not None  # it writes what it has divided
            for tensor in _tensors(value):
                self.total += tensor.nbytes * (int(writes) + int(reads))
                changed.add(id(tensor))
        self.total += sum(tensor.nbytes for tensor in _tensors(result) if id(tensor) not in changed)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@pytest.mark.parametrize(
    ("words", "most", "before"),
    [
        pytest.param(["train.clip_grad=0"], 4 + 28 + 4, 4 + 8 + 28 + 4, id="fp32-unclipped"),
        pytest.param([], 4 + 32 + 4, 4 + 8 + 8 + 28 + 4, id="fp32"),
        pytest.param(["train.precision=bf16"], 4 + 32 + 6 + 4, 4 + 8 + 8 + 28 + 6 + 4, id="bf16"),
        pytest.param(["train.precision=fp16"], 4 + 32 + 6 + 4, 4 + 8 + 8 + 28 + 6 + 4, id="fp16"),
    ],
)
def test_an_update_at_once_passes_over_few_bytes(
    made: Callable[..., Optimizer], words: list[str], most: int, before: int
) -> None:
    """A parameter's: its norm, Adam, the copy of 16 bits and the zeros; single passes scale and decay besides."""
    found = []
    for at_once in (True, False):
        optimizer = made(train_of(*words), at_once=at_once, layers=6)
        stepped(optimizer, 0)
        optimizer._flat.grad.fill_(optimizer.scaler.scale)
        with Bytes() as counted:
            optimizer.step(Recorder(None))
        found.append(counted.total / len(optimizer._flat.weight))
    assert found == [pytest.approx(most, rel=0.02), pytest.approx(before, rel=0.02)]
