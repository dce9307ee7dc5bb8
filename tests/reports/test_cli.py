"""`tdpp report` writes both pages, of runs in any state, and says what they lack."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from conf.errors import RunFolderError
from conf.run_folder.judgement import Findings
from launch.commands.report import main
from megatron_ext.contract.errors import RankFailure
from reports.errors import ReportError
from tests.support.ordinary_user import NOBODY, only_root_is_two_users, open_to_others, ordinary_user
from tests.support.reports.synthetic import Shape, make_run

LOG = (
    " iteration       10/      10 | consumed samples:          640 | elapsed time per iteration (ms): 4541.6 | "
    "learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | loss scale: 1.0 | "
    "grad norm: 16.666 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)

SHAPE = Shape(pipeline=2, data=1, micro_batches=2, iterations=4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    return folder


def text(page: Path) -> str:
    """What a page says, without scripts, styles and tags."""
    content = re.sub(r"<(script|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r'<span class="whole">(.*?)</span>', r"\1", content)))


def report(run: Path, judge=None) -> tuple[str, str]:
    """Makes the pages; returns what they say, first the summary."""
    assert main([str(run), "--runs-dir", str(run.parent.parent)], judge=judge) == 0
    return text(run / "report/index.html"), text(run / "report/timeline.html")


def test_a_folder_without_runs_says_what_it_lacks(run: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"empty has no plan\.json of a run, no runs, and no \.out files"):
        main([str(tmp_path / "empty"), "--runs-dir", str(tmp_path / "runs")])


def test_the_folder_of_all_runs_names_the_folders_to_choose_from(run: Path, tmp_path: Path):
    with pytest.raises(ReportError, match="is the folder of all runs; give one of its names: tiny"):
        main([str(tmp_path / "runs"), "--runs-dir", str(tmp_path / "runs")])


@pytest.mark.parametrize("runs", ["runs", "none"], ids=["runs elsewhere", "no runs"])
def test_a_log_that_is_not_there_is_told_as_such(run: Path, tmp_path: Path, runs: str):
    with pytest.raises(ReportError, match=r"n067\.out does not exist, and (no run|no runs)"):
        main([str(tmp_path / "log2/n067.out"), "--runs-dir", str(tmp_path / runs)])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder with two logs and what lies beside them."""
    folder = tmp_path / "out"
    (folder / "old.report").mkdir(parents=True)
    for name, content in {
        "a.log": LOG,
        "b.log": LOG,
        "n0.err": "Traceback\n",
        "n0.gpu": "",
        "data.bin": "\0\1",
    }.items():
        (folder / name).write_text(content)
    return folder


def test_of_all_files_in_a_folder_the_logs_are_read_and_the_others_named(output: Path, capsys):
    given = [str(path) for path in sorted(output.iterdir())]
    assert main([*given, "--runs-dir", str(output)]) == 0
    printed = capsys.readouterr()
    pages = [output / f"{name}.report/{page}.html" for name in "ab" for page in ("index", "timeline")]
    assert printed.out.splitlines() == [*map(str, pages), str(output / "comparison.html")]
    assert all(page.exists() for page in pages)
    left_out = [line for line in printed.err.splitlines() if line.startswith("left out: ")]
    for name in ("n0.err", "n0.gpu", "data.bin", "old.report"):
        assert len([line for line in left_out if f"{name} " in line]) == 1
    assert len(left_out) == 4


def test_where_none_of_several_can_be_read_that_is_an_error(output: Path):
    with pytest.raises(ReportError, match=r"n0\.err is not a log of Megatron-LM"):
        main([str(output / "n0.err"), str(output / "n0.gpu"), "--runs-dir", str(output)])


def test_a_name_that_is_not_there_is_an_error_also_among_others(output: Path):
    with pytest.raises(ReportError, match=r"c\.log does not exist"):
        main([str(output / "a.log"), str(output / "c.log"), "--runs-dir", str(output)])
    assert not (output / "a.report").exists()


