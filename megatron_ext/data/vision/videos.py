"""Videos, as numbers that describe their frames, and sentences about them (docs/formats.md).

At PREFIX for each split: `-train.frames.npy` (fp32 [frames, features]) has the frames of all videos one after another,
`-train.lengths.npy` (int64 [videos]) how many each has; `-train.captions.{bin,idx}` sentences, and
`-train.videos.npy` (int64 [captions]) the video that each is about. `PREFIX.json` describes them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.pairs import BEGIN, END, padded
from megatron_ext.data.samples import Orders, Samples, Split, check_token_ids
from megatron_ext.data.vision.images import manifest_content, opened_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMEDY = "make the data again with 'tdpp data videos'"
ORDER = 0x51D0
"""Sets the random numbers of the order apart from those of the same seed elsewhere."""


class Videos(NamedTuple):
    """One split."""

    frames: NDArray[np.float32]
    """[frames of all videos, features], in the file."""
    starts: NDArray[np.int64]
    """[videos + 1]: where the frames of each begin, and where the last ones end."""
    captions: IndexedDataset
    videos: NDArray[np.int64]
    """[captions]: the number of the video that each is about."""

    def look(self, video: int, count: int) -> NDArray[np.float32]:
        """[count, features]: so many frames of a video at equal distances; of a shorter one some come again."""
        first, last = self.starts[video], self.starts[video + 1]
        places = first + ((np.arange(count) + 0.5) * (last - first) / count).astype(np.int64)
        return np.array(self.frames[places], np.float32)


def open_videos(prefix: Union[str, Path], split: str) -> Videos:
    """One of the splits of `samples.SPLITS`. Raises DataError: it is missing, damaged, or its files do not belong
    together."""
    path = Path(f"{prefix}.json")
    features = manifest_content(path, "videos").get("features")
    if type(features) is not int or features < 1:
        raise DataError(f"{path}: is damaged: features must be 1 or more; {REMEDY}")
    frames, lengths, videos = (opened_array(prefix, split, what, REMEDY) for what in ("frames", "lengths", "videos"))
    captions = IndexedDataset(f"{prefix}-{split}.captions")
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    stem = f"{prefix}-{split}"
    if frames.dtype != np.float32 or frames.ndim != 2 or frames.shape[1] != features:
        raise DataError(
            f"{stem}.frames.npy: has {list(frames.shape)} of {frames.dtype}, but its manifest says {features} features "
            f"in fp32; {REMEDY}"
        )
    if len(lengths) and (lengths.min() < 1 or starts[-1] != len(frames)):
        raise DataError(f"{stem}.lengths.npy: adds up to {starts[-1]} frames, but there are {len(frames)}; {REMEDY}")
    if len(videos) != len(captions) or (len(videos) and not 0 <= videos.min() <= videos.max() < len(lengths)):
        raise DataError(
            f"{stem}.videos.npy: must name one of {len(lengths)} videos for each of {len(captions)} captions; {REMEDY}"
        )
    return Videos(frames, starts, captions, videos)


def fitting(found: Videos, model: ModelConfig, prefix: Union[str, Path]) -> NDArray[np.int64]:
    """The numbers of the captions that a model has room for, with the mark that each gets. Raises DataError: the model
    takes other features, or none of them fits."""
    if found.frames.shape[1] != model.features:
        raise DataError(
            f"{prefix}: its frames have {found.frames.shape[1]} features, but model.features={model.features}; set "
            f"model.features={found.frames.shape[1]}"
        )
    lengths = np.asarray(found.captions.lengths)
    kept: NDArray[np.int64] = np.flatnonzero((lengths > 0) & (lengths < model.decoder_tokens))
    if not len(kept):
        raise DataError(
            f"{found.captions.idx}: none of {len(lengths)} captions fits model.decoder_sequence_length="
            f"{model.decoder_tokens}; the longest needs {lengths.max(initial=0) + 1}"
        )
    return kept


class VideoSamples(Samples):
    """Captions with the frames of their videos, in an order of each epoch's own.

    Raises:
        DataError: as `open_videos` and `fitting`; or on use, a token is not in the vocabulary.
    """

    def __init__(self, prefix: Union[str, Path], split: Split, model: ModelConfig) -> None:
        super().__init__(split.samples, split.name)
        self._found = open_videos(prefix, split.name)
        self._kept = fitting(self._found, model, prefix)
        self._model = model
        self.in_epoch = len(self._kept)
        self.order: Dict[str, float] = {"seed": split.seed, "captions": self.in_epoch}
        self._orders = Orders.drawn(self.in_epoch, split.seed, ORDER)

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """`frames` fp32 [frames, features] and what `targets` gives."""
        caption = self._caption(number)
        frames = self._found.look(int(self._found.videos[caption]), self._model.sequence_length)
        return {"frames": frames, **self._words(caption)}

    def targets(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        """[decoder's sequence]: `text_dec` a begin and the caption; `labels` the caption and its end, `loss_mask` 1
        there. No frame is read."""
        found = [self._words(self._caption(number)) for number in numbers.ravel().tolist()]
        stacked = {name: np.stack([one[name] for one in found]) for name in found[0]}
        words = {name: one.reshape(numbers.shape + one.shape[1:]) for name, one in stacked.items()}
        return {**words, "number": numbers + self._first_number}

    def _words(self, caption: int) -> Dict[str, NDArray[Any]]:
        data, size = self._found.captions, self._model.vocab_size
        tokens = data[caption]
        what = partial("{}: caption {}".format, data.bin, caption)
        check_token_ids(tokens, size, what, f"model.vocab_size={size}", "set that of the data")
        words: List[int] = tokens.tolist()
        length = self._model.decoder_tokens
        text_dec, _ = padded([BEGIN, *words], length)
        labels, loss_mask = padded([*words, END], length)
        return {"text_dec": text_dec, "labels": labels, "loss_mask": loss_mask}

    def _caption(self, number: int) -> int:
        return int(self._kept[self._orders.place(number)])
