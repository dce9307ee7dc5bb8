"""Samples of images: the same for every layout, changed by what their numbers say, and faults of the data in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_parts import Augment
from megatron_ext.data.samples import Split
from megatron_ext.data.vision import augment
from megatron_ext.data.vision.images import ImageSamples, open_images
from tests.support.megatron_ext.images import make_images

SIZE, COUNT = 8, 24
MODEL = ModelConfig(
    layers=1, hidden=8, heads=1, sequence_length=0, vocab_size=0, padded_vocab_size=0, family="vit", image_size=SIZE,
    channels=3, classes=10, patch_size=2,
)  # fmt: skip
NOTHING = Augment(padding=0, flip=False, rand_augment=0, rand_augment_magnitude=9.0, erasing=0.0, mixup=0.0, cutmix=0.0)
ALL = replace(NOTHING, padding=2, flip=True, rand_augment=2, erasing=0.5, mixup=0.4, cutmix=1.0)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return make_images(tmp_path, SIZE, channels=3, count=COUNT)


def samples(prefix: Path, changes: Augment | None = None, split: str = "train", seed: int = 1) -> ImageSamples:
    return ImageSamples(prefix, Split(10**6, seed, name=split), MODEL, changes)


def test_an_epoch_has_every_image_once_in_an_order_of_its_own(prefix: Path) -> None:
    train, found = samples(prefix), open_images(prefix, "train")
    epochs = [train.batch(np.arange(epoch * COUNT, (epoch + 1) * COUNT)) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch["label"].tolist()) == sorted(found.labels.tolist())
        assert len({image.tobytes() for image in epoch["images"]}) == COUNT
    assert not np.array_equal(epochs[0]["images"], epochs[1]["images"])
    again = samples(prefix).batch(np.arange(COUNT, 2 * COUNT))
    np.testing.assert_array_equal(epochs[1]["images"], again["images"])
    assert not np.array_equal(epochs[0]["images"], samples(prefix, seed=2).batch(np.arange(COUNT))["images"])


def test_images_are_normalised_by_the_manifest(prefix: Path) -> None:
    found = open_images(prefix, "test")
    batch = samples(prefix, ALL, "test").batch(np.arange(COUNT))
    restored = (batch["images"].transpose(0, 2, 3, 1) * found.manifest.std + found.manifest.mean) * 255
    pixels = np.rint(restored).astype(np.uint8)
    np.testing.assert_allclose(restored, pixels, atol=1e-3)
    expected = {image.tobytes(): label for image, label in zip(found.images, found.labels.tolist(), strict=True)}
    assert {image.tobytes(): label for image, label in zip(pixels, batch["label"].tolist(), strict=True)} == expected


@pytest.mark.parametrize(
    "changes", [ALL, replace(ALL, cutmix=0.0), replace(ALL, mixup=0.0)], ids=["both", "mix", "cut"]
)
def test_a_micro_batch_is_the_same_whatever_is_asked_for_beside_it(prefix: Path, changes: Augment) -> None:
    train = samples(prefix, changes)
    numbers = np.arange(40, 64).reshape(6, 4)
    together = train.batch(numbers)
    for micro in (5, 0, 3):
        alone = train.batch(numbers[micro])
        for name, array in alone.items():
            np.testing.assert_array_equal(array, together[name][micro])
    targets = train.targets(numbers)
    assert targets.keys() == together.keys() - {"images"}
    for name, array in targets.items():
        np.testing.assert_array_equal(array, together[name])


def test_mixing_takes_of_both_images_what_the_share_says(prefix: Path) -> None:
    for changes in (replace(NOTHING, mixup=0.4), replace(NOTHING, cutmix=1.0)):
        plain, mixed = samples(prefix, NOTHING), samples(prefix, changes)
        for first in range(0, 40, 4):
            numbers = np.arange(first, first + 4)
            images, batch = plain.batch(numbers)["images"], mixed.batch(numbers)
            share = float(batch["share"][0])
            np.testing.assert_array_equal(batch["label"][::-1], batch["other"])
            others = images[::-1]
            if changes.mixup:
                np.testing.assert_allclose(batch["images"], share * images + (1 - share) * others, atol=1e-5)
                continue
            own = (batch["images"] == images).all(1)
            assert (own | (batch["images"] == others).all(1)).all()
            assert own[0].mean() == pytest.approx(share, abs=1e-6)


def test_a_box_is_no_larger_than_its_share_and_inside() -> None:
    for number in range(200):
        found = augment.drawn(replace(NOTHING, cutmix=1.0), 9, 7, augment.source(3, number))
        assert found.box is not None
        rows, columns = found.box
        assert 0 <= rows.start <= rows.stop <= 9
        assert 0 <= columns.start <= columns.stop <= 7
        taken = (rows.stop - rows.start) * (columns.stop - columns.start)
        assert found.share == pytest.approx(1 - taken / 63)


@pytest.mark.parametrize("operation", augment.OPERATIONS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_gives_an_image_of_the_same_size(operation: object, channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 7, channels), np.uint8)
    before = image.copy()
    for strength in (0.0, 0.3, 1.0):
        for sign in (-1, 1):
            found = operation(image, strength, sign)  # type: ignore[operator]
            assert (found.shape, found.dtype) == (image.shape, np.uint8)
            if strength == 0.0 and operation not in (augment.autocontrast, augment.equalize):
                np.testing.assert_array_equal(found, image)
    np.testing.assert_array_equal(image, before)


def test_operations_do_what_they_are_called() -> None:
    image = np.zeros((5, 5, 1), np.uint8)
    image[2, 3] = 200
    np.testing.assert_array_equal(augment.rotate(image, 3.0, 1)[1, 2], [200])  # 90 degrees around the middle
    np.testing.assert_array_equal(augment.translate_x(image, 1 / 0.45 / 5, 1)[2, 2], [200])
    assert augment.brightness(image, 1.0, -1).max() == 20
    assert augment.solarize(image, 0.5, 1)[2, 3] == 55
    assert augment.posterize(np.full((1, 1, 1), 0xFF, np.uint8), 1.0, 1)[0, 0] == 0xF0
    assert augment.autocontrast(image, 1.0, 1).max() == 255
    ramp = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    assert augment.equalize(ramp, 1.0, 1).max() > 240


def test_an_erased_rectangle_is_noise_of_so_many_images(prefix: Path) -> None:
    image = np.zeros((16, 16, 3), np.float32)
    erased = 0
    for number in range(400):
        found = image.copy()
        augment.erase(found, 0.25, augment.source(0, number, augment.ERASING))
        part = (found != 0).any(2)
        erased += bool(part.any())
        assert part.mean() <= 0.4
        rows, columns = part.any(1), part.any(0)
        assert part.sum() == rows.sum() * columns.sum()
    assert 0.17 < erased / 400 < 0.33


def test_held_out_images_come_in_an_order_that_is_not_that_of_the_files(prefix: Path) -> None:
    valid, found = samples(prefix, split="valid"), open_images(prefix, "valid")
    count = len(found.labels)
    first = valid.batch(np.arange(count))
    assert sorted(first["label"].tolist()) == sorted(found.labels.tolist())
    assert len({image.tobytes() for image in first["images"]}) == count
    np.testing.assert_array_equal(first["images"], valid.batch(np.arange(count, 2 * count))["images"])
    in_file = (np.asarray(found.images).astype(np.float32) / np.float32(255) - found.manifest.mean) / found.manifest.std
    assert not np.allclose(first["images"], in_file.transpose(0, 3, 1, 2))


def change(prefix: Path, **content: object) -> None:
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda prefix: Path(f"{prefix}.json").unlink(), "must name data made by 'tdpp data images'"),
        (lambda prefix: change(prefix, kind="pairs"), "is not a manifest of images"),
        (lambda prefix: change(prefix, std=[0.1, 0.0, 0.1]), "std above 0"),
        (lambda prefix: change(prefix, mean="x"), "is damaged"),
        (lambda prefix: change(prefix, height=9), "but its manifest says [9, 8, 3] uint8"),
        (lambda prefix: change(prefix, classes=["a", "b"]), "but its manifest has 2 classes"),
        (lambda prefix: Path(f"{prefix}-train.labels.npy").write_bytes(b"no"), "train.labels.npy: cannot be read"),
        (lambda prefix: np.save(f"{prefix}-train.labels.npy", np.zeros(3, np.int64)), "but there are 24 images"),
        (lambda prefix: np.save(f"{prefix}-train.images.npy", np.zeros((2, 8, 8, 3))), "of float64"),
    ],
    ids=["no-manifest", "kind", "std", "mean", "size", "classes", "labels", "count", "dtype"],
)
def test_what_is_wrong_with_the_data_is_one_message(prefix: Path, spoil: object, message: str) -> None:
    spoil(prefix)  # type: ignore[operator]
    with pytest.raises(DataError) as caught:
        samples(prefix)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MODEL, image_size=16), "model.image_size=16"),
        (replace(MODEL, channels=1), "set model.channels=3"),
        (replace(MODEL, classes=9), "set model.classes=10"),
    ],
    ids=["size", "channels", "classes"],
)
def test_images_of_another_model_are_one_message(prefix: Path, model: ModelConfig, message: str) -> None:
    with pytest.raises(DataError) as caught:
        ImageSamples(prefix, Split(10, 1), model)
    assert message in str(caught.value)
