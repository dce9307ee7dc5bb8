"""A folder of one's own: captions.tsv, and for each video that it names the features of its frames as NAME.npy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError
from data_prep.images.item import NAMED
from data_prep.videos.video import Video
from megatron_ext.contract.files import read_regular_text, why

CAPTIONS = "captions.tsv"
FORM = "each line must have the name of a video, a tab, and a sentence about it"


class OwnFolder:
    """captions.tsv lies in the folder itself, or in folders in it that are called train, valid and test."""

    synthetic = False

    def __init__(self, folder: Path) -> None:
        own = [folder / CAPTIONS] if (folder / CAPTIONS).is_file() else sorted(folder.glob(f"*/{CAPTIONS}"))
        below = {path: NAMED.get(path.parent.name.lower(), "") for path in own if path.parent != folder}
        if not own or not all(below.values()):
            raise DataPrepError(
                f"--source {folder}: has no {CAPTIONS}; {FORM}, and NAME.npy beside it the features of its frames. The "
                "file may also lie in folders called train, valid and test"
            )
        self._folder = folder
        self._found = [video for path in own for video in self._read(path, below.get(path, ""))]
        self.files = {path: str(path.relative_to(folder)) for path in own}
        self.files |= {self._path(video): f"{video.name}.npy" for video in self._found}
        self.features = int(self._open(self._found[0]).shape[1])

    def videos(self) -> list[Video]:
        return self._found

    def frames(self, video: Video) -> NDArray[np.float32]:
        found = np.asarray(self._open(video), np.float32)
        if found.shape[1] != self.features:
            raise DataPrepError(
                f"{self._path(video)}: a frame has {found.shape[1]} features, but those of {self._found[0].name}.npy "
                f"have {self.features}; all videos need as many"
            )
        if not np.isfinite(found).all():
            raise DataPrepError(f"{self._path(video)}: not all of its numbers are finite; extract the features again")
        return found

    def _read(self, path: Path, split: str) -> list[Video]:
        captions: dict[str, list[str]] = {}
        try:
            lines = read_regular_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataPrepError(f"{path}: cannot be read as UTF-8 text: {why(error)}") from error
        for number, line in enumerate(lines, 1):
            name, tab, caption = line.partition("\t")
            if not line.strip():
                continue
            if not tab or not name or not caption.strip() or Path(name).name != name:
                raise DataPrepError(f"{path}: line {number}: {line[:60]!r}: {FORM}")
            captions.setdefault(name, []).append(caption.strip())
        if not captions:
            raise DataPrepError(f"{path}: has no caption; {FORM}")
        below = "" if path.parent == self._folder else f"{path.parent.name}/"
        videos = [Video(f"{below}{name}", tuple(lines), 0, split) for name, lines in captions.items()]
        return [video._replace(length=len(self._open(video))) for video in videos]

    def _path(self, video: Video) -> Path:
        return self._folder / f"{video.name}.npy"

    def _open(self, video: Video) -> NDArray[np.floating]:
        path = self._path(video)
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataPrepError(f"{path}: the features of video {video.name} cannot be read: {why(error)}") from error
        if found.ndim != 2 or not len(found) or not found.shape[1] or found.dtype.kind not in "fiu":
            raise DataPrepError(
                f"{path}: has {list(found.shape)} of {found.dtype}, but must have [frames, features], numbers"
            )
        return found  # type: ignore[no-any-return]
