"""A preparation that is cut off goes on where it was, and its data are as if it had not been."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data_prep.errors import DataPrepError
from data_prep.files import journal as journal_module
from data_prep.files.journal import work_folder
from data_prep.preparation import prepare as module
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus, corpus_of
from data_prep.text.encode import Options
from data_prep.tokenizers.tokenizer import ByteTokenizer
from megatron_ext.data.indexed_dataset import data_file
from tests.support import PATIENCE_S
from tests.support.full_disk import largest_file


class PowerCut(BaseException):
    """The end, for no reason of the program's."""


class CutOff(ByteTokenizer):
    """Ends the program when it has tokenised so many chunks."""

    def __init__(self, chunks: int, end: type[BaseException] = PowerCut) -> None:
        self.left, self.end = chunks, end

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        if not self.left:
            raise self.end
        self.left -= 1
        return super().encode(texts)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Two files of many chunks, with texts that come more than once; every chunk is followed by a save."""
    monkeypatch.setattr(module, "DOCUMENTS", 7)
    monkeypatch.setattr(journal_module, "SAVE_EVERY_S", 0.0)
    folder = tmp_path / "source"
    folder.mkdir()
    for name, first in (("a.jsonl", 0), ("b.jsonl.gz", 50)):
        lines = "".join(json.dumps({"text": f"text {number % 60}"}) + "\n" for number in range(first, first + 100))
        (folder / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    return corpus_of([folder])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("unique", [False, True], ids=["all", "unique"])
def test_data_that_were_cut_off_at_every_chunk_are_the_same(corpus: Corpus, tmp_path: Path, unique: bool) -> None:
    request = Request(corpus=corpus, tokenizer=ByteTokenizer(), options=Options(unique=unique))
    prepare(request, tmp_path / "whole" / "x")
    cuts = 0
    while True:
        try:
            prepare(replace(request, tokenizer=CutOff(1)), tmp_path / "cut" / "x")
        except PowerCut:
            cuts += 1
            assert [path.name for path in (tmp_path / "cut").iterdir()] == [".x.partial"]
        else:
            break
    assert cuts == 28
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_an_interrupted_preparation_loses_no_chunk(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal_module, "SAVE_EVERY_S", 1e9)
    with pytest.raises(KeyboardInterrupt):
        prepare(Request(corpus=corpus, tokenizer=CutOff(5, KeyboardInterrupt)), tmp_path / "x")
    assert "interrupted after 35 documents; the same command continues from there" in capsys.readouterr().err
    prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / "x")
    assert "continuing after 35 documents" in capsys.readouterr().err


def test_what_was_begun_for_other_text_is_not_gone_on_with(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        prepare(Request(corpus=corpus, tokenizer=CutOff(3)), tmp_path / "out" / "x")
    (tmp_path / "source" / "a.jsonl").write_text('{"text": "new"}\n')
    for name in ("out", "whole"):
        prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / name / "x")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_without_room_for_the_manifest_leaves_no_data_without_one(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("text")
    request, prefix = Request(corpus=corpus_of([tmp_path / "one.txt"]), tokenizer=ByteTokenizer()), tmp_path / "data"
    prepare(request, prefix)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for suffix in (".bin", ".idx", ".json"):
        data_file(prefix, suffix).unlink()
    with largest_file(len(made["data.json"]) - 1), pytest.raises(DataPrepError, match="File too large"):
        prepare(request, prefix)
    assert {path.name for path in tmp_path.iterdir()} == {"one.txt", ".data.partial"}
    prepare(request, prefix)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == made


def test_on_a_disk_that_was_full_the_same_command_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    request = Request(corpus=corpus, tokenizer=ByteTokenizer())
    with largest_file(1000), pytest.raises(DataPrepError, match=r"cannot be written \(File too large\); .* continues"):
        prepare(request, tmp_path / "out" / "x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".x.partial"]
    for name in ("out", "whole"):
        prepare(request, tmp_path / name / "x")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_two_processes_do_not_prepare_the_same_data(corpus: Corpus, tmp_path: Path) -> None:
    with (
        work_folder(tmp_path / "x", {}),
        pytest.raises(DataPrepError, match=r"x: another process is preparing these data .*choose another --output"),
    ):
        prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / "x")


def test_files_shorter_than_noted_are_told(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        prepare(Request(corpus=corpus, tokenizer=CutOff(3)), tmp_path / "x")
    (tmp_path / ".x.partial" / "tokens").write_bytes(b"")
    with pytest.raises(DataPrepError, match=r"tokens: expected at least \d+ bytes, .* found 0; delete .*\.x\.partial"):
        prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / "x")


def started(source: Path, output: Path) -> subprocess.Popen[bytes]:
    no_pause = "from data_prep.files import journal; journal.SAVE_EVERY_S = 0"
    code = f"{no_pause}; import launch.commands.data, sys; launch.commands.data.main(sys.argv[1:])"
    arguments = ["prepare", "--source", str(source), "--output", str(output), "--workers", "2"]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_preparation_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    source, text = tmp_path / "a.jsonl", "text " * 200
    source.write_text((json.dumps({"text": text}) + "\n") * 15_000)
    process = started(source, tmp_path / "cut")
    journal = tmp_path / ".cut_text_document.partial" / "journal.json"
    deadline = time.monotonic() + PATIENCE_S
    while not journal.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    workers = children(process.pid)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert started(source, tmp_path / "cut").wait(PATIENCE_S) == 0
    found = np.fromfile(tmp_path / "cut_text_document.bin", "<u2").reshape(15_000, -1)
    assert (found == [*text.encode(), 256]).all()


JOURNALS = ["{}x", "[1]", '{"file": ', "[" * 100_000, '{"a": 1}', '{"documents": null', '{"tokens": -1']


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda text: text[:14])
def test_a_damaged_journal_names_the_folder_to_delete(corpus: Corpus, tmp_path: Path, journal: str) -> None:
    prefix = tmp_path / "out/text"
    with pytest.raises(PowerCut):
        prepare(Request(corpus=corpus, tokenizer=CutOff(3)), prefix)
    (tmp_path / "out/.text.partial/journal.json").write_text(
        f'{journal}, "left_out": {{}}}}' if journal[-4:] in ("null", ": -1") else journal
    )
    with pytest.raises(DataPrepError, match=r"journal\.json.* damaged.*; delete .*\.partial and run the same"):
        prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), prefix)