@dataclass(frozen=True)
class Judgement:
    state: str = "failed"
    rule: str = "rank-error"
    exit_code: int = 1
    reason: str = "Rank 1 <ran> out of memory."
    evidence: tuple[str, ...] = ("errors/rank-00001.json", "exit code 1")


@dataclass(frozen=True)
class Line:
    text: str
    count: int = 1
    nodes: tuple[str, ...] = ("g0-0",)


@dataclass(frozen=True)
class Found:
    verdict: Judgement = Judgement()
    mismatches: tuple[str, ...] = ()
    stderr: tuple[Line, ...] = ()
    agents: tuple[Line, ...] = ()
    warnings: tuple[Line, ...] = ()
    over: bool = True
    culprit: None = None


def test_it_prints_the_paths_of_both_pages_the_summary_first(run: Path, capsys):
    main(["--runs-dir", str(run.parent.parent)])
    assert capsys.readouterr().out.splitlines() == [
        str(run / "report/index.html"),
        str(run / "report/timeline.html"),
    ]


def test_a_whole_run_lacks_nothing(run: Path, capsys):
    summary, timeline = report(run)
    assert "Missing" not in summary + timeline
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("next: tdpp report ")


def test_the_summary_begins_with_the_verdict_of_the_judge(run: Path):
    judged = []
    summary, _ = report(run, lambda folder: judged.append(folder.name) or Found())
    assert judged == ["tiny/20260101-000000-aaaa"]
    verdict = [
        "failed",
        "Rank 1 <ran> out of memory.",
        "errors/rank-00001.json",
        "Rule: rank-error · exit code 1",
    ]
    places = [summary.index(part) for part in [*verdict, "Iteration"]]
    assert places == sorted(places)


def test_without_a_judge_there_is_no_verdict(run: Path):
    assert "exit code" not in report(run)[0]


def test_the_summary_has_the_plan_the_figures_and_the_submitted_configuration(run: Path):
    summary, _ = report(run)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for part in (
        "2 ranks = 2 pipeline stages × 1 data-parallel replica × 1 tensor-parallel, on 1 node (2 A100)",
        "8 transformer layers are divided 4-4",
        "4 of 4",
        f"{metrics[-1]['loss']:.4f}",
        f"{sorted(line['elapsed_ms'] for line in metrics[1:])[1]:,.1f} ms",
        "(p−1)/(m+p−1) = 1/3 = 33.3%",
        "experiment=tiny",
        '"iterations": 4',
        "versions.torch",
        "git checkout 0123456789abcdef0123456789abcdef01234567\ntdpp launch experiment=tiny train.iterations=3",
    ):
        assert part in summary


def test_changed_sources_are_part_of_how_to_reproduce(run: Path):
    provenance = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(
        json.dumps({**provenance, "changed": [" M conf/schema/experiment.py", "?? new.py"]})
    )
    summary, _ = report(run)
    assert f"git apply {run / 'diff.patch'}\n# not in the patch, because git does not track it: new.py\n" in summary


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("metrics.jsonl", "metrics.jsonl is not there"),
        ("provenance.json", "provenance.json is not there"),
        ("overrides.txt", "overrides.txt is not there"),
        ("nodes/g0-0.json", "nodes/g0-0.json is not there"),
        ("events/rank-00001.bin", "no event file for rank 1"),
    ],
    ids=lambda value: value.split("/")[-1] if "." in value and " " not in value else "",
)
def test_a_file_that_is_not_there_is_said_on_both_pages_and_on_stderr(run: Path, capsys, name: str, note: str):
    (run / name).unlink()
    summary, timeline = report(run)
    assert note in summary
    assert note in timeline
    assert f"tiny/20260101-000000-aaaa: {note}\n" in capsys.readouterr().err


def test_a_patch_without_tracked_changes_is_not_to_be_applied(run: Path):
    provenance = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps({**provenance, "changed": ["?? new.py"]}))
    assert "git apply" not in report(run)[0]


