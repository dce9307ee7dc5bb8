"""`tdpp data`: results on stdout, progress on stderr, true exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import DataPrepError
from data_prep.preparation import options
from data_prep.text.corpus import stdlib_corpus
from data_prep.tokenizers.tokenizer import ByteTokenizer
from launch.commands.data import main
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.indexed_dataset import CODES, IndexedDataset, data_file, write_indexed
from megatron_ext.data.samples import Split
from tests.data_prep.conftest import TEXTS


@pytest.fixture
def prefix(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """What `tdpp data prepare --source stdlib` writes in an empty folder, of a small library."""
    monkeypatch.setattr(options, "stdlib_corpus", lambda max_mb: stdlib_corpus(max_mb, library))
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "--source", "stdlib"]) == 0
    capsys.readouterr()
    return Path("data/stdlib_text_document")


def test_prepare_prints_the_prefix_on_stdout_and_tells_the_rest_on_stderr(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--source", "stdlib", "--output", "other"]) == 0
    out, err = capsys.readouterr()
    assert out == "other_text_document\n"
    assert "3 documents, 1 empty left out, 3027 tokens of Python" in err


def written(file: Path) -> tuple[int, int, int]:
    """Which file it is, its size and when it was written; reading changes none of them."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def test_prepare_does_nothing_twice(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(data_file(prefix, ".bin"))
    assert main(["prepare", "--source", "stdlib", "--output", "data/stdlib"]) == 0
    out, err = capsys.readouterr()
    assert (out, written(data_file(prefix, ".bin"))) == (f"{prefix}\n", before)
    assert "exists already, unchanged; --force makes it again" in err


@pytest.mark.parametrize("options", [["--force"], ["--min-chars", "7"]], ids=" ".join)
def test_prepare_works_anew_when_told_or_when_asked_for_other_text(prefix: Path, options: list[str]) -> None:
    before = data_file(prefix, ".bin").stat().st_ino
    assert main(["prepare", "--source", "stdlib", *options]) == 0
    assert data_file(prefix, ".bin").stat().st_ino != before


def test_prepare_replaces_data_that_others_made_only_when_told(prefix: Path) -> None:
    data_file(prefix, ".json").unlink()
    before = written(data_file(prefix, ".bin"))
    with pytest.raises(DataPrepError, match=r"--output data/stdlib: .*\.bin is there, and no manifest .*--force"):
        main(["prepare", "--source", "stdlib"])
    assert written(data_file(prefix, ".bin")) == before
    assert main(["prepare", "--source", "stdlib", "--force"]) == 0


@pytest.mark.parametrize("limit", ["0", "-1", "2.5", "much"])
def test_a_limit_that_is_none_is_wrong_usage(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "--source", "stdlib", f"--max-mb={limit}"])
    assert f"{limit!r} must be a whole number, at least 1" in capsys.readouterr().err


def test_inspect_tells_what_the_data_hold(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(prefix)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["documents: 3", "sequences: 3", "tokens: 3027", "number format: uint16"]
    assert "tokenizer: byte" in lines and "vocabulary: 257" in lines


def test_inspect_prints_a_document_as_it_was(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(prefix), "--document", "1"]) == 0
    assert capsys.readouterr().out == TEXTS["b.py"] + "\n"


def test_inspect_names_the_documents_there_are(prefix: Path) -> None:
    with pytest.raises(DataPrepError, match=r"--document 3: .* has the documents 0 to 2"):
        main(["inspect", str(prefix), "--document", "3"])


def test_inspect_turns_no_tokens_into_text_without_their_tokenizer(prefix: Path) -> None:
    data_file(prefix, ".json").unlink()
    with pytest.raises(DataPrepError, match="has no manifest, so its tokens cannot be turned into text"):
        main(["inspect", str(prefix), "--document", "0"])


def test_inspect_prints_a_sample_as_a_run_is_given_it(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--samples", "100", "--sequence-length", "64", "--seed", "7", "--split", "1,0,0"]
    run = GptSamples(prefix, Split(100, 7), 64, 257)
    for number in (0, 99):
        assert main(["inspect", str(prefix), "--sample", str(number), *options]) == 0
        assert capsys.readouterr().out == ByteTokenizer().decode(run.tokens(number)) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "9", "--samples", "9"], r"--sample 9: the run has the samples 0 to 8 \(--samples\)"),
        (["--sample", "1000000000"], "a run of 1000000001 samples is too large to be laid out here"),
        (["--sample", "0", "--split", "0,1,1"], r"--sample 0: --split '0,1,1' must be three weights"),
        (["--sample", "0", "--sequence-length", "9000"], r"--sample 0: .*the train split has .* one sample takes 9001"),
    ],
    ids=["beyond the run", "too many", "no split", "longer than the data"],
)
def test_a_sample_that_no_run_has_is_refused(prefix: Path, options: list[str], message: str) -> None:
    with pytest.raises(DataPrepError, match=message):
        main(["inspect", str(prefix), *options])


def test_check_passes_sound_data(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(prefix)]) == 0
    assert capsys.readouterr().out == f"{prefix}: sound, 3 documents, 3027 tokens\n"


def test_check_finds_one_changed_token(prefix: Path) -> None:
    with data_file(prefix, ".bin").open("r+b") as file:
        file.write(b"!")
    assert IndexedDataset(prefix)[0][0] == ord("!")
    with pytest.raises(DataPrepError, match="not those that the manifest describes; prepare them again"):
        main(["check", str(prefix)])


@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
@pytest.mark.parametrize("command", ["check", "inspect"])
def test_a_pipe_or_a_device_in_the_place_of_data_is_refused_at_once(prefix: Path, ending: str, command: str) -> None:
    file = data_file(prefix, ending)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink()
        make(file)
        with pytest.raises(DataPrepError, match="not a regular file"):
            main([command, str(prefix)])


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"9" * 5000, b"\xff", b"{}"], ids=["deep", "digits", "bytes", "empty"]
)
def test_a_damaged_manifest_is_one_message(prefix: Path, content: bytes) -> None:
    data_file(prefix, ".json").write_bytes(content)
    with pytest.raises(DataPrepError, match=r"json( is damaged|: cannot be read).*again, or delete the file"):
        main(["check", str(prefix)])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 2**30], "<i4"), "token 1 has the id 1073741824, more than the"),
        (np.array([1.5], "<f4"), "the tokens are float32, but token ids are whole numbers"),
    ],
    ids=["no id", "no whole numbers"],
)
def test_what_is_no_token_is_not_counted(tmp_path: Path, tokens: np.ndarray, message: str) -> None:
    write_indexed(tmp_path / "a", [tokens.view("<i4")], np.dtype("<i4"))
    idx = tmp_path / "a.idx"
    idx.write_bytes(idx.read_bytes()[:17] + bytes([CODES[tokens.dtype]]) + idx.read_bytes()[18:])
    with pytest.raises(DataPrepError, match=message):
        main(["inspect", str(tmp_path / "a"), "--page", str(tmp_path / "page.html")])


@pytest.mark.parametrize("option", ["source", "tokenizer"])
def test_a_source_that_may_never_end_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "text").write_text("words")
    os.mkfifo(tmp_path / "pipe")
    given = {"source": tmp_path / "text", "tokenizer": "byte", option: tmp_path / "pipe"}
    with pytest.raises(DataPrepError, match=r"pipe: (cannot be read \()?not a regular file"):
        main(["prepare", *(f"--{key}={value}" for key, value in given.items()), f"--output={tmp_path}/made"])
