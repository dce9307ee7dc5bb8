"""Text, pairs and images are told apart by whatever opens data, and each is looked at in its own way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from data_prep.errors import DataPrepError
from data_prep.kinds import kind_of
from data_prep.training import check_for_training
from launch.commands.data import main
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.doctor.__main__ import _files, _maps
from tests.data_prep.pairs.test_pairs import numbered, prepare, write

MODELS = {
    "text": ["model=tiny", "model.vocab_size=300"],
    "pairs": ["model=transformer-tiny", "model.vocab_size=300"],
    "images": ["model=vit-tiny"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of each kind."""
    folder = tmp_path_factory.mktemp("made")
    source = write(folder / "in", numbered(200))
    prepare(source, folder / "pairs", "--train-bpe", "300")
    assert main(["prepare", "--source", f"{source}.de", "--output", str(folder / "text")]) == 0
    assert main(["images", "--source", "digits", "--output", str(folder / "images")]) == 0
    return folder


@pytest.fixture
def prefixes(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """A copy, which a test may damage."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    capsys.readouterr()
    return {
        "pairs": tmp_path / "pairs", "text": tmp_path / "text_text_document", "images": tmp_path / "images"
    }  # fmt: skip


@pytest.mark.parametrize("wanted", MODELS)
def test_data_of_another_kind_than_the_model_learns_from_are_one_message(
    prefixes: dict[str, Path], wanted: str
) -> None:
    for kind, prefix in prefixes.items():
        experiment = compose([f"data.prefix={prefix}", *MODELS[wanted]])
        if kind == wanted:
            check_for_training(experiment)
        else:
            message = (
                f"data.prefix={prefix} holds {kind}, but model.family=.* learns from {wanted}; give data that 'tdpp"
            )
            with pytest.raises(DataPrepError, match=message):
                check_for_training(experiment)


def test_only_text_is_blended(prefixes: dict[str, Path], tmp_path: Path) -> None:
    experiment = compose(
        [f"data.prefix={prefixes['pairs']}", f"data.blend=[{{prefix:{tmp_path}/other}}]", *MODELS["pairs"]]
    )
    with pytest.raises(DataPrepError, match=r"data\.blend mixes text alone, but model\.family=transformer"):
        check_for_training(experiment)


def test_data_that_nobody_described_have_no_kind(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"kind": ["pairs"]}')
    assert kind_of(tmp_path / "x") is None
    (tmp_path / "x.idx").write_bytes(b"")
    assert kind_of(tmp_path / "x") == "text"


def test_inspect_says_what_pairs_hold(prefixes: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(prefixes["pairs"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["kind: pairs", "languages: de to en"]
    train = json.loads(Path(f"{prefixes['pairs']}.json").read_text())["splits"]["train"]
    assert lines[2].startswith(f"train: {train['pairs']} pairs, {train['source_tokens']} and {train['target_tokens']} ")
    assert "vocabulary: 300" in lines and "left out: none" in lines


def test_inspect_prints_a_pair_and_a_sample_of_a_run(
    prefixes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [Path(f"{prefixes['pairs']}-train.{side}.txt").read_text().splitlines() for side in ("source", "target")]
    assert main(["inspect", str(prefixes["pairs"]), "--document", "7"]) == 0
    assert capsys.readouterr().out == f"de: {texts[0][7]}\nen: {texts[1][7]}\n"
    seen = set()
    for number in range(len(texts[0])):
        assert main(["inspect", str(prefixes["pairs"]), "--sample", str(number), "--seed", "3"]) == 0
        seen.add(capsys.readouterr().out)
    assert seen == {f"de: {one}\nen: {other}\n" for one, other in zip(*texts, strict=True)}


def test_inspect_says_what_images_hold_and_draws_one(
    prefixes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(prefixes["images"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "kind: images",
        "shape: 8x8 pixels, 1 channel",
        "classes: 10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        "train: 1439 images, 140 to 147 of a class",
    ]
    assert main(["inspect", str(prefixes["images"]), "--document", "0"]) == 0
    label, *rows = capsys.readouterr().out.split("\n")[:-1]
    image = np.load(f"{prefixes['images']}-train.images.npy")[0, :, :, 0]
    labels = np.load(f"{prefixes['images']}-train.labels.npy")
    assert label == f"class: {labels[0]}"
    drawn = np.array([list(row.ljust(16))[::2] for row in rows])
    assert ((drawn == " ") == (image < 26)).all()
    assert ((drawn == "@") == (image > 230)).all()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pairs", ["--document", "999"], "--document 999: .* has the training pairs 0 to"),
        ("pairs", ["--sample", "4", "--samples", "4"], r"--sample 4: the run has the samples 0 to 3 \(--samples\)"),
        ("pairs", ["--sample", "0", "--sequence-length", "2"], "--sample 0: .*none of .* pairs fits"),
        ("pairs", ["--page", "x.html"], "--page: .* holds pairs, which have none; --document N shows one"),
        ("images", ["--document", "-1"], "--document -1: .* has the training images 0 to 1438"),
        ("images", ["--sample", "0"], "--sample: .* holds images, which have none"),
        ("images", ["--family", "bert"], "--family: .* holds images, which have none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_inspected_is_one_message(
    prefixes: dict[str, Path], kind: str, options: list[str], message: str
) -> None:
    with pytest.raises(DataPrepError, match=message):
        main(["inspect", str(prefixes[kind]), *options])


def test_check_passes_sound_data_of_each_kind(prefixes: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for kind, ending in (("pairs", "4 test pairs"), ("images", "179 test images of 10 classes")):
        assert main(["check", str(prefixes[kind])]) == 0
        assert capsys.readouterr().out.endswith(f"{ending}\n")


@pytest.mark.parametrize(
    ("kind", "file"),
    [("pairs", "-valid.target.bin"), ("pairs", "-train.source.txt"), ("images", "-test.labels.npy")],
)
def test_check_finds_one_changed_byte(prefixes: dict[str, Path], kind: str, file: str) -> None:
    path = Path(f"{prefixes[kind]}{file}")
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataPrepError, match="the files are not those that the manifest describes; prepare them again"):
        main(["check", str(prefixes[kind])])


def test_check_finds_ids_beyond_a_vocabulary(prefixes: dict[str, Path]) -> None:
    with pytest.raises(DataPrepError, match=r"has token id 29., but the vocabulary has 0 to 279"):
        main(["check", str(prefixes["pairs"]), "--vocab-size", "280"])
    with pytest.raises(DataPrepError, match=r"--vocab-size 9: .* holds images, which have no tokens"):
        main(["check", str(prefixes["images"]), "--vocab-size", "9"])


@pytest.mark.parametrize("kind", ["pairs", "images"])
@pytest.mark.parametrize("content", [b"{}", b'{"kind": "?", "version": 9}', b'{"kind": "?", "version": 1}'], ids=str)
def test_a_damaged_manifest_is_one_message(prefixes: dict[str, Path], kind: str, content: bytes) -> None:
    Path(f"{prefixes[kind]}.json").write_bytes(content.replace(b"?", kind.encode()))
    for command in ("check", "inspect"):
        with pytest.raises(DataPrepError, match=r"no such file|only 1 is supported|is damaged|lacks"):
            main([command, str(prefixes[kind])])


@pytest.mark.parametrize("command", [["merge"], ["split", "--weights", "1,1"]], ids=["merge", "split"])
def test_merging_and_splitting_are_for_text(prefixes: dict[str, Path], tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(DataPrepError, match=f"holds pairs, but {command[0]} is for text; give 'tdpp"):
        main([command[0], str(prefixes["pairs"]), *command[1:], "--output", str(tmp_path / "other")])


@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_a_node_is_asked_for_the_files_of_the_kind(prefixes: dict[str, Path], tmp_path: Path, kind: str) -> None:
    experiment = compose([f"data.prefix={prefixes[kind]}", "parallel=single", *MODELS[kind]])
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(experiment, "x/y").as_json()))
    plan = Plan.read(tmp_path / "plan.json")
    found = dict(_files(plan))
    assert len(found) == (4 if kind == "pairs" else 3)
    assert all(note == {"bytes": Path(path).stat().st_size} for path, note in found.items())
    assert not dict(_maps(plan))