def test_a_metrics_line_cut_short_is_said_and_the_others_count(run: Path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    summary, _ = report(run)
    assert "2 of 4" in summary
    assert 'line 3 is not a metrics line: \'{"iteration": 3' in summary


@pytest.mark.parametrize(
    ("state", "told"), [("running", "none written yet."), ("ended", "the run ended before the first event.")]
)
def test_a_run_without_events_has_pages_without_figures(run: Path, state: str, told: str):
    for rank in range(2):
        (run / f"events/rank-{rank:05d}.bin").unlink()
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "memory")
    for path in (run / "nodes").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": state}))
    summary, timeline = report(run)
    assert "0 of 4" in summary
    assert "no event file for ranks 0-1" in summary
    assert "nothing to draw" in summary
    assert f"No events: {told}" in timeline


def test_a_run_within_its_first_iteration_says_that_there_is_no_steady_one(run: Path, tmp_path: Path):
    young = tmp_path / "young/tiny/20260101-000000-bbbb"
    make_run(young, Shape(iterations=1))
    summary, _ = report(young)
    assert "the events have no complete iteration after the first one yet" in summary


def test_a_run_that_records_no_events_is_not_missing_them(run: Path):
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "timeline": False}))
    summary, timeline = report(run)
    assert "Missing" not in summary
    assert "the run does not record events (profile.timeline=false)" in timeline


def with_plan(run: Path, **changes) -> Path:
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | changes))
    return run


def stage_rows(run: Path) -> list[list[str]]:
    """Cells of the table of stages, the head first."""
    rows = (run / "report/index.html").read_text().split("<h2>Stages</h2>")[1].split("</table>")[0].split("<tr>")[1:]
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


@pytest.mark.parametrize(
    ("shape", "layers", "ideal"),
    [
        pytest.param(
            Shape(layers=9, chunks=2, schedule="interleaved"),
            ["3, 2 + embedding", "2, 2 + head"],
            "interleaved 1F1B has (p−1)/(m·v+p−1) = 1/9 = 11.1%",
            id="interleaved",
        ),
        pytest.param(
            Shape(schedule="zb_h1"),
            ["4 + embedding", "4 + head"],
            "ZB-H1 has (p−1)/(3m+p−1) = 1/13 = 7.7%",
            id="zb-h1",
        ),
        pytest.param(
            Shape(schedule="gpipe"), ["4 + embedding", "4 + head"], "GPipe has (p−1)/(m+p−1) = 1/5 = 20.0%", id="gpipe"
        ),
        pytest.param(
            Shape(pipeline=1), ["8 + embedding + head"], "1F1B has (p−1)/(m+p−1) = 0/4 = 0.0%", id="one-stage"
        ),
    ],
)
def test_stages_have_their_layers_and_the_ideal_of_their_schedule(
    tmp_path: Path, shape: Shape, layers: list[str], ideal: str
):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, shape)
    summary, _ = report(run)
    assert [row[1] for row in stage_rows(run)] == ["layers", *layers]
    assert ideal in summary
    assert ("chunk 0 of all stages" in summary) == (shape.chunks > 1)


def test_a_schedule_from_a_file_has_no_ideal(run: Path):
    summary, _ = report(with_plan(run, schedule_file="schedule.json"))
    assert "the schedule in schedule.json" in summary
    assert "ideal" not in summary
    assert "p−1" not in summary


def test_what_is_not_the_default_is_part_of_the_plan(run: Path):
    assert "With " not in report(run)[0].split("Course")[0]
    plan = json.loads((run / "plan.json").read_text())
    train = plan["train"] | {"precision": "bf16"}
    sums = {"reduce_dtype": "bf16", "compress": "int8", "hierarchical_stages": [0]}
    with_plan(run, recompute="full", sharded_optimizer=True, sequence_parallel=True, train=train, **sums)
    words = (
        "With full recomputation of activations, a sharded optimizer, gradients summed in bf16, "
        "messages between stages in int8, gradients summed within nodes first, sequence parallelism, precision bf16."
    )
    assert words in report(run)[0]


def test_a_stage_has_the_peak_memory_of_its_ranks(tmp_path: Path):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(pipeline=3, data=2))
    (run / "memory/rank-00003.json").unlink()
    for rank in (4, 5):
        (run / f"memory/rank-{rank:05d}.json").unlink()
    summary, _ = report(run)
    assert [row[-1] for row in stage_rows(run)] == ["peak memory MiB", "11,000", "9,900", "–"]
    assert "(max_allocated)" in summary


