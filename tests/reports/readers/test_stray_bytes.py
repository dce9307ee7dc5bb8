"""A page of a damaged log has every iteration that can be read, and says which it has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands.report import main
from reports.readers.upstream_log import parse


def line(iteration: int) -> str:
    return (
        f" iteration {iteration:8d}/      60 | consumed samples: {iteration * 8:12d} | elapsed time per iteration (ms):"
        f" 1000.5 | learning rate: 1.000E-04 | global batch size:     8 | lm loss: {9 - iteration / 10:.6E} | loss"
        " scale: 1.0 | grad norm: 3.000 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


LINES = [line(iteration) for iteration in range(10, 70, 10)]
WARNING = "[rank1]:[W1126 10:20:30 socket.cpp:123] a warning: 3 of 4 | retried"


def iterations(text: str) -> list[int]:
    return [logged["iteration"] for logged in parse(text.splitlines(keepends=True)).metrics]


@pytest.mark.parametrize(
    "word", ["onsumed", " elapsed", "per iteration", "| learning", ": 1.0", " | lm", "grad", "nan"]
)
@pytest.mark.parametrize("between", [0, 3])
def test_a_line_into_which_another_process_printed_is_put_together_again(word: str, between: int) -> None:
    at = LINES[2].index(word)
    cut = LINES[2][:at] + WARNING + "\n" + "more\n" * between + LINES[2][at:]
    log = parse("".join([*LINES[:2], cut, *LINES[3:]]).splitlines(keepends=True))
    assert log == parse("".join(LINES).splitlines(keepends=True))


@pytest.mark.parametrize("number", ["00.5", ".5", "E+00"])
@pytest.mark.parametrize("other", [WARNING, "45%|####    | 9/20", "7"])
def test_a_number_into_which_another_process_printed_is_left_out(number: str, other: str) -> None:
    at = LINES[2].index(number)
    log = parse([*LINES[:2], LINES[2][:at] + other + "\n", LINES[2][at:], *LINES[3:]])
    assert log.metrics == parse([*LINES[:2], *LINES[3:]]).metrics
    assert "the line of iteration 30 is damaged" in log.notes[0]


def test_half_a_number_is_never_taken_for_one() -> None:
    at = LINES[2].index("00.5")
    log = parse([*LINES[:2], LINES[2][:at] + "\n", *LINES[3:]])
    assert [logged["elapsed_ms"] for logged in log.metrics] == [1000.5] * 5
    assert "the line of iteration 30 is damaged" in log.notes[0]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("", "the log has no line of iteration 30, though it has one every 10 iterations around there"),
        (
            LINES[2].replace("8 | lm", "8 | l\ufffd").replace("1000.5", "1\ufffd0"),
            "the line of iteration 30 is damaged",
        ),
        (LINES[2][12:], "the line of an iteration is damaged"),
    ],
    ids=["lost", "garbled", "without-begin"],
)
def test_an_iteration_that_cannot_be_read_is_reported(damage: str, said: str) -> None:
    log = parse([*LINES[:2], damage, *LINES[3:]])
    assert [logged["iteration"] for logged in log.metrics] == [10, 20, 40, 50, 60]
    assert any(note.startswith(said) for note in log.notes)


@pytest.mark.parametrize(
    "numbers", [[1, 10, 20, 30], [10, 20], [10, 20, 100, 200, 300], [2, 5, 7, 9], []], ids=lambda one: f"{one}"
)
def test_a_log_whose_interval_changed_misses_nothing(numbers: list[int]) -> None:
    assert parse(map(line, numbers)).notes == ()


@pytest.mark.parametrize(
    ("whole", "broken"),
    [(b"6.0", b"\xb6.0"), (b"1000.5", b"10\x100.5"), (b" lm loss", b" lm l\xefss"), (b"  30/", b"  3\xb0/")],
    ids=["high-bit", "control", "name", "iteration"],
)
def test_a_line_in_whose_numbers_a_bit_flipped_is_left_out_and_named(
    tmp_path: Path, capsys, whole: bytes, broken: bytes
):
    """Without the byte, 6.0 would be .0."""
    path = tmp_path / "train.out"
    lines = [one.encode() for one in LINES]
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(whole, broken), *lines[3:]]))
    assert main([str(path), "--csv"]) == 0
    said = capsys.readouterr().err
    assert "1 line with bytes that are no text" in said
    assert "the log has no line of iteration 30" in said
    rows = (tmp_path / "train.report/metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == [10, 20, 40, 50, 60]


def test_what_is_left_out_stands_on_the_terminal_and_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.out"
    path.write_text("".join([*LINES[:2], "\0" * 512 + LINES[2], *LINES[4:]]))
    assert main([str(path), "--csv"]) == 0
    page, said = (tmp_path / "train.report/index.html").read_text(), capsys.readouterr().err
    for part in ("512 NUL bytes left out", "the log has no line of iteration 40"):
        assert part in page
        assert part in said
    rows = (tmp_path / "train.report/metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == [10, 20, 30, 50, 60]
