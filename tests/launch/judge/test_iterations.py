"""Without metrics.jsonl the iterations are those that Megatron-LM's last rank printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conf.run_folder.iteration_time import iteration_time
from launch.files.run_files import Faults
from launch.observe.iterations import TAIL_BYTES, Iteration, read_log, read_text_log, read_times

LINE = " [2026-11-21 10:20:30.1] iteration {:8d}/     900 | elapsed time per iteration (ms): 20.5 | lm loss: 5.0E+00 |"


def log(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    os.utime(path, (1000.0, 1000.0))
    return path


def read(path: Path) -> tuple[Iteration, ...]:
    faults = Faults()
    found = read_text_log(path, faults)
    assert not faults
    return found


def test_an_iteration_is_as_old_as_the_last_writing(tmp_path: Path) -> None:
    found = read(log(tmp_path / "a-0.out", "training ...", LINE.format(1), "(min, max) time", LINE.format(10)))
    assert found == tuple(
        Iteration(iteration=number, unix=1000.0, elapsed_ms=20.5, loss=5.0, nan=0) for number in (1, 10)
    )


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    assert [line.iteration for line in read(log(tmp_path / "a-0.out", LINE.format(1), LINE.format(2), end=""))] == [1]


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = log(tmp_path / "a-0.out", LINE.format(1), "x" * TAIL_BYTES, LINE.format(2))
    assert [line.iteration for line in read(path)] == [2]


def test_a_log_that_is_not_there_has_no_iterations(tmp_path: Path) -> None:
    assert read(tmp_path / "a-0.out") == ()


def test_a_rank_that_prints_a_hundred_megabytes_hides_no_iteration(tmp_path: Path) -> None:
    path = log(tmp_path / "a-0.out", LINE.format(1), LINE.format(2))
    with path.open("ab") as file:
        for _ in range(100):
            file.write((b"x" * 1023 + b"\n") * 1024)
        file.write(b"y" * (1 << 20))
    assert [line.iteration for line in read_text_log(path, Faults())] == [1, 2]


def metrics_line(iteration: int, ms: float, **more: object) -> str:
    keys = {"iteration": iteration, "unix": 1.0, "consumed_samples": 8 * iteration, "elapsed_ms": ms, "loss": 1.0}
    return json.dumps({**keys, "nan": 0, **more}) + "\n"


@pytest.mark.parametrize(
    "odd", ["", '{"iteration": 7, "damaged\n', metrics_line(9, 1.0).replace("elapsed_ms", "other")]
)
def test_the_time_of_an_iteration_counts_all_lines_of_a_long_log(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [metrics_line(number, 100.0 if number <= 1500 else 300.0, padding="x" * 99) for number in range(1, 2001)]
    path.write_text(odd + "".join(lines) + '{"iteration": 2001')
    tail = read_log(path, Faults())
    assert {line.elapsed_ms for line in tail} == {300.0}
    times = read_times(path, False, tail)
    assert [one.iteration for one in times] == list(range(1, 2001))
    time = iteration_time(times)
    assert time is not None
    assert (time.ms, len(time.each_ms)) == (100.0, 1999)


def test_of_megatrons_log_as_well(tmp_path: Path) -> None:
    lines = [LINE.format(number).replace("20.5", "9.5" if number < 6 else "20.5") for number in range(1, 9)]
    path = log(tmp_path / "a-0.out", *lines[:6], "y" * TAIL_BYTES, *lines[6:])
    time = iteration_time(read_times(path, True, read(path)))
    assert time is not None
    assert (time.ms, len(time.each_ms)) == (9.5, 7)


def test_stray_bytes_hide_no_iteration_and_damaged_lines_are_reported(tmp_path: Path) -> None:
    path = log(tmp_path / "a-0.out", "\0" * 64 + LINE.format(1), f"noise{LINE.format(2)}", LINE.format(3)[:90])
    faults = Faults()
    assert [line.iteration for line in read_text_log(path, faults)] == [1, 2]
    assert [fault.text for fault in faults] == [f"{path}: the lines of these iterations are damaged: 3"]