def test_on_a_cpu_the_peak_is_what_was_resident(run: Path):
    for rank, peak in enumerate((512.4, 300.0)):
        (run / f"memory/rank-{rank:05d}.json").write_text(json.dumps({"rank": rank, "mib": {"max_resident": peak}}))
    summary, _ = report(with_plan(run, timeline=False))
    assert stage_rows(run) == [
        ["stage", "layers", "peak memory MiB"],
        ["0", "4 + embedding", "512"],
        ["1", "4 + head", "300"],
    ]
    assert "(max_resident)" in summary


def test_a_card_has_the_model_flops_of_a_rank(run: Path):
    assert re.search(r"Model TFLOP/s per rank\s+43\.0\s+Model-FLOP", report(run)[0])
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "tflops_per_rank": 0.00312}) + "\n")
    assert re.search(r"Model TFLOP/s per rank\s+0\.0031\s+Model-FLOP", report(run)[0])


def test_runs_without_later_keys_still_have_pages(run: Path, capsys):
    plan = json.loads((run / "plan.json").read_text())
    later = ("chunks", "recompute", "sharded_optimizer", "sequence_parallel", "schedule_file", "rehearsal")
    for key in later:
        del plan[key]
    del plan["train"]["precision"]
    for rank in plan["ranks"]:
        del rank["emulates"]
    (run / "plan.json").write_text(json.dumps(plan))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["tflops_per_rank"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(run / "memory")
    summary, timeline = report(run)
    assert [row[1] for row in stage_rows(run)] == ["layers", "4 + embedding", "4 + head"]
    assert "peak memory" not in summary
    assert "measured peak" not in summary
    assert "TFLOP" not in summary
    assert "Rehearsal" not in summary + timeline
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("next: tdpp report ")


@pytest.mark.parametrize(("clock", "meaning"), [("virtual", "logical time"), ("anchored", "real time")])
def test_pages_of_a_rehearsal_begin_with_its_clock_and_have_no_loss(tmp_path: Path, clock: str, meaning: str):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(data=2, ranks_per_node=2, gpus=("A100", "A10"), rehearsal=clock))
    for said in report(run, lambda _: Found()):
        begin = said.split("– tdpp", 1)[1].lstrip()
        assert begin.startswith("Rehearsal: all times are emulated")
        assert f"clock  {clock}  ({meaning}" in begin
    summary = (run / "report/index.html").read_text()
    assert "<dt>Loss</dt>" not in summary
    assert "Loss over iterations" not in summary
    assert "standing in for 2 nodes (1 with 2 A100, 1 with 2 A10)" in summary
    assert "<tr><td>g0-0</td><td>A100</td><td>0, 1</td><td>0</td></tr>" in summary
    assert "rehearsal-0" not in summary


def failure(rank: int, *, type: str, message: str, unix: float = 0.0, symptom: bool = False) -> dict[str, Any]:
    """The content of a rank's errors/rank-*.json."""
    place = {"rank": rank, "stage": 0, "dp": 0, "tp": 0, "node": "g0-0", "start": "0.0"}
    return vars(RankFailure(**place, unix=unix, type=type, message=message, symptom=symptom))


def test_failed_ranks_are_listed_causes_before_symptoms(run: Path):
    for rank, (symptom, unix) in enumerate([(True, 1.0), (False, 2.0)]):
        error = failure(rank, type="OSError", message=f"disk <{rank}>", unix=unix, symptom=symptom)
        (run / f"errors/rank-{rank:05d}.json").write_text(json.dumps(error))
    summary, _ = report(run)
    assert summary.index("disk <1>") < summary.index("disk <0>")


