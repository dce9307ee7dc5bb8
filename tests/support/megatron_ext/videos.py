"""Small data of videos: frames of random numbers, and captions that follow from their sums."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.samples import SPLITS

FEATURES = 10
FIRST_WORD = 4
"""Behind the marks."""


def write_videos(folder: Path, vocab_size: int, videos: int = 12, longest: int = 9) -> Path:
    """The prefix of `videos` for training, of 3 to 20 frames each, and a few for the other splits; some have two
    captions."""
    prefix, random = folder / "videos", np.random.default_rng(0)
    for split in SPLITS:
        count = videos if split == "train" else 5
        lengths = random.integers(3, 21, count)
        frames = random.standard_normal((int(lengths.sum()), FEATURES)).astype(np.float32)
        about = np.sort(np.concatenate([np.arange(count), random.integers(0, count, count // 2)]))
        captions = [random.integers(FIRST_WORD, vocab_size, random.integers(1, longest + 1)) for _ in about]
        np.save(f"{prefix}-{split}.frames.npy", frames)
        np.save(f"{prefix}-{split}.lengths.npy", lengths.astype(np.int64))
        np.save(f"{prefix}-{split}.videos.npy", about.astype(np.int64))
        write_indexed(Path(f"{prefix}-{split}.captions"), captions, np.dtype("<u2"))
    Path(f"{prefix}.json").write_text(json.dumps({"version": 1, "kind": "videos", "features": FEATURES}))
    return prefix
