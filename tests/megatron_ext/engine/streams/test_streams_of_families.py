"""What streams through stages may be any model: with wires that skip stages, running statistics, a user's module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_ext.engine.streams.test_streams_agree import SGD, assert_as_delayed
from tests.megatron_ext.engine.test_images_agree import BASE
from tests.megatron_ext.engine.test_images_agree import MODELS as IMAGES
from tests.megatron_ext.engine.test_translation_agrees import MODELS as TRANSLATION
from tests.megatron_ext.tasks.user.test_module import module_run
from tests.support.megatron_ext.engine_run import make_run
from tests.support.megatron_ext.images import make_images
from tests.support.megatron_ext.pairs import write_pairs

STREAM = ("parallel.schedule=pipedream", "parallel.data=1")
SLOW = (*SGD, "train.lr=0.01")
"""Batch norms blow roundings up with larger steps."""
THREE = ("parallel.pipeline=3", "parallel.replicas=2-1-1", "parallel.global_batch_size=5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "partition", "semantics"),
    [("untied-gnmt", "2-3-1", "stashing"), ("untied-transformer", "1-2-1", "vertical")],
)
def test_translation_with_wires_that_skip_stages(tmp_path: Path, model: str, partition: str, semantics: str) -> None:
    pairs = write_pairs(tmp_path, 61)
    size = ("parallel.micro_batch_size=1", f"parallel.partition={partition}", f"parallel.semantics={semantics}")
    run = make_run(tmp_path / "run", pairs, "parallel=single", *TRANSLATION[model], *STREAM, *THREE, *size)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)


@pytest.mark.parametrize(("model", "partition"), [("untied-gnmt", "2-3-1"), ("untied-transformer", "1-2-1")])
def test_micro_batches_with_lengths_of_their_own(tmp_path: Path, model: str, partition: str) -> None:
    """Whose backward passes come iterations after their forward passes."""
    pairs = write_pairs(tmp_path, 61)
    size = ("parallel.micro_batch_size=1", f"parallel.partition={partition}", "data.bucketing=3")
    run = make_run(tmp_path / "run", pairs, "parallel=single", *TRANSLATION[model], *STREAM, *THREE, *size)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pixels", "others"),
    [
        ("vit", 8, ("parallel.pipeline=2", "parallel.partition=2-1", "parallel.replicas=3-1")),
        ("resnet", 32, ("parallel.pipeline=2", "parallel.replicas=1-2", *SLOW)),
        ("resnet", 32, ("parallel.pipeline=3", "parallel.recompute=full", "parallel.semantics=vertical", *SLOW)),
        ("vgg", 8, ("parallel.pipeline=2", "parallel.replicas=2-1", "parallel.semantics=two", *SLOW)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_images_and_their_running_statistics(tmp_path: Path, model: str, pixels: int, others: tuple[str, ...]) -> None:
    images = make_images(tmp_path, pixels)
    base = ("parallel=single", *IMAGES[model], *BASE, *STREAM, "parallel.micro_batch_size=2")
    run = make_run(tmp_path / "run", images, *others, base=(*base, "parallel.global_batch_size=10"))
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)
    for line in run.metrics():
        assert 0 <= line["top-1"] <= line["top-5"] <= 1


def test_a_users_module_with_skips(tmp_path: Path) -> None:
    run = module_run(tmp_path / "run", "UNet", *STREAM, "parallel.pipeline=2", "parallel.replicas=2-1", *SGD)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)


def test_a_parameter_that_stages_share_is_refused(tmp_path: Path) -> None:
    run = module_run(tmp_path / "run", "SharedEmbedding", *STREAM, "parallel.pipeline=2")
    assert run.go() == 1
    assert any("share the parameter" in error["message"] for error in run.errors())