def test_what_comes_from_a_run_cannot_end_a_script_or_begin_a_tag(tmp_path: Path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--"
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(iterations=2, overrides=(f"name={hostile}",)))
    plan = (run / "plan.json").read_text().replace('"g0-0"', json.dumps(hostile))
    (run / "plan.json").write_text(plan)
    (run / "metrics.jsonl").write_text(hostile + "\n")
    (run / "config.yaml").write_text(hostile)
    (run / "errors/rank-00000.json").write_text(json.dumps(failure(0, type=hostile, message=hostile)))
    verdict = Judgement(reason=hostile, evidence=(hostile,), state=hostile, rule=hostile)
    lines = (Line(hostile, nodes=(hostile,)),)
    found = Found(verdict, mismatches=(hostile,), stderr=lines, agents=lines, warnings=lines)
    (run / "nodes/g0-0.gpu").write_text(hostile + "\n2026-11-21T22:02:10+09:00 " + hostile + "\n")
    main([str(run)], lambda _: found)
    for page in ("index.html", "timeline.html"):
        content = (run / "report" / page).read_text()
        assert "alert(1)</script>" not in content
        assert "<img" not in content
        assert "<!--" not in content.replace("<!--[", "")


def test_a_run_that_cannot_be_found_is_an_error(tmp_path: Path):
    with pytest.raises(RunFolderError, match="no runs in"):
        main(["--runs-dir", str(tmp_path)])


def test_a_plan_of_another_version_is_an_error(run: Path):
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "version": 3}))
    with pytest.raises(RunFolderError, match="expected version 1 or 2, found 3"):
        main([str(run)])


def test_the_command_line_can_be_imported_without_torch_or_pandas():
    code = "import sys, launch.commands.report; print(sorted({'torch', 'pandas', 'plotly'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_what_several_ranks_say_is_a_line_with_their_numbers(tmp_path: Path):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(pipeline=4, data=1, micro_batches=2, iterations=4))
    for rank in range(4):
        error = failure(rank, type="OSError", message="gone" if rank == 2 else "no such file", unix=rank)
        (run / f"errors/rank-{rank:05d}.json").write_text(json.dumps(error))
    summary = report(run)[0].split("Failed ranks")[1]
    rows = [line.split() for line in summary.splitlines() if "OSError" in line]
    assert [(row[0], row[-1]) for row in rows] == [("0-1,", "file"), ("2", "gone")]
    assert rows[0][1] == "3"


def test_failures_that_differ_only_in_an_address_are_one_row_and_causes_come_first(tmp_path: Path):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(pipeline=4, data=1, micro_batches=2, iterations=4))
    for rank in range(4):
        lost = {"type": "PeerLost", "message": f"no answer from [127.0.0.1]:9642$4{rank}", "symptom": True}
        own = lost if rank < 3 else {"type": "OSError", "message": "no such file", "symptom": False}
        (run / f"errors/rank-{rank:05d}.json").write_text(json.dumps(failure(rank, **own)))
    found = report(run)[0].split("Failed ranks")[1].splitlines()
    rows = [line.split() for line in found if "PeerLost" in line or "OSError" in line]
    assert [row[0] for row in rows] == ["3", "0-2"]


def test_a_report_may_be_written_elsewhere(run: Path, tmp_path: Path, capsys):
    output = tmp_path / "my" / "pages"
    assert main([str(run), "--output", str(output), "--csv"]) == 0
    written = [output / name for name in ("index.html", "timeline.html", "events.csv", "metrics.csv")]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
    assert sorted(output.iterdir()) == sorted(written)
    assert not (run / "report").exists()


