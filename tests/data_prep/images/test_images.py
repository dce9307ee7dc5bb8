"""`tdpp data images`: what it writes, splits and refuses."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from data_prep.errors import DataPrepError
from data_prep.files import journal
from data_prep.files.journal import OpenStep
from data_prep.images import prepare as module
from launch.commands.data import main
from megatron_ext.data.samples import SPLITS


def prepare(output: Path, *words: object) -> dict[str, object]:
    assert main(["images", "--output", str(output), "--source", *map(str, words)]) == 0
    return json.loads(Path(f"{output}.json").read_text())


def arrays(prefix: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return tuple(np.load(f"{prefix}-{split}.{what}.npy", mmap_mode="r") for what in ("images", "labels"))


def encoded(pixels: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def random(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty images of two classes, each with its number in its first pixel."""
    for number in range(40):
        pixels = random(number, 5, 7, 3)
        pixels[0, 0] = number
        path = tmp_path / "source" / ("cat" if number % 4 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels))
    (tmp_path / "source" / ".hidden").mkdir()
    (tmp_path / "source" / ".hidden" / "x.png").write_bytes(b"no image")
    (tmp_path / "source" / "README.md").write_text("no image")
    return tmp_path / "source"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_image_is_in_one_split_as_it_was_with_its_class(folder: Path, tmp_path: Path) -> None:
    manifest = prepare(tmp_path / "x", folder)
    assert {key: manifest[key] for key in ("version", "kind", "classes", "height", "width", "channels", "splits")} == {
        "version": 1, "kind": "images", "classes": ["cat", "dog"], "height": 5, "width": 7, "channels": 3,
        "splits": {"train": {"images": 32}, "valid": {"images": 4}, "test": {"images": 4}},
    }  # fmt: skip
    numbers = []
    for split in SPLITS:
        images, labels = arrays(tmp_path / "x", split)
        assert (images.dtype, labels.dtype, len(images)) == (np.uint8, np.int64, len(labels))
        assert isinstance(images, np.memmap)
        assert Counter(labels.tolist()) == ({0: 24, 1: 8} if split == "train" else {0: 3, 1: 1})
        for image, label in zip(images, labels, strict=True):
            number = int(image[0, 0, 0])
            expected = random(number, 5, 7, 3)
            expected[0, 0] = number
            assert (image == expected).all() and label == (0 if number % 4 else 1)
            numbers.append(number)
    assert sorted(numbers) == list(range(40))


def test_mean_and_deviation_are_those_of_the_training_pixels(folder: Path, tmp_path: Path) -> None:
    manifest = prepare(tmp_path / "x", folder)
    pixels = arrays(tmp_path / "x", "train")[0].reshape(-1, 3) / 255
    assert manifest["mean"] == pytest.approx(pixels.mean(0), rel=1e-12)
    assert manifest["std"] == pytest.approx(pixels.std(0), rel=1e-9)


def test_seed_and_names_alone_say_what_is_held_out(folder: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "x", folder)
    prepare(tmp_path / "b" / "x", folder, "--workers", "2")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    moved = folder.rename(tmp_path / "moved")
    prepare(tmp_path / "c" / "x", moved)
    test = "x-test.images.npy"
    assert contents(tmp_path / "c")[test] == contents(tmp_path / "a")[test]
    prepare(tmp_path / "d" / "x", moved, "--seed", "2")
    assert contents(tmp_path / "d")[test] != contents(tmp_path / "a")[test]


def tar_of(folder: Path, path: Path, above: str = "") -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w:xz" if path.name.endswith("xz") else "w") as tar:
        for file in sorted(folder.rglob("*.png")):
            tar.add(file, above + str(file.relative_to(folder)))
    return path


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz", "a.tgz"])
def test_a_tar_file_gives_what_its_folder_gives(folder: Path, tmp_path: Path, name: str) -> None:
    prepare(tmp_path / "folder" / "x", folder)
    prepare(tmp_path / "tar" / "x", tar_of(folder, tmp_path / name, "pets/"))
    for split in SPLITS:
        for what in ("images", "labels"):
            file = f"x-{split}.{what}.npy"
            assert (tmp_path / "tar" / file).read_bytes() == (tmp_path / "folder" / file).read_bytes()


