"""Whether images can be used: for a run, or all of them in full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conf.schema.model import Model
from conf.visible import plural
from data_prep.errors import DataPrepError, named
from data_prep.images.image import Shape
from data_prep.kinds import ImagesManifest, read_described, read_unchanged, require_training_document
from megatron_ext.contract.models.model import IMAGES
from megatron_ext.data.samples import SPLITS
from megatron_ext.data.vision.images import open_images, require_fitting


def check_images(model: Model, prefix: Path) -> None:
    """Raises DataPrepError for images that are missing, damaged, or not those of the model."""
    with named(f"data.prefix={prefix}"):
        require_fitting(prefix, open_images(prefix, "train").manifest, model.sized(1))


def check_in_full(prefix: Path) -> ImagesManifest:
    """Checks hashes, shapes and labels. Raises DataPrepError: they cannot be used."""
    manifest = read_unchanged(prefix, ImagesManifest)
    for split in SPLITS:
        if manifest.splits[split].images:
            with named():
                count = len(open_images(prefix, split).images)
            if count != manifest.splits[split].images:
                raise DataPrepError(
                    f"{prefix}: {count} {split} images, but {prefix}.json has {manifest.splits[split].images}; "
                    "prepare the data again"
                )
    return manifest


SHADES = " .:-=+*#%@"
"""From black to white."""
COLUMNS = 64
"""At most; each takes two letters, which are twice as high as wide."""


def described(prefix: Path) -> dict[str, str]:
    """What the manifest says, for people, and how many images of each class there are."""
    manifest = read_described(prefix, ImagesManifest)
    facts = {
        "kind": "images",
        "shape": str(Shape(manifest.height, manifest.width, manifest.channels)),
        "classes": f"{len(manifest.classes)}: {', '.join(manifest.classes[:10])}{', …' * (len(manifest.classes) > 10)}",
    }
    for split in SPLITS:
        count = manifest.splits[split].images
        facts[split] = plural(count, "image")
        if count:
            with named():
                labels = open_images(prefix, split).labels
            found = np.bincount(labels, minlength=len(manifest.classes))
            facts[split] += f", {found.min()} to {found.max()} of a class"
    for name, values in (("mean", manifest.mean), ("standard deviation", manifest.std)):
        facts[name] = ", ".join(f"{value:.4f}" for value in values)
    return {**facts, "source": manifest.corpus}


def document_text(prefix: Path, number: int) -> str:
    """A training image in letters, and its class. Raises DataPrepError: there is none."""
    manifest = read_described(prefix, ImagesManifest)
    count = manifest.splits["train"].images
    require_training_document(prefix, IMAGES, number, count)
    with named():
        found = open_images(prefix, "train")
    return "\n".join([f"class: {manifest.classes[int(found.labels[number])]}", *drawn(found.images[number])])


def drawn(image: NDArray[np.uint8]) -> list[str]:
    """The rows of an image [height, width, channels] in letters, a bright one for a bright pixel."""
    step = -(-image.shape[1] // COLUMNS)
    bright = image[::step, ::step].mean(2).astype(np.int64) * len(SHADES) // 256
    return ["".join(SHADES[value] * 2 for value in row).rstrip() for row in bright.tolist()]
