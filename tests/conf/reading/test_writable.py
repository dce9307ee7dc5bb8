"""A file that a user named for a result keeps what it had until the new one is complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.errors import OutputError
from conf.reading.files import why_not_writable, write_whole
from launch.cli import main
from launch.commands.data import main as data
from tests.fuzz.corpora import write_corpus
from tests.support.full_disk import largest_file

SMALL = ["experiment=demo", "cluster.groups.local.gpus_per_node=4", "parallel.schedule=one_f_one_b"]


@pytest.mark.parametrize("word", ["csv", "page", "plan"])
def test_a_search_that_finds_no_room_leaves_its_files_as_they_were(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "best.yaml"
    file.write_text("before")
    with largest_file(100):
        assert main(["search", *SMALL, f"{word}={file}", "overwrite=true"]) == 1
    assert f"cannot write {file}: File too large; choose a folder" in capsys.readouterr().err
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_page_of_data_that_finds_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    page = tmp_path / "page.html"
    page.write_text("before")
    with largest_file(1000), pytest.raises(OutputError, match=r"cannot write .*page\.html: File too large"):
        data(["inspect", str(tmp_path / "a"), "--page", str(page)])
    assert page.read_text() == "before"


def test_a_device_or_pipe_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    write_whole(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("before")
    (tmp_path / "link").symlink_to("kept")
    write_whole(tmp_path / "link", "after")
    assert [(tmp_path / name).read_text() for name in ("kept", "link")] == ["before", "after"]


@pytest.mark.parametrize(
    ("path", "told"),
    [("x" * 300, "File name too long"), (".", "this is a folder"), ("gone/x", "no folder gone")],
    ids=["long", "folder", "gone"],
)
def test_what_cannot_be_a_file_is_known_before(path: str, told: str) -> None:
    assert told in str(why_not_writable(Path(path)))


def test_a_device_without_room_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "csv=/dev/full"]) == 1
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err