def test_names_that_are_no_utf8_are_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in (b"a/\xff.png", b"b/\xfe.png"):
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(random(0, 2, 2)))
    assert prepare(tmp_path / "x", folder)["classes"] == ["a", "b"]


def test_folders_called_after_splits_are_these(tmp_path: Path) -> None:
    for number in range(30):
        split = "val" if number < 6 else "train"
        path = tmp_path / "in" / "set" / split / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(np.full((2, 2), number, np.uint8)))
    prepare(tmp_path / "x", tmp_path / "in", "--split", "5,0,1")
    found = {split: {int(image[0, 0, 0]) for image in arrays(tmp_path / "x", split)[0]} for split in SPLITS}
    assert found["valid"] == set(range(6))
    assert len(found["test"]) == 4 and found["train"] | found["test"] == set(range(6, 30))


def test_images_are_cut_to_their_middle_and_scaled(tmp_path: Path) -> None:
    wide = np.zeros((8, 24), np.uint8)
    wide[:, 8:16] = 200
    for name in ("a/1.png", "b/1.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(encoded(wide))
    manifest = prepare(tmp_path / "x", tmp_path / "in", "--size", "4", "--split", "1,0,0")
    images, _ = arrays(tmp_path / "x", "train")
    assert (manifest["height"], manifest["width"], images.shape) == (4, 4, (2, 4, 4, 1))
    assert (images[:, :, 1:3] == 200).all() and images.min() > 150
    prepare(tmp_path / "y", tmp_path / "in", "--size", "4x12", "--channels", "3", "--split", "1,0,0")
    images, _ = arrays(tmp_path / "y", "train")
    assert images.shape == (2, 4, 12, 3)
    assert (images[:, :, 5:7] == 200).all() and not images[:, :, :3].any()


def test_jpeg_grey_and_transparent_images_become_what_the_others_are(tmp_path: Path) -> None:
    images = {
        "a/1.png": encoded(random(0, 4, 4, 3)), "a/2.png": encoded(random(1, 4, 4)),
        "b/1.png": encoded(random(2, 4, 4, 4)), "b/2.JPG": encoded(np.full((4, 4, 3), 90, np.uint8), "JPEG"),
    }  # fmt: skip
    for name, content in images.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    prepare(tmp_path / "x", tmp_path / "in", "--split", "1,0,0")
    found, _ = arrays(tmp_path / "x", "train")
    assert (found[1] == random(1, 4, 4)[:, :, np.newaxis]).all()
    assert (found[2] == random(2, 4, 4, 4)[:, :, :3]).all()
    assert np.abs(found[3].astype(int) - 90).max() <= 1


def test_pixels_of_16_bits_keep_their_brightness(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 65535)):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.fromarray(np.full((2, 2), value, np.uint16)).save(tmp_path / "in" / name / "1.png")
    prepare(tmp_path / "x", tmp_path / "in", "--split", "1,0,0")
    assert arrays(tmp_path / "x", "train")[0].max((1, 2, 3)).tolist() == [0, 255]


@pytest.mark.parametrize(
    ("images", "scale"),
    [
        (random(0, 12, 3, 4), 1),
        (random(0, 12, 3, 4, 3), 1),
        (random(0, 12, 3, 4, 1).astype(np.int64), 1),
        (random(0, 12, 3, 4) / 255, 255),
        (random(0, 12, 3, 4).astype(np.float32), 1),
        (random(0, 12, 3, 4) > 99, 255),
    ],
    ids=["grey", "coloured", "whole numbers", "fractions", "floats", "truths"],
)
@pytest.mark.parametrize("form", ["npz", "npy"])
def test_arrays_give_their_images(tmp_path: Path, images: NDArray, scale: float, form: str) -> None:
    labels = np.array([3, 10, 3] * 4)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.save(tmp_path / "i.npy", images)
    np.save(tmp_path / "l.npy", labels)
    source = [tmp_path / "a.npz"] if form == "npz" else [tmp_path / "i.npy", tmp_path / "l.npy"]
    manifest = prepare(tmp_path / "x", *source, "--split", "1,0,0")
    found, classes = arrays(tmp_path / "x", "train")
    assert manifest["classes"] == ["3", "10"]
    assert classes.tolist() == [0, 1, 0] * 4
    assert (found == np.rint(images * scale).reshape(12, 3, 4, -1)).all()


