"""Images and their classes: arrays of whole numbers that are read where they lie, and the manifest that describes them.

At PREFIX: for each split `PREFIX-train.images.npy` (uint8 [images, height, width, channels]) and
`PREFIX-train.labels.npy` (int64 [images]); `PREFIX.json` has classes, mean and standard deviation (docs/formats.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.files import read_json, why
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_parts import Augment
from megatron_ext.data.samples import Orders, Samples, Split
from megatron_ext.data.vision import augment

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
"""The version of the manifests of images and videos."""
REMEDY = "make the data again with 'tdpp data images'"
ORDER = 0x0DE2
"""Sets the random numbers of the order apart from those of the same seed elsewhere."""


class Manifest(NamedTuple):
    """What PREFIX.json says."""

    classes: int
    height: int
    width: int
    channels: int
    mean: NDArray[np.float32]
    """[channels], of pixels from 0 to 1."""
    std: NDArray[np.float32]


class Images(NamedTuple):
    """One split."""

    manifest: Manifest
    images: NDArray[np.uint8]
    """[images, height, width, channels], in the file."""
    labels: NDArray[np.int64]


def manifest_content(path: Path, kind: str) -> Dict[str, Any]:
    """What the manifest of data of this kind says. Raises DataError: it cannot be read, or is none."""
    content = read_json(path, DataError, way_out=f"data.prefix must name data made by 'tdpp data {kind}'")
    if not isinstance(content, dict) or (content.get("kind"), content.get("version")) != (kind, VERSION):
        raise DataError(f"{path}: is not a manifest of {kind}, version {VERSION}; make them with 'tdpp data {kind}'")
    return content


def read_manifest(prefix: Union[str, Path]) -> Manifest:
    """Raises DataError for a file that is missing or describes no images."""
    path = Path(f"{prefix}.json")
    content = manifest_content(path, "images")
    try:
        height, width, channels = (content[key] for key in ("height", "width", "channels"))
        mean, std = (np.array(content[key], dtype=np.float32) for key in ("mean", "std"))
        classes = len(content["classes"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}: is damaged: {what}") from error
    if any(type(size) is not int or size < 1 for size in (height, width, channels)) or not classes:
        raise DataError(f"{path}: is damaged: height, width, channels and the number of classes must be 1 or more")
    numbers = np.concatenate([mean.ravel(), std.ravel()])
    if mean.shape != (channels,) or std.shape != (channels,) or not np.isfinite(numbers).all() or std.min() <= 0:
        raise DataError(f"{path}: is damaged: mean and std must be a number for each channel, std above 0")
    return Manifest(classes, height, width, channels, mean, std)


def open_images(prefix: Union[str, Path], split: str) -> Images:
    """One of the splits of `samples.SPLITS`. Raises DataError: it is missing, damaged, or not as the manifest says."""
    manifest = read_manifest(prefix)
    images, labels = (opened_array(prefix, split, what, REMEDY) for what in ("images", "labels"))
    path = f"{prefix}-{split}.images.npy"
    shape = (manifest.height, manifest.width, manifest.channels)
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise DataError(
            f"{path}: has {list(images.shape)} of {images.dtype}, but its manifest says {list(shape)} uint8"
        )
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{prefix}-{split}.labels.npy: has {list(labels.shape)} of {labels.dtype}, but there are "
            f"{len(images)} images, which need int64"
        )
    if not len(images):
        raise DataError(f"{path}: has no image")
    if labels.min() < 0 or labels.max() >= manifest.classes:
        raise DataError(
            f"{prefix}-{split}.labels.npy: has labels from {labels.min()} to {labels.max()}, but its manifest has "
            f"{manifest.classes} classes"
        )
    return Images(manifest, images, labels)


def require_fitting(prefix: Union[str, Path], manifest: Manifest, model: ModelConfig) -> None:
    """Raises DataError unless a model takes such images."""
    found = {"height": manifest.height, "width": manifest.width}
    for what, pixels in found.items():
        if pixels != model.image_size:
            raise DataError(
                f"{prefix}: its images have a {what} of {pixels} pixels, but model.image_size={model.image_size}; set "
                "model.image_size to that, or make the data again with that size"
            )
    if manifest.channels != model.channels:
        raise DataError(
            f"{prefix}: its images have {manifest.channels} channels, but model.channels={model.channels}; set "
            f"model.channels={manifest.channels}"
        )
    if model.classes is None or manifest.classes > model.classes:
        raise DataError(
            f"{prefix}: its images are of {manifest.classes} classes, but model.classes={model.classes}; set "
            f"model.classes={manifest.classes}"
        )


class ImageSamples(Samples):
    """Images of a split in an order of each epoch's own, changed as training asks for; others in their own order.

    Raises:
        DataError: the data cannot be used, or not with this model.
    """

    ahead = True

    def __init__(
        self, prefix: Union[str, Path], split: Split, model: ModelConfig, changes: Optional[Augment] = None
    ) -> None:
        super().__init__(split.samples, split.name)
        self.source = f"{prefix}-{split.name}.images.npy"
        self._found = open_images(prefix, split.name)
        require_fitting(prefix, self._found.manifest, model)
        self._seed = split.seed
        self._trains = split.name == "train"
        self._changes = changes if self._trains else None
        self.in_epoch = len(self._found.images)
        self.order: Dict[str, float] = {"seed": split.seed, "images": self.in_epoch}
        self._orders = Orders.drawn(self.in_epoch, split.seed, ORDER)

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        return {name: one[0] for name, one in self.batch(np.array([number])).items() if name != "number"}

    def batch(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        """`images` fp32 [channels, height, width] and what `targets` gives, each after `numbers`' shape, whose last
        dimension is a micro-batch: images are mixed within it."""
        found = self.targets(numbers)
        places = self._places(numbers)
        manifest = self._found.manifest
        pixels = self._found.images[places]
        if self._changes is not None:
            for row, number in zip(pixels, numbers.ravel().tolist()):
                row[:] = augment.changed(row, self._changes, augment.source(self._seed, number))
        images = (pixels.astype(np.float32) / np.float32(255.0) - manifest.mean) / manifest.std
        if self._changes is not None and self._changes.erasing:
            for row, number in zip(images, numbers.ravel().tolist()):
                augment.erase(row, self._changes.erasing, augment.source(self._seed, number, augment.ERASING))
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        images = images.reshape(*numbers.shape, *images.shape[1:])
        if self._mixes:
            for micro, first in zip(self._micros(images, numbers), self._micros(numbers, numbers)[:, 0].tolist()):
                self._mixing(first).apply(micro)
        return {"images": images, **found}

    def targets(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        """Return by name, each of `numbers`' shape: `label`; `other`, the class of the image that is mixed in; `share`
        fp32, the part of the image itself; `number`. No image is read."""
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(outside):
            raise IndexError(f"sample {outside[0]} of {len(self)}")
        label = self._found.labels[self._places(numbers)].reshape(numbers.shape)
        other, share = label, np.ones(numbers.shape, np.float32)
        if self._mixes:
            other = label[..., ::-1].copy()
            for micro, first in zip(self._micros(share, numbers), self._micros(numbers, numbers)[:, 0].tolist()):
                micro[:] = self._mixing(first).share
        return {"label": label, "other": other, "share": share, "number": numbers + self._first_number}

    @property
    def _mixes(self) -> bool:
        return self._changes is not None and (self._changes.mixup > 0 or self._changes.cutmix > 0)

    def _mixing(self, first: int) -> augment.Mixing:
        assert self._changes is not None
        manifest = self._found.manifest
        source = augment.source(self._seed, first, augment.MIXING)
        return augment.drawn(self._changes, manifest.height, manifest.width, source)

    def _micros(self, array: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Return a view by micro-batch."""
        return array.reshape(-1, *array.shape[numbers.ndim - 1 :])

    def _places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n]: the places of samples [...] among the images of the split."""
        flat = numbers.ravel()
        # Mixed, too, where nothing is trained: files may lie class by class, and an evaluation may take the first ones.
        return self._orders.places(flat if self._trains else flat % len(self._found.images))


def opened_array(prefix: Union[str, Path], split: str, what: str, remedy: str) -> NDArray[Any]:
    """A split's array, where it lies in its file; raises DataError with the `remedy` where it cannot be read."""
    path = Path(f"{prefix}-{split}.{what}.npy")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {why(error)}; {remedy}") from error
