"""Every layout trains the same model of images: losses, weights and running statistics equal one plain process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.engine import engine
from megatron_ext.engine.gradients import flat
from megatron_ext.engine.gradients.gradients import RunningStatistics
from megatron_ext.families.resnet.task import BatchNorm
from tests.megatron_ext.engine.test_layouts_agree import Layout, options
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.images import make_images, plainly_trained

AUGMENT = (
    *("data.augment.padding=1", "data.augment.flip=true", "data.augment.rand_augment=2", "data.augment.erasing=0.5"),
    *("data.augment.mixup=0.4", "data.augment.cutmix=1.0", "model.label_smoothing=0.1"),
)
BASE = (
    *("train.iterations=4", "train.log_interval=1", "train.lr=1e-3", "train.min_lr=1e-5", "train.clip_grad=0.5"),
    *("train.lr_warmup_iterations=1", "train.comm_timeout_s=120", "parallel.global_batch_size=12"),
    # Of keys the bias changes no attention, so that its gradient is rounding alone, which Adam would make steps of.
    *("parallel.partition=null", "train.adam_eps=1e-5"),
)
DROPS = ("model.hidden_dropout=0.2", "model.attention_dropout=0.2", "model.drop_path=0.3")
MODELS = {
    "vit": ("model=vit-tiny", "model.hidden=32", "model.layers=3", *DROPS, *AUGMENT),
    "vit-of-means": ("model=vit-tiny", "model.hidden=32", "model.layers=2", "model.class_token=false", *AUGMENT[:2]),
    "t2t-vit": ("model=t2t-vit-tiny", "model.layers=3", *DROPS, *AUGMENT),
    "resnet": ("model=resnet-tiny", "model.width=4", "model.image_size=32", *AUGMENT),
    "vgg": ("model=vgg-tiny", *AUGMENT),
    "alexnet": ("model=alexnet-tiny", "model.width=2", *AUGMENT),
}
SIZES = {"t2t-vit": 16, "resnet": 32, "alexnet": 64}
"""Pixels of a side, where they are not 8."""
Case = tuple[str, Layout, str]
CASES: list[Case] = [
    ("vit", Layout(1, 1, 1, "3", 4), "null"),
    ("vit", Layout(1, 3, 1, "3", 2), "null"),
    ("vit", Layout(1, 2, 2, "1-2", 2), "2-1"),
    ("vit", Layout(1, 1, 1, "3", 2, recompute="full", streams="3"), "null"),
    ("vit", Layout(1, 1, 3, "2-0-1", 3, recompute="full", schedule="gpipe"), "null"),
    ("vit", Layout(1, 2, 2, "2-1", 2, schedule="zb_h1"), "1-2"),
    ("vit", Layout(1, 1, 2, "1-0-1-1", 3, schedule="interleaved", chunks=2), "null"),
    ("vit-of-means", Layout(1, 2, 2, "1-1", 3, sharded_optimizer=True), "null"),
    ("t2t-vit", Layout(1, 2, 2, "1-2", 2), "2-1"),
    ("t2t-vit", Layout(1, 1, 3, "0-2-1", 4, recompute="full"), "null"),
    ("resnet", Layout(1, 3, 1, "5", 4), "null"),
    ("resnet", Layout(1, 2, 1, "5", 4, streams="2-1"), "2-1"),
    ("resnet", Layout(1, 2, 2, "3-2", 4), "2-1"),
    ("resnet", Layout(1, 1, 3, "1-2-2", 4, recompute="full"), "null"),
    ("resnet", Layout(1, 1, 2, "1-1-2-1", 6, schedule="interleaved", chunks=2), "null"),
    ("resnet", Layout(1, 1, 2, "3-2", 4, replicas="1-3"), "null"),
    ("resnet", Layout(1, 1, 3, "1-2-2", 2, schedule="zb_h1", replicas="3-1-2"), "null"),
    ("vgg", Layout(1, 2, 2, "2-4", 2), "2-1"),
    ("vgg", Layout(1, 1, 3, "3-1-2", 4, recompute="full"), "null"),
    ("vgg", Layout(1, 2, 2, "3-3", 2, schedule="zb_h1"), "2-1"),
    ("alexnet", Layout(1, 2, 1, "8", 4), "2-1"),
    ("alexnet", Layout(1, 1, 3, "5-2-1", 3), "null"),
]
NORMED = ("resnet",)
"""Whose running statistics every option may touch."""
TRIED = cases.covering(
    CASES, lambda case: {*options(case[1]), case[0], *((case[0], one) for one in options(case[1]) if case[0] in NORMED)}
)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder, made = tmp_path_factory.mktemp("images"), {}

    def of(size: int) -> Path:
        if size not in made:
            made[size] = make_images(folder, size)
        return made[size]

    return of


@pytest.fixture(scope="module")
def reference(
    images: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]]:
    """By model and micro-batch size, for which images are mixed, and whose statistics a batch norm takes."""
    found: dict[tuple[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]] = {}

    def of(model: str, size: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        if (model, size) not in found:
            folder, words = tmp_path_factory.mktemp("reference") / "run", MODELS[model]
            one = ("parallel=single", f"parallel.micro_batch_size={size}")
            run = make_run(folder, images(SIZES.get(model, 8)), *words, base=(*one, *BASE))
            found[model, size] = plainly_trained(run.plan)
        return found[model, size]

    return of


@pytest.fixture
def image_run(tmp_path: Path, images: Callable[[int], Path]) -> Callable[[Case], EngineRun]:
    def make(case: Case, *overrides: str) -> EngineRun:
        return make_run(
            tmp_path / "run",
            images(SIZES.get(case[0], 8)),
            *words_of(case),
            *overrides,
            base=("parallel=single", *BASE),
        )

    return make


def words_of(case: Case) -> list[str]:
    model, layout, shares = case
    of_layout = (f"parallel.{key}={value}" for key, value in layout._asdict().items())
    return [*MODELS[model], *of_layout, f"parallel.shares={shares}"]


def assert_equal(run: EngineRun, expected: tuple[np.ndarray, dict[str, torch.Tensor]]) -> None:
    losses, state = expected
    np.testing.assert_allclose(run.losses(), losses[-len(run.losses()) :], rtol=0, atol=1e-5)
    found = run.state()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        exact = name.startswith(("weights/", "state/"))
        # What goes through several batch norms of few samples carries more of the rounding.
        tolerance = 1e-5 if exact else max(1e-2 * tensor.abs().max().item(), 1e-9)
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "case", cases.fast_first(4, [(case,) for case in TRIED]), ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}"
)
def test_losses_weights_and_statistics_equal_the_single_process(
    image_run: Callable[..., EngineRun],
    reference: Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass
    run = image_run(case)
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference(case[0], case[1].micro_batch_size))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("vit", Layout(1, 3, 1, "3", 2), "null"), ("vit", Layout(1, 2, 2, "1-2", 2), "1-2")),
        (("resnet", Layout(1, 2, 2, "2-3", 4), "1-2"), ("resnet", Layout(1, 1, 3, "1-1-3", 4), "null")),
        (("t2t-vit", Layout(1, 1, 2, "1-2", 4), "null"), ("t2t-vit", Layout(1, 3, 1, "3", 4), "null")),
    ],
    ids=["vit", "resnet", "t2t-vit"],
)
def test_a_run_goes_on_in_another_layout(
    image_run: Callable[..., EngineRun],
    reference: Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]],
    before: Case,
    after: Case,
) -> None:
    """Also at the exact image, with the same changes of it, and with running statistics."""
    run = image_run(before, "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    overrides = ["parallel=single", *BASE, f"data.prefix={run.plan.data_prefix}", *words_of(after)]
    run.run.write_json(run.run.plan, make_plan(compose(overrides), run.plan.run).as_json())
    then = EngineRun(run.run, Plan.read(run.run.plan))
    assert then.go() == 0, then.stderr()
    assert_equal(then, reference(after[0], after[1].micro_batch_size))


@pytest.mark.parametrize(
    "case",
    [("vgg", Layout(1, 2, 2, "2-4", 2), "2-1"), ("vit", Layout(1, 2, 2, "1-2", 2), "2-1")],
    ids=["vgg", "vit"],
)
def test_gradients_of_large_matrices_are_added_where_they_belong(
    image_run: Callable[..., EngineRun],
    reference: Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    monkeypatch.setattr(flat, "LARGE", 1)
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)
    run = image_run(case)
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference(case[0], case[1].micro_batch_size))


def test_running_statistics_keep_their_precision_in_16_bits(image_run: Callable[..., EngineRun]) -> None:
    """In fp32: an iteration changes them by a tenth of a difference, which bf16 could not hold."""
    run = image_run(("resnet", Layout(1, 2, 2, "2-3", 6), "null"), "train.precision=bf16", "train.iterations=2")
    assert run.go() == 0, run.stderr()
    found = {name: tensor for name, tensor in run.state().items() if name.startswith("state/")}
    assert found
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name


def test_an_iteration_that_overflows_leaves_running_statistics_alone() -> None:
    norm = BatchNorm(2, 1e-5)
    statistics = RunningStatistics([norm], None)
    statistics.begin()
    norm(torch.full((2, 2, 3, 3), torch.inf))
    statistics.finish(2, skipped=True)
    torch.testing.assert_close(norm.running_mean, torch.zeros(2))
    statistics.begin()
    for shift in (1.0, 3.0):
        norm(torch.arange(36.0).reshape(2, 2, 3, 3) + shift)
    statistics.finish(2, skipped=False)
    means = torch.arange(36.0).reshape(2, 2, 3, 3).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, 0.1 * (means + 2.0))
    norm.eval()
    before = norm.gathered.clone()
    norm(torch.randn(2, 2, 3, 3))
    torch.testing.assert_close(norm.gathered, before)