def test_arrays_may_have_their_channels_first_and_splits_of_their_own(tmp_path: Path) -> None:
    images = random(0, 10, 3, 5, 6)
    labels = np.array(["b", "a"] * 5)
    np.savez(
        tmp_path / "a.npz", x_train=images[:6], y_train=labels[:6, None], test_images=images[6:], test_labels=labels[6:]
    )
    manifest = prepare(tmp_path / "x", tmp_path / "a.npz", "--split", "1,0,1")
    assert manifest["classes"] == ["a", "b"]
    for split, part in (("train", slice(6)), ("test", slice(6, 10))):
        found, classes = arrays(tmp_path / "x", split)
        assert (found == images[part].transpose(0, 2, 3, 1)).all()
        assert classes.tolist() == [int(label == "b") for label in labels[part]]


@pytest.mark.parametrize(
    ("word", "images", "side", "first"),
    [("digits", 1797, 8, [0, 0, 80, 207, 143, 16, 0, 0]), ("mnist", 5000, 28, [0] * 8)],
)
def test_the_images_of_packages_are_one_command(
    tmp_path: Path, word: str, images: int, side: int, first: list[int]
) -> None:
    manifest = prepare(tmp_path / "x", word, "--split", "1,0,0")
    found, labels = arrays(tmp_path / "x", "train")
    assert found.shape == (images, side, side, 1)
    assert manifest["classes"] == [str(number) for number in range(10)]
    assert found[0, 0, :8, 0].tolist() == first and labels[0] == 0
    assert found.max() == 255 and Counter(labels.tolist()).most_common()[-1][1] > images / 11


def test_each_class_has_its_share_in_each_split(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2], [100, 10, 3])
    np.savez(tmp_path / "a.npz", images=random(0, 113, 2, 2), labels=labels)
    prepare(tmp_path / "x", tmp_path / "a.npz")
    found = {split: Counter(arrays(tmp_path / "x", split)[1].tolist()) for split in SPLITS}
    assert found == {"train": {0: 80, 1: 8, 2: 1}, "valid": {0: 10, 1: 1, 2: 1}, "test": {0: 10, 1: 1, 2: 1}}


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, random(0, 4, 2, 2))
    return file.getvalue()


def npz() -> bytes:
    """Of a version that needs a newer zipfile."""
    file = io.BytesIO()
    np.savez(file, images=random(0, 4, 2, 2), labels=np.arange(4))
    return re.sub(rb"(PK\x01\x02..)..", lambda found: found[1] + b"\xff\0", file.getvalue(), flags=re.DOTALL)


class PowerCut(BaseException):
    """The end, for no reason of the program's."""


