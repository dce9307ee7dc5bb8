"""Whether images can be used: for a run, or all of them in full."""

from __future__ import annotations

from pathlib import Path

from conf.schema.model import Model
from data_prep.errors import DataPrepError
from data_prep.files.hashes import require_unchanged
from data_prep.images.item import SPLITS
from data_prep.images.manifest import ImagesManifest
from data_prep.kinds import read_described
from megatron_ext.contract.errors import DataError
from megatron_ext.data.vision.images import open_images, require_fitting


def check_images(model: Model, prefix: Path) -> None:
    """Raises DataPrepError for images that are missing, damaged, or not those of the model."""
    try:
        require_fitting(prefix, open_images(prefix, "train").manifest, model.sized(1))
    except DataError as error:
        raise DataPrepError(f"data.prefix={prefix}: {error}") from error


def check_in_full(prefix: Path) -> ImagesManifest:
    """Checks hashes, shapes and labels.

    Raises:
        DataPrepError: they cannot be used.
    """
    manifest = read_described(prefix, ImagesManifest)
    require_unchanged(manifest.sha256, prefix)
    for split in SPLITS:
        if manifest.splits[split].images:
            try:
                count = len(open_images(prefix, split).images)
            except DataError as error:
                raise DataPrepError(str(error)) from error
            if count != manifest.splits[split].images:
                raise DataPrepError(
                    f"{prefix}: {count} {split} images, but {prefix}.json has {manifest.splits[split].images}; "
                    "prepare the data again"
                )
    return manifest
