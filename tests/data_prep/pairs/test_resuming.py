"""Pairs in the making that are cut off go on where they were, and are as if they had not been."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.errors import DataPrepError
from data_prep.files import journal
from data_prep.files.journal import Journal, OpenStep
from data_prep.pairs import steps
from data_prep.pairs.pair import Pair
from tests.data_prep.pairs.test_pairs import contents, numbered, prepare, write
from tests.support.full_disk import largest_file


class PowerCut(BaseException):
    """The end, for no reason of the program's."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pairs of many chunks, each followed by a save; some are left out."""
    monkeypatch.setattr(steps, "CHUNK", 9)
    monkeypatch.setattr(journal, "SAVE_EVERY_S", 0.0)
    pairs = numbered(60)
    return write(tmp_path / "in", [*pairs, *pairs[:15], ("", "empty"), *numbered(70)[60:]])


def cut_after(monkeypatch: pytest.MonkeyPatch, chunks: int, end: type[BaseException] = PowerCut) -> None:
    """Ends the program behind so many chunks, once they are noted."""
    done, left = OpenStep.done, [chunks]

    def counting(self: OpenStep, items: int) -> None:
        done(self, items)
        left[0] -= 1
        if not left[0]:
            raise end

    monkeypatch.setattr(OpenStep, "done", counting)


def test_pairs_that_were_cut_off_at_every_chunk_are_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, tmp_path / "whole" / "x")
    cuts = 0
    while True:
        with monkeypatch.context() as patch:
            cut_after(patch, 1)
            try:
                prepare(source, tmp_path / "cut" / "x")
            except PowerCut:
                cuts += 1
                assert [path.name for path in (tmp_path / "cut").iterdir()] == [".x.partial"]
            else:
                break
    assert cuts > 30
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_ctrl_c_loses_no_chunk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal, "SAVE_EVERY_S", 1e9)
    with monkeypatch.context() as patch:
        cut_after(patch, 3, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, tmp_path / "x")
    assert "interrupted; the same command continues from there" in capsys.readouterr().err
    assert Journal(tmp_path / ".x.partial")._steps["read"].items == 27
    prepare(source, tmp_path / "x")
    prepare(source, tmp_path / "whole" / "x")
    assert (tmp_path / "x-train.source.bin").read_bytes() == (tmp_path / "whole" / "x-train.source.bin").read_bytes()


@pytest.mark.parametrize("pairs", [1, 5, 14])
def test_ctrl_c_in_the_middle_of_a_chunk_leaves_nothing_twice(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    line, left = steps.kept_line, [pairs]

    def interrupted(pair: Pair) -> bytes:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return line(pair)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(steps, "kept_line", interrupted)
        prepare(source, tmp_path / "cut" / "x")
    for name in ("cut", "whole"):
        prepare(source, tmp_path / name / "x")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_what_was_begun_for_other_text_is_not_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cut_after(patch, 12)
        with pytest.raises(PowerCut):
            prepare(source, tmp_path / "cut" / "x")
    write(tmp_path / "in", numbered(50)[10:])
    for name in ("cut", "whole"):
        prepare(source, tmp_path / name / "x")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_on_a_disk_that_was_full_the_same_command_goes_on(source: Path, tmp_path: Path) -> None:
    with largest_file(1500), pytest.raises(DataPrepError, match=r"cannot be written \(File too large\); .* continues"):
        prepare(source, tmp_path / "out" / "x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".x.partial"]
    for name in ("out", "whole"):
        prepare(source, tmp_path / name / "x")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


JOURNALS = {
    "cut": "{",
    "a list": "[]",
    "no steps": '{"a": 1}',
    "no sizes": '{"steps": {"read": {"items": 1, "counts": {}}}}',
    "below 0": '{"steps": {"read": {"items": -1, "sizes": {}, "counts": {}}}}',
}


@pytest.mark.parametrize("content", JOURNALS.values(), ids=JOURNALS)
def test_a_damaged_journal_names_the_folder_to_delete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    with monkeypatch.context() as patch:
        cut_after(patch, 3)
        with pytest.raises(PowerCut):
            prepare(source, tmp_path / "x")
    (tmp_path / ".x.partial" / "journal.json").write_text(content)
    with pytest.raises(DataPrepError, match=r"journal\.json.*damaged.*; delete .*\.x\.partial and run the same"):
        prepare(source, tmp_path / "x")


def test_files_shorter_than_noted_are_reported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        cut_after(patch, 3)
        with pytest.raises(PowerCut):
            prepare(source, tmp_path / "x")
    (tmp_path / ".x.partial" / "kept").write_bytes(b"")
    with pytest.raises(DataPrepError, match=r"kept: expected at least \d+ bytes, .* found 0; delete .*\.x\.partial"):
        prepare(source, tmp_path / "x")
