"""What metrics.jsonl says of the time of iterations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.run_folder.iteration_time import iteration_time
from launch.files.run_files import Faults
from launch.observe.iterations import read_log, read_times


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
    times = read_times(path, tail)
    assert [one.iteration for one in times] == list(range(1, 2001))
    time = iteration_time(times)
    assert time is not None
    assert (time.ms, len(time.each_ms)) == (100.0, 1999)
