"""Videos of one's own and drawn ones become what S2VT models read; what is wrong with them is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from data_prep.errors import DataPrepError
from data_prep.kinds import kind_of
from data_prep.training import check_for_training, samples_in_split
from data_prep.videos.prepare import split_words
from data_prep.videos.sources import SIDE, OwnFolder, Shapes
from launch.cli import main
from megatron_ext.data.samples import SPLITS
from megatron_ext.data.vision.videos import Videos, open_videos

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def of(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["data", *map(str, words)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return of


def own(folder: Path, names: str = "abcdef", features: int = 5) -> dict[str, np.ndarray]:
    """A folder with a video of some frames for each name, and one or two captions."""
    folder.mkdir(parents=True)
    found, lines = {}, []
    for number, name in enumerate(names):
        found[name] = np.random.default_rng(number).standard_normal((number + 2, features))
        np.save(folder / f"{name}.npy", found[name])
        lines += [f"{name}\tA man isn't {name}!", *[f"{name}\tthe dog, {name} again"] * (number % 2)]
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n")
    return found


def words_of(prefix: Path, tokens: np.ndarray) -> list[str]:
    ids = json.loads(Path(f"{prefix}.tokenizer.json").read_text())["model"]["vocab"]
    names = {number: word for word, number in ids.items()}
    return [names[int(token)] for token in tokens]


def sentences(prefix: Path, found: Videos) -> list[str]:
    return [" ".join(words_of(prefix, found.captions[number])) for number in range(len(found.videos))]


def test_a_folder_of_ones_own_is_packed_with_every_caption_beside_its_video(tmp_path: Path, said: Said) -> None:
    arrays, prefix = own(tmp_path / "mine"), tmp_path / "data" / "mine"
    assert said("videos", "--source", tmp_path / "mine", "--output", prefix, "--split", "4,1,1") == f"{prefix}\n"
    seen = {}
    for split in SPLITS:
        found = open_videos(prefix, split)
        for number in range(len(found.starts) - 1):
            frames = np.array(found.frames[found.starts[number] : found.starts[number + 1]])
            (name,) = [one for one, array in arrays.items() if np.array_equal(array.astype(np.float32), frames)]
            texts = {
                text for text, video in zip(sentences(prefix, found), found.videos, strict=True) if video == number
            }
            seen[name] = (split, texts)
        captions = Path(f"{prefix}-{split}.captions.txt").read_text().splitlines()
        assert len(captions) == len(found.videos)
    assert seen.keys() == arrays.keys()
    assert [[split for split, _ in seen.values()].count(split) for split in SPLITS] == [4, 1, 1]
    for number, (name, (split, texts)) in enumerate(sorted(seen.items())):
        known = name if split == "train" else "<unk>"  # words are those of the training captions
        assert texts == {f"a man isn't {known}", *[f"the dog {known} again"] * (number % 2)}
    assert kind_of(prefix) == "videos"
    assert "sound, 4 train, 1 valid, 1 test videos" in said("check", prefix)
    assert "features: 5" in said("inspect", prefix)
    assert said("inspect", prefix, "--document", 0).startswith("frames: ")


def test_splits_of_the_source_are_kept_and_the_vocabulary_has_the_most_frequent_words(
    tmp_path: Path, said: Said
) -> None:
    for folder, names in (("train", "abc"), ("val", "de"), ("test", "f")):
        own(tmp_path / "mine" / folder, names)
    said("videos", "--source", tmp_path / "mine", "--output", tmp_path / "x", "--words", 3)
    manifest = json.loads((tmp_path / "x.json").read_text())
    assert [manifest["splits"][split]["videos"] for split in SPLITS] == [3, 2, 1]
    assert (manifest["vocab_size"], manifest["synthetic"]) == (4 + 3, False)
    assert "a man isn't <unk>" in sentences(tmp_path / "x", open_videos(tmp_path / "x", "train"))
    assert manifest["unknown"] > 0


def test_drawn_videos_are_the_same_for_the_same_seed_and_marked_synthetic(tmp_path: Path, said: Said) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        said("videos", "--source", "shapes", "--count", 20, "--seed", seed, "--output", tmp_path / name)
    a, b, c = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "abc")
    assert a["sha256"] == b["sha256"] != c["sha256"]
    assert a["synthetic"] and a["features"] == SIDE * SIDE
    assert [a["splits"][split]["videos"] for split in SPLITS] == [16, 2, 2]
    before = (tmp_path / "a-train.frames.npy").stat().st_mtime_ns
    said("videos", "--source", "shapes", "--count", 20, "--seed", 1, "--output", tmp_path / "a")
    assert (tmp_path / "a-train.frames.npy").stat().st_mtime_ns == before


def test_what_is_drawn_is_what_its_captions_say() -> None:
    reader = Shapes(60, 3)
    moves = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
    sizes: dict[str, list[float]] = {"small": [], "large": []}
    for video in reader.videos():
        frames = reader.frames(video).reshape(-1, SIDE, SIDE) > 0.5
        assert len(frames) == video.length
        centres = np.array([np.argwhere(frame).mean(0) for frame in frames])
        moved = centres[-1] - centres[0]
        (way,) = [move for name, move in moves.items() if f" {name}" in f" {video.captions[0].split()[-1]}"]
        assert np.array_equal(np.sign(np.where(np.abs(moved) > 2, moved, 0)), way), video
        sizes[video.captions[0].split()[1]].append(np.ptp(np.argwhere(frames[0]), 0).max())
        assert all(word in video.captions[1].split() for word in video.captions[0].split()[1:3])
    assert max(sizes["small"]) < min(sizes["large"])


def test_words_are_in_lower_case_and_without_punctuation() -> None:
    assert split_words("  A man's dog -- isn't  HE?? 2 cats. ") == ["a", "man's", "dog", "isn't", "he", "2", "cats"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "captions.tsv").unlink(), "has no captions.tsv; each line must have"),
        (lambda folder: (folder / "captions.tsv").write_text("a no tab\n"), "captions.tsv: line 1: 'a no tab'"),
        (lambda folder: (folder / "captions.tsv").write_text("../a\tb\n"), "captions.tsv: line 1: "),
        (lambda folder: (folder / "captions.tsv").write_text("\n"), "captions.tsv: has no caption"),
        (lambda folder: (folder / "captions.tsv").write_bytes(b"a\t\xff\n"), "cannot be read as UTF-8 text"),
        (lambda folder: (folder / "b.npy").unlink(), "b.npy: the features of video b cannot be read"),
        (lambda folder: np.save(folder / "b.npy", np.zeros(5)), r"b.npy: has \[5\] of float64, but must have \[frames"),
        (lambda folder: np.save(folder / "b.npy", np.zeros((0, 5))), r"b.npy: has \[0, 5\] of float64"),
        (
            lambda folder: np.save(folder / "b.npy", np.zeros((2, 4))),
            "b.npy: a frame has 4 features, but those of a.npy",
        ),
        (lambda folder: np.save(folder / "b.npy", np.full((2, 5), np.nan)), "b.npy: not all of its numbers are finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    own(tmp_path / "mine")
    spoil(tmp_path / "mine")
    with pytest.raises(DataPrepError, match=message):
        reader = OwnFolder(tmp_path / "mine")
        [reader.frames(video) for video in reader.videos()]


def test_options_that_do_not_go_together_are_said(tmp_path: Path, said: Said) -> None:
    out = ["--output", tmp_path / "x"]
    assert "nowhere: not a folder; give one with captions.tsv" in said("videos", "--source", "nowhere", *out, code=1)
    own(tmp_path / "mine")
    assert "--count 3: is for --source shapes" in said(
        "videos", "--source", tmp_path / "mine", "--count", 3, *out, code=1
    )


def test_a_launch_says_what_does_not_fit(tmp_path: Path, said: Said) -> None:
    prefix = tmp_path / "x"
    said("videos", "--source", "shapes", "--count", 20, "--output", prefix)
    words = ["model=s2vt-tiny", f"data.prefix={prefix}", "parallel=single"]
    assert check_for_training(compose(words)) == []
    assert samples_in_split(compose(words), "valid") == 4
    with pytest.raises(DataPrepError, match=r"features, but model.features=3; set model.features=144"):
        check_for_training(compose([*words, "model.features=3"]))
    with pytest.raises(DataPrepError, match=r"has token ids up to \d+, but model.vocab_size=9; set it to what"):
        check_for_training(compose([*words, "model.vocab_size=9"]))
    assert (
        "captions are used; the others are longer"
        in check_for_training(compose([*words, "model.decoder_sequence_length=7"]))[0]
    )
    with pytest.raises(DataPrepError, match=r"holds videos, but model.family=gpt learns from text"):
        check_for_training(compose([f"data.prefix={prefix}", "parallel=single"]))
    assert "holds videos, but merge is for text" in said("merge", prefix, prefix, "--output", tmp_path / "y", code=1)
    (tmp_path / "x-test.captions.txt").write_text("changed\n")
    assert "not those that the manifest describes" in said("check", prefix, code=1)