def test_reports_of_several_written_elsewhere_are_beside_their_comparison(run: Path, tmp_path: Path, capsys):
    other = run.with_name("20260102-000000-bbbb")
    make_run(other, SHAPE)
    logs = [tmp_path / folder / "n0.log" for folder in "ab"]
    for log in logs:
        log.parent.mkdir()
        log.write_text(LOG)
    output = tmp_path / "pages"
    assert main([str(run.parent), *map(str, logs), "--output", str(output)]) == 0
    folders = [f"tiny/{run.name}", f"tiny/{other.name}", "n0", "n0.1"]
    pages = [output / folder / name for folder in folders for name in ("index.html", "timeline.html")]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in (*pages, output / "comparison.html")]
    comparison = (output / "comparison.html").read_text()
    assert all(f'href="{folder}/index.html"' in comparison for folder in folders)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "pages", "runs"]
    assert [path.name for path in logs[0].parent.iterdir()] == ["n0.log"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with open_to_others() as folder:
        yield folder


def test_who_may_only_read_a_run_is_told_how_to_have_its_report(open_folder: Path):
    runs, mine = open_folder / "runs", open_folder / "mine"
    run = runs / "tiny/20260101-000000-aaaa"
    for one in (run, run.with_name("20260102-000000-bbbb")):
        make_run(one, SHAPE)
    mine.mkdir()
    mine.chmod(0o777)
    with ordinary_user():
        with pytest.raises(ReportError, match=r"aaaa belongs to \w+; write the report elsewhere with --output FOLDER"):
            main([str(run)])
        with pytest.raises(ReportError, match=r"/runs: cannot be written \(Permission denied\); .* --output FOLDER"):
            main([str(run), "--output", str(runs)])
        assert main([str(run), "--output", str(mine / "one")]) == 0
        assert main([str(run.parent), "--output", str(mine / "all")]) == 0
    assert (mine / "one/index.html").exists()
    assert (mine / "all/comparison.html").exists()


@only_root_is_two_users
def test_root_leaves_nothing_in_the_run_of_another_user(run: Path, tmp_path: Path):
    for path in (run, *run.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    with pytest.raises(ReportError, match=rf"{run} belongs to nobody; write the report elsewhere with --output FOLDER"):
        main([str(run)])
    assert not (run / "report").exists()
    assert main([str(run), "--output", str(tmp_path / "mine")]) == 0


def test_a_report_is_not_written_through_a_link(run: Path, tmp_path: Path):
    (tmp_path / "planted").mkdir()
    (run / "report").symlink_to(tmp_path / "planted")
    with pytest.raises(ReportError, match=rf"/report is a link to {tmp_path}/planted; .* --output {tmp_path}/planted"):
        main([str(run)])
    assert list((tmp_path / "planted").iterdir()) == []
    (run / "report").unlink()
    (run / "report").mkdir()
    (run / "report/index.html").symlink_to(tmp_path / "planted/page")
    assert main([str(run)]) == 0
    assert list((tmp_path / "planted").iterdir()) == []
    assert not (run / "report/index.html").is_symlink()


def in_the_way(make, *names: str):
    """Puts something else in the place of files of a run."""

    def put(run: Path) -> None:
        for name in names:
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
            make(run / name)

    return put


ODD = {
    "pipes": (in_the_way(os.mkfifo, "metrics.jsonl", "events/rank-00001.bin", "provenance.json", "overrides.txt"), 4),
    "pipe and folder": (in_the_way(os.mkfifo, "config.yaml", "errors/rank-00000.json", "nodes/g0-0.gpu"), 2),
    "folders": (in_the_way(Path.mkdir, "metrics.jsonl", "memory/rank-00000.json", "nodes/g0-0.json"), 3),
    "files": (in_the_way(Path.touch, "events"), 2),
}


@pytest.mark.parametrize(("damage", "notes"), ODD.values(), ids=ODD.keys())
def test_a_page_is_made_of_what_is_right(run: Path, damage, notes: int):
    before = report(run)[0]
    damage(run)
    after = report(run)[0]
    assert "2 ranks = 2 pipeline stages" in before
    assert "2 ranks = 2 pipeline stages" in after
    assert after.count("not a regular file") + after.count("cannot be read (Not a directory)") >= notes


def test_what_is_said_of_damaged_files_reaches_a_terminal_as_visible_text(run: Path, capsys):
    (run / "config.yaml").write_text('{"parallel": {"\\u001b[2J": 1}}')
    assert main([str(run)]) == 0
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert "parallel.\\x1b[2J is not a key" in told


def test_a_run_that_cannot_be_judged_has_a_page_that_says_so(run: Path):
    def judge(_: object) -> Findings:
        raise RunFolderError("jobs.json is damaged")

    assert "no verdict: jobs.json is damaged" in report(run, judge)[0]