def test_images_that_were_cut_off_at_every_chunk_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)
    monkeypatch.setattr(journal, "SAVE_EVERY_S", 0.0)
    tar = tar_of(folder, tmp_path / "a.tar.gz")
    prepare(tmp_path / "whole" / "x", folder, tar)
    done, cuts = OpenStep.done, 0

    def cut(self: OpenStep, items: int) -> None:
        done(self, items)
        raise PowerCut

    while True:
        with monkeypatch.context() as patch:
            patch.setattr(OpenStep, "done", cut)
            try:
                prepare(tmp_path / "cut" / "x", folder, tar)
            except PowerCut:
                cuts += 1
            else:
                break
    assert cuts == 27
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_ctrl_c_in_the_middle_of_a_chunk_leaves_nothing_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    write, left = module._write, [11]

    def interrupted(*arguments: Any) -> None:
        write(*arguments)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_write", interrupted)
        prepare(tmp_path / "cut" / "x", folder)
    for name in ("cut", "whole"):
        prepare(tmp_path / name / "x", folder)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_images_that_are_there_are_left_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path / "x", folder)
    before = (tmp_path / "x.json").stat().st_ino
    prepare(tmp_path / "x", folder)
    assert (tmp_path / "x.json").stat().st_ino == before
    assert "exists already, unchanged; --force makes it again" in capsys.readouterr().err
    (tmp_path / "x-test.labels.npy").write_bytes(b"")
    prepare(tmp_path / "x", folder)
    assert len(arrays(tmp_path / "x", "test")[1]) == 4


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        ({}, ["gone"], "no such file or folder; images of packages are called digits, mnist"),
        ({"d/readme": b""}, ["d"], "d: it has no images; give a folder or a tar file with a folder of PNG or JPEG"),
        ({"d/1.png": encoded(random(0, 2, 2))}, ["d"], "1.png: in no folder that names its class"),
        ({"d/a/1.png": encoded(random(0, 2, 2))}, ["d"], "every image is of the class 'a'; give the folder above"),
        ({"d/a/1.png": encoded(random(0, 2, 2)), "d/b/2.png": b"odd"}, ["d"], r"2\.png: cannot be decoded as a PNG or"),
        ({"d/a/1.png": encoded(random(0, 9, 9)), "d/b/2.png": encoded(random(0, 9, 9))[:90]}, ["d"], r"2\.png: can"),
        ({"d/a/1.png": encoded(random(0, 2, 2)), "d/b/2.png": encoded(random(0, 2, 3))}, ["d"],
         r"2\.png: 2x3 pixels, 1 channel, but the first image has 2x2 pixels, 1 channel; .* choose it with --size"),
        ({"d/a/1.png": encoded(random(0, 2, 2)), "d/b/2.png": encoded(random(0, 2, 2, 3))}, ["d"],
         r"2\.png: 2x2 pixels, 3 channels, but the first image has 2x2 pixels, 1 channel; .* with --channels"),
        ({"d/a/1.png": encoded(random(0, 2, 2)), "d/b/2.webp": b""}, ["d"], r"b/2\.webp is neither PNG nor JPEG;"),
        ({"a.npy": b"odd"}, ["a.npy", "a.npy"], r"a\.npy: cannot be read as an array"),
        ({"a.npy": npy()[:40] + b"\n" * 88}, ["a.npy", "a.npy"], r"a\.npy: cannot be read as an array"),
        ({"a.npz": npz()}, ["a.npz"], r"a\.npz: cannot be read as arrays"),
        ({"a.npz": b"odd"}, ["a.npz"], r"a\.npz: cannot be read as arrays"),
        ({"a.npy": b"odd"}, ["a.npy"], r"a\.npy: the labels are missing"),
        ({"a.txt": b"odd"}, ["a.txt"], r"a\.txt: not a folder, tar file, \.npz or \.npy"),
        ({"a.tar": b"odd"}, ["a.tar"], r"a\.tar: cannot be read as an archive"),
        ({"d/val/a/1.png": encoded(random(0, 2, 2)), "d/val/b/2.png": encoded(random(1, 2, 2))}, ["d"],
         r"d: every image is held out, by the name of its folder or array or by --split; give images for training"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_files_that_give_no_images_are_one_message(
    tmp_path: Path, files: dict[str, bytes], given: list[str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataPrepError, match=message):
        prepare(tmp_path / "out" / "x", *(tmp_path / name for name in given))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": random(0, 4, 2, 2)}, "has the arrays images; it must have images and labels"),
        ({"images": random(0, 4, 2), "labels": np.arange(4)}, r"images of shape \[4, 2\]; they must be"),
        ({"images": random(0, 4, 2, 2), "labels": np.arange(3)}, r"4 images, but labels of shape \[3\]"),
        ({"x": random(0, 4, 2, 2), "y": np.zeros(4)}, "labels of shape .* and float64; each image must have one label"),
        ({"x": random(0, 4, 2, 2) - 300.0, "y": np.arange(4)}, "pixels from .* to .*; they must be from 0 to 255"),
        ({"x": np.array([[["a"]]]), "y": np.array([1])}, "pixels of <U1; they must be numbers"),
        ({"x": random(0, 4, 2, 2) * np.nan, "y": np.arange(4)}, "pixels from nan to nan; they must be"),
    ],
    ids=["no labels", "flat", "too few labels", "floats", "below 0", "texts", "nan"],
)
def test_arrays_that_are_no_images_are_one_message(tmp_path: Path, arrays: dict[str, NDArray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataPrepError, match=message):
        prepare(tmp_path / "x", tmp_path / "a.npz")


@pytest.mark.parametrize("size", ["0", "x", "3x", "99999", "-1"])
def test_a_size_that_is_none_is_wrong_usage(tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        prepare(tmp_path / "x", "digits", f"--size={size}")
    assert "must be a number of pixels from 1 to 16384, or two such as 32x48" in capsys.readouterr().err
