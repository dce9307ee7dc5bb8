"""No stray byte of a terminal, a launcher, a crash or another process hides a line of a log."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest

from conf.run_folder.log_lines import LogText, pieces
from tests.conf.run_folder.test_log_lines import OLD, TODAY


def read(content: bytes) -> list[str]:
    return list(LogText(BytesIO(content)))


@pytest.mark.parametrize("line", [OLD, TODAY], ids=["old", "today"])
@pytest.mark.parametrize(
    "before",
    [
        *("\0" * 512, "\x1b[32m", "\x1b]0;title\x07", "\x1b[2K\x1b[1G", "\ufeff", "\x07\b\b", "\x1b(B\x1b[m", "0: "),
        *("[default0]:", "\x1b[1m[rank3]:\x1b[0m", "[1,0]<stdout>:", "45%|####     | 9/20 [00:01<00:01]\r", "\ufffd"),
    ],
)
def test_stray_characters_before_a_line_change_nothing(line: str, before: str) -> None:
    assert read(f"{before}{line}\n".encode())[-1] == f"{line}\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_any_encoding_of_the_shell_will_do(encoding: str, end: str) -> None:
    content = f"training …{end}{OLD}{end}{TODAY}{end}".encode(encoding)
    assert read(content)[-2:] == [f"{OLD}\n", f"{TODAY}\n"]
    assert len(read(content)) == 3


@pytest.mark.parametrize("other", ["n060:", "saving checkpoint", "[W1126 socket.cpp:3] timeout|", OLD])
def test_an_iteration_that_begins_inside_another_line_is_a_line(other: str) -> None:
    assert [*pieces(f"{other}{TODAY}\n")] == [f"{other}\n", f"{TODAY}\n"]


def test_nul_bytes_are_reported_but_for_those_of_utf_16() -> None:
    log, wide = LogText(BytesIO(b"\0" * 7 + b"a\0\n")), LogText(BytesIO("a\n".encode("utf-16")))
    assert ([*log], [*wide]) == (["a\n"], ["a\n"])
    assert "8 NUL bytes left out" in log.notes[0]
    assert wide.notes == []


def test_a_hole_of_any_size_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"a\n")
        file.seek(1 << 40)
        file.write(f"{OLD}\n".encode())
        file.truncate(1 << 42)
    with path.open("rb") as file:
        log = LogText(file)
        assert [*log] == ["a\n", f"{OLD}\n"]


@pytest.mark.parametrize("line", ["\x1b[ iteration", " " * 200_000 + "iteration", "iteration 1/ 2 |" * 20_000])
def test_a_strange_line_takes_no_time_and_loses_no_word(line: str) -> None:
    assert "".join(pieces(line)).count("iteration") == line.count("iteration")
