"""One iteration time, read from the files of a real run by the test itself, stands wherever one is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import reports
from conf.run_folder.iteration_time import iteration_time
from conf.run_folder.rundir import RunDir
from launch.commands.report import main
from launch.files.run_files import Faults
from launch.observe.iterations import read_log, read_times
from tests.support.reports.layouts import run_of


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_pages_tables_commands_and_notebooks_show_the_median_of_the_log(
    layouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("1f1b", layouts)
    lines = lines_of(run)
    each = [line["elapsed_ms"] for line in lines[1:]]
    low, high = np.quantile(each, [0.1587, 0.8413], method="weibull")
    shown, half = f"{np.median(each):,.1f}", f"{(high - low) / 2:,.1f}"
    twin = tmp_path / "runs/tiny/20260101-000001-bbbb"
    twin.mkdir(parents=True)
    for path in (one for one in run.rglob("*") if one.is_file() and "report" not in one.parts):
        copy = twin / path.relative_to(run)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    main([str(run), str(twin), "--output", str(tmp_path / "pages")])
    capsys.readouterr()
    page = min((tmp_path / "pages").rglob("index.html"))
    index, timeline = page.read_text(), (page.parent / "timeline.html").read_text()
    assert re.search(rf"<dt>Iteration time</dt><dd>{shown} ms</dd><dd class=\"note\">± {half} · median of", index)
    assert f"An iteration takes {shown} ms (median of {len(each)} log lines after the first)" in timeline
    comparison = (tmp_path / "pages/comparison.html").read_text()
    assert (
        f"{shown} ms ± {half} (n = {len(each)}) against {shown} ms ± {half} (n = {len(each)}) per iteration"
        in comparison
    )
    assert comparison.count(f"{shown} ± {half} ms per iteration (n = {len(each)})") == 2
    assert "No clear best" in comparison
    loaded = reports.load(run)
    assert loaded.iteration_time is not None
    assert loaded.iteration_time.ms == np.median(each)
    assert reports.load_sweep(run, twin)["iteration_ms"].tolist() == [np.median(each)] * 2
    metrics = RunDir(run).metrics
    seen = iteration_time(read_times(metrics, read_log(metrics, Faults())))
    assert seen is not None
    assert seen.cell == shown
