"""How often nodes fail: by what is usual, and soon by what the runs show."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from launch.history.failures import NEWEST, TRUSTED, between_failures, mean_time_between_failures
from launch.history.record import HostRecord, RunRecord
from launch.judge.state import State
from megatron_ext.contract.reliability import DAY_S, USUAL_DAYS


def run(number: int, days: float, *rules: str, gpu: str = "A10") -> RunRecord:
    hosts = tuple(HostRecord(host=f"h{at}", node=f"n{at}", gpu=gpu, rule=rule) for at, rule in enumerate(rules))
    ended = State.failed if any(rules) else State.succeeded
    return RunRecord(run=f"xl/{number}", state=ended, began_unix=0.0, ended_unix=days * DAY_S, hosts=hosts)


def test_without_records_nodes_fail_as_usual_and_more_nodes_more_often() -> None:
    assert between_failures(["A10"], []) == pytest.approx(USUAL_DAYS * DAY_S)
    assert between_failures(["A10"] * 8, []) == pytest.approx(USUAL_DAYS * DAY_S / 8)


def test_many_records_say_how_often_nodes_of_each_kind_fail() -> None:
    records = [run(number, 1.0, "node-failed" if number % 5 == 0 else "", "") for number in range(500)]
    records += [run(number, 1.0, "", gpu="A100") for number in range(500, 1000)]
    assert between_failures(["A10"], records) == pytest.approx(10 * DAY_S, rel=0.05)  # 100 in 1,000 node-days
    assert between_failures(["A100"], records) > 1000 * DAY_S
    assert between_failures(["A10", "A100"], records) < between_failures(["A10"], records)


def test_what_a_program_does_is_no_failure_of_a_node() -> None:
    quiet = between_failures(["A10"], [run(0, 10.0, "")])
    assert between_failures(["A10"], [run(0, 10.0, "rank-failed")]) == quiet
    assert between_failures(["A10"], [run(0, 10.0, "node-failed")]) == pytest.approx(quiet * TRUSTED / (1 + TRUSTED))


def test_nodes_whose_rate_is_known_need_no_records(tmp_path: Path) -> None:
    assert mean_time_between_failures([], tmp_path, 4.0) == pytest.approx(DAY_S / 4)
    assert mean_time_between_failures([], tmp_path) == math.inf
    both = mean_time_between_failures(["A100"], tmp_path, 4.0)
    assert both == pytest.approx(DAY_S / (4 + 1 / USUAL_DAYS))


def test_the_newest_records_in_a_folder_of_runs_are_read(tmp_path: Path) -> None:
    assert mean_time_between_failures(["A10"], tmp_path / "none") == pytest.approx(USUAL_DAYS * DAY_S)
    records = [run(number, 1.0, "node-failed" if number < 10 else "") for number in range(NEWEST + 10)]
    for number, record in enumerate(records):
        folder = tmp_path / "xl" / f"20261101-{number:06d}-0"
        folder.mkdir(parents=True)
        (folder / "jobs.json").write_text("{}")
        (folder / "history.json").write_text(json.dumps(asdict(record)))
        os.utime(folder / "jobs.json", (1, 1))
    (tmp_path / "xl" / "20261201-000000-0").mkdir()
    (tmp_path / "xl" / "20261201-000000-0" / "history.json").write_text("{")
    assert mean_time_between_failures(["A10"], tmp_path) == pytest.approx(between_failures(["A10"], records[10:]))
