"""Whatever is in a run's files, its pages are written, and nothing in them runs or is believed that cannot be."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.commands.report import main
from reports.readers.events import RECORD
from tests.reports.test_cli import text
from tests.support.cases import fewer
from tests.support.reports.synthetic import NAMES, Shape, make_run

SOME = settings(max_examples=fewer(5, 12))
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, Shape(iterations=2, micro_batches=2, layers=2))
    return folder


NUMBERS = st.sampled_from([0, 1, 2, 3, -1, 2**31 - 1, -(2**31)])
TIMES = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**12), st.just(9 * 10**18))
RECORD_OF_ANY = st.tuples(
    st.integers(0, 20), st.integers(0, 3), st.integers(0, 2**32 - 1), NUMBERS, NUMBERS, TIMES, TIMES
)
RECORDS = st.lists(RECORD_OF_ANY, max_size=20)


@pytest.mark.slow
@given(records=RECORDS, rest=st.binary(max_size=40), keep=st.booleans())
@SOME
def test_any_records_in_an_event_file_leave_pages(run: Path, records: list[tuple[int, ...]], rest: bytes, keep: bool):
    path = run / "events/rank-00001.bin"
    content = path.read_bytes()
    start = 12 + struct.unpack_from("<I", content, 8)[0]
    try:
        path.write_bytes((content if keep else content[:start]) + np.array(records, RECORD).tobytes() + rest)
        assert main([str(run), "--trace", "--csv"]) == 0
    finally:
        path.write_bytes(content)


VALUES = st.one_of(
    st.floats(), st.integers(), st.none(), st.booleans(), st.text(max_size=9), st.just(HOSTILE), st.just([1])
)
KEYS = st.sampled_from(
    ["iteration", "loss", "elapsed_ms", "tokens_per_s", "tflops_per_rank", "grad_norm", "unix", HOSTILE]
)


LINES = st.builds(
    lambda line, at: {"iteration": at} | line, st.dictionaries(KEYS, VALUES, max_size=4), st.integers(1, 9)
)


@pytest.mark.slow
@given(lines=st.lists(st.one_of(VALUES, LINES), max_size=4))
@SOME
def test_any_metrics_leave_pages(run: Path, lines: list):
    path = run / "metrics.jsonl"
    content = path.read_text()
    try:
        path.write_text(content + "".join(json.dumps(line) + "\n" for line in lines))
        assert main([str(run), "--csv"]) == 0
    finally:
        path.write_text(content)
    assert "<script>alert" not in (run / "report/index.html").read_text()


def test_events_of_another_century_are_left_out_and_said(run: Path):
    path = run / "events/rank-00001.bin"
    content = path.read_bytes()
    late = np.zeros(1, RECORD)
    late["name"] = NAMES.index("optimizer")
    late["start_ns"] = late["end_ns"] = 9 * 10**18
    try:
        path.write_bytes(content + late.tobytes())
        main([str(run)])
    finally:
        path.write_bytes(content)
    assert "1 events are at least 26 days away from the others; ignored" in text(run / "report/timeline.html")
