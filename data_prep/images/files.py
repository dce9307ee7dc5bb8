"""Images as files: `<class>/<image>`, perhaps below a folder for each split, in a folder or a tar file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from data_prep.errors import DataPrepError
from data_prep.files.archives import content_of, members, names
from data_prep.images.item import NAMED, Content, Item

SUFFIXES = (".png", ".jpg", ".jpeg")
OTHERS = (".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".avif", ".heic")
"""Images that are not read; to pass them over would leave them out without a word."""


@dataclass(frozen=True)
class ImageFiles:
    """A folder or a tar file with a folder for each class.

    Where all folders are called after splits (`train/cat/1.png`), these are the splits. A folder around all others,
    as tar files often have one, is passed over.
    """

    path: Path

    @property
    def files(self) -> dict[Path, str]:
        if self.path.is_file():
            return {self.path: self.path.name}
        return {self.path / name: name for name, _ in self._found}

    def items(self) -> list[Item]:
        return [item for _, item in self._found]

    def contents(self, first: int) -> Iterator[Content]:
        wanted = {name for name, _ in self._found[first:]}
        if self.path.is_dir():
            yield from (content_of(self.path / name) for name, _ in self._found[first:])
        else:
            yield from (content for _, content in members(self.path, wanted.__contains__))

    @cached_property
    def _found(self) -> list[tuple[str, Item]]:
        """Each image's name in the source, and what it is."""
        there = names(self.path)
        if other := next((name for name in there if name.lower().endswith(OTHERS)), None):
            raise DataPrepError(f"--source {self.path}: {other} is neither PNG nor JPEG; convert it, or remove it")
        found = [name for name in there if name.lower().endswith(SUFFIXES)]
        if not found:
            raise DataPrepError(
                f"--source {self.path}: it has no images; give a folder or a tar file with a folder of PNG or JPEG "
                "files for each class, or .npy and .npz arrays"
            )
        if len(found) != len(set(found)):
            raise DataPrepError(f"--source {self.path}: a file is in it twice; pack it again")
        parts = {name: PurePosixPath(name).parts for name in found}
        while not _in_splits(parts.values()) and _in_one_folder(parts.values()):
            parts = {name: path[1:] for name, path in parts.items()}
        in_splits = _in_splits(parts.values())
        return [(name, self._item(name, parts[name], in_splits)) for name in found]

    def _item(self, name: str, parts: tuple[str, ...], in_splits: bool) -> Item:
        shown = f"{self.path}: {name}" if self.path.is_file() else str(self.path / name)
        split = NAMED[parts[0].lower()] if in_splits else ""
        folders = parts[1:-1] if in_splits else parts[:-1]
        if not folders:
            raise DataPrepError(
                f"{shown}: in no folder that names its class; give a folder with a folder for each class"
            )
        return Item(shown, "/".join(parts), folders[0], split)


def _in_splits(paths: Collection[tuple[str, ...]]) -> bool:
    return all(len(path) > 2 and path[0].lower() in NAMED for path in paths)


def _in_one_folder(paths: Collection[tuple[str, ...]]) -> bool:
    """Whether there is a folder around all, with folders in it."""
    return all(len(path) > 2 for path in paths) and len({path[0] for path in paths}) == 1
