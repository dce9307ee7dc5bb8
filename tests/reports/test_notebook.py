"""A notebook has the tables and figures that pages are made of."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import reports
from reports import notebook
from reports.errors import ReportError
from reports.facts.breakdown import waiting_ns
from tests.support import PATIENCE_S, ROOT
from tests.support.reports.in_browser import events_of
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run, ranks_of

SHAPE = Shape(pipeline=2, data=2, micro_batches=4, iterations=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has two runs of the name `demo`."""
    folder = tmp_path_factory.mktemp("notebook")
    for index in (1, 2):
        make_run(folder / f"runs/demo/2026010{index}-000000-aaaa", SHAPE)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> notebook.Run:
    return reports.load(folder / "runs/demo/20260101-000000-aaaa")


def test_the_page_about_notebooks_runs(folder: Path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/notebooks.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(blocks)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=PATIENCE_S)


def test_events_are_those_of_the_files_with_their_waits(run: notebook.Run, folder: Path):
    timeline = events_of(folder / "runs/demo/20260101-000000-aaaa", SHAPE.ranks)
    found, known = run.events, records(timeline)
    assert found["rank"].tolist() == known["rank"].tolist()
    assert [str(task) for task in found["task"]] == [timeline.names[name] for name in known["name"]]
    assert (found["end_ns"] - found["start_ns"]).tolist() == (known["end_ns"] - known["start_ns"]).tolist()
    assert found["start_ns"].min() == 0
    assert found["waiting_ns"].tolist() == np.maximum(waiting_ns(timeline, ranks_of(SHAPE)), 0).tolist()
    assert (found["peer"].isna() == (known["peer"] < 0)).all()


def test_the_terms_of_a_stage_add_up_to_an_iteration(run: notebook.Run):
    terms = ["forward", "backward", "tensor", "messages", "all_reduce", "bubble", "imbalance", "optimizer", "other"]
    usual = run.iterations.query("steady")["period_ms"].median()
    assert run.stages[terms].sum(axis=1).to_numpy() == pytest.approx(usual)
    assert run.stages.index.tolist() == [0, 1]


def test_a_timeline_has_every_event_of_its_iteration_in_the_row_of_its_rank(run: notebook.Run):
    figure = run.timeline(iteration=2)
    events = run.events.query("iteration == 2")
    bars = [bar for bar in figure.data if bar.name != "waiting"]
    assert {bar.name: len(bar.x) for bar in bars} == events["task"].astype(str).value_counts().to_dict()
    rows = sorted(round(y) for bar in bars for y in bar.y)
    assert rows == sorted(events["rank"].tolist())
    (waiting,) = (bar for bar in figure.data if bar.name == "waiting")
    assert sum(waiting.x) == pytest.approx(events["waiting_ns"].sum() / 1e6)


def test_what_is_not_there_is_a_message(run: notebook.Run):
    with pytest.raises(ReportError, match=r"iteration 99 of .* has no events; iterations 1 to 4 have some"):
        run.timeline(iteration=99)
    with pytest.raises(ReportError, match=r"has no ranks 98-99; it has ranks 0-\d+$"):
        run.timeline(ranks=[99, 0, 98])
    with pytest.raises(ReportError, match="has no metric 'lose'; it has iteration, "):
        run.course("lose")


def test_a_notebook_of_anothers_run_runs_none_of_its_code_and_reveals_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "5ecret")
    folder = tmp_path / "runs/demo/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    code = tmp_path / "model.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((folder / "config.yaml").read_text())
    hostile = "</script><script>alert(1)</script>${oc.env:HF_TOKEN}"
    config["model"] |= {"name": hostile, "family": "module", "code": f"{code}:Model"}
    (folder / "config.yaml").write_text(json.dumps(config))
    for name in ("job.pkl", "__init__.py", "sitecustomize.py"):
        shutil.copy(code, folder / name)
    found = reports.load(folder)
    page = found.timeline(iteration=2).to_html()
    assert "<script>alert" not in page
    assert "5ecret" not in page + repr(found) + str(vars(found))
    assert not (tmp_path / "ran").exists()


def test_a_sweep_shows_what_differs_and_what_was_reached(folder: Path):
    frame = reports.load_sweep(folder / "runs/demo")
    assert len(frame) == 2
    assert np.isfinite(frame["iteration_ms"]).all()
    assert not [key for key in frame.columns if key.startswith("train.")], "they are alike"


def test_importing_reports_loads_no_heavy_package():
    code = "import sys, reports; print(sorted({'pandas', 'plotly', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
