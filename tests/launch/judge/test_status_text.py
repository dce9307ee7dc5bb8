"""What the status of a run says beside its verdict, and that damaged files of a run folder are reported."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conf.compose import compose
from launch.commands.status_display import runs_screen
from launch.control.planning.plan import make_plan
from launch.judge.findings import findings
from launch.judge.progress import time_of
from launch.judge.state import State
from launch.judge.status_text import COLUMNS, MORE_COLUMNS, as_json, as_text, more_cells, run_row
from launch.judge.verdict import decide, judge
from launch.observe.look import observe
from tests.support.launch.run_folders import EVALUATING, NOISE, NOW, OK, Case, Error, ended

A10 = ("experiment=seed_a10x8", "executor=local", "container=none")
TRAINED = {"iteration": 20, "ended_by": "samples", "limit": "320", "value": 320}
SPEED = "200.0 ms per iteration (median), 80.0 samples/s at the newest batch, logged"


def test_the_evidence_counts_symptoms_and_names_later_causes(tmp_path: Path) -> None:
    errors = [
        Error(0, NOW - 9),
        Error(3, NOW - 8, message="bang"),
        Error(1, NOW - 7, symptom=True),
        Error(2, NOW - 7, symptom=True),
    ]
    verdict = judge(Case([ended(1), ended(1)], errors, last=20).make(tmp_path / "run"), NOW)
    assert "2 ranks failed only because another one was lost" in verdict.evidence
    assert any(line.startswith("later: rank 3 ") for line in verdict.evidence)
    assert "iteration: 20 of 50, loss 4.0000, 200.0 ms per iteration (median), logged 1 s ago" in verdict.evidence


@pytest.mark.parametrize(
    ("messages", "told", "later"),
    [
        (["boom"] * 4, "boom (also all 3 other ranks)", []),
        (["boom", None, "boom", "boom"], "boom (also ranks 2-3)", []),
        (["boom", "boom", None, None], "boom (also rank 1)", []),
        (["boom", "bang", "boom", "bang"], "boom (also rank 2)", ["bang (also rank 3)"]),
        (["boom", "bang", "clash", None], "boom", ["bang", "clash"]),
    ],
    ids=["all", "neighbours", "two", "two of each", "different"],
)
def test_what_several_ranks_say_is_told_once_with_the_ranks(
    tmp_path: Path, messages: list[str | None], told: str, later: list[str]
) -> None:
    errors = [Error(rank, NOW - 9 + rank, message=text) for rank, text in enumerate(messages) if text is not None]
    verdict = judge(Case([ended(1), ended(1)], errors, last=20).make(tmp_path / "run"), NOW)
    assert verdict.reason == f"rank 0 (stage 0, dp 0, tp 0, node local-0) failed with RuntimeError: {told}"
    later_lines = [line for line in verdict.evidence if line.startswith("later: rank ")]
    assert [line.partition("RuntimeError: ")[2] for line in later_lines] == later


def test_the_first_of_several_ranks_that_say_the_same_is_named(tmp_path: Path) -> None:
    errors = [Error(0, NOW - 7), Error(1, NOW - 6), Error(3, NOW - 8)]
    verdict = judge(Case([ended(1), ended(1)], errors, last=20).make(tmp_path / "run"), NOW)
    assert verdict.reason.startswith("rank 3 (stage 1, dp 1, tp 0, node local-1) failed")
    assert verdict.reason.endswith("boom (also ranks 0-1)")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [((), "all iterations skipped"), ((*A10, "executor.rehearse=virtual"), "no loss (rehearsal)")],
    ids=["skipped", "rehearsed"],
)
def test_without_a_loss_the_evidence_says_why(tmp_path: Path, overrides: tuple[str, ...], told: str) -> None:
    run = Case(last=20, loss=None).make(tmp_path / "run")
    if overrides:
        run.write_json(run.plan, make_plan(compose([*overrides, "train.iterations=50"]), "xl/run").as_json())
    seen = observe(run, NOW)
    assert any(f"iteration: 20 of 50, {told}, 200.0 ms" in line for line in decide(seen).evidence)
    assert run_row("xl/run", seen)[2:4] == ["20/50", "-"]


def test_a_table_of_runs_says_how_far_a_batch_that_adapts_is_in_samples(tmp_path: Path) -> None:
    run = Case(last=20, length={"samples": 640}, adapt=NOISE).make(tmp_path / "run")
    assert run_row("xl/run", observe(run, NOW))[2] == "20 (50% of samples)"
    over = Case([OK, OK], last=20, length={"samples": 320}, adapt=NOISE, goal=TRAINED).make(tmp_path / "over")
    assert run_row("xl/run", observe(over, NOW))[2] == "20/20"


def test_the_first_line_does_not_count_for_the_pace(tmp_path: Path) -> None:
    seen = observe(Case(last=20).make(tmp_path / "run"), NOW)
    warm_up = replace(seen.times[0], elapsed_ms=9_999.0)
    many, alone = (time_of(replace(seen, times=times)) for times in ((warm_up, *seen.times[1:]), (warm_up,)))
    assert many is not None
    assert alone is not None
    assert (many.ms, alone.ms) == (200.0, 9_999.0)


def test_a_table_of_runs_says_how_far_its_times_of_an_iteration_vary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the pages do, within the columns of a terminal."""
    seen = observe(Case(last=20).make(tmp_path / "run"), NOW)
    each = [100.0, 100.0, 130.0, 90.0, 1234.5]
    times = [replace(seen.times[0], iteration=n, elapsed_ms=ms) for n, ms in enumerate((9_999.0, *each), 1)]
    varied = replace(seen, times=tuple(times))
    low, high = np.quantile(each, [0.1587, 0.8413], method="weibull")
    row = run_row("xl/20261126-204758Z-4757e420", varied)
    assert row[4] == f"100.0 ± {(high - low) / 2:.1f} (n = 5)"
    alone = run_row("xl/run", replace(seen, times=tuple(times[:1])))
    assert alone[4] == "9,999.0 (n = 1)"
    monkeypatch.setenv("COLUMNS", "120")
    screen = io.StringIO()
    columns = [*COLUMNS, *MORE_COLUMNS]
    Console(file=screen, width=120).print(runs_screen(columns, [[*row, *more_cells(varied)]]))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    assert row[4] in "\n".join(lines)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = Case(last=20).make(tmp_path / "run")
    with run.metrics.open("a") as file:
        file.write('{"iteration": 25, "un')
    assert [line.iteration for line in observe(run, NOW).log] == [5, 10, 15, 20]


def test_damaged_lines_of_the_log_are_reported_by_number_and_the_others_count(tmp_path: Path) -> None:
    run = Case([OK, OK], last=50).make(tmp_path / "run")
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([*lines[:3], "{}", *lines[3:], "0", '{"iteration": "1"}']) + "\n")
    found = findings(run, observe(run, NOW))
    assert (found.verdict.state, found.seen.log[-1].iteration) == (State.succeeded, 50)
    (fault,) = found.faults
    assert fault.endswith(
        "metrics.jsonl has lines that are not iterations: line 4 is damaged, or of another version of tdpp: it "
        "lacks iteration, unix, elapsed_ms, loss, nan; line 12 is damaged: it is not a JSON object; line 13 is "
        "damaged, or of another version of tdpp: it lacks unix, elapsed_ms, loss, nan"
    )
    assert f"fault: {fault}" in as_text(found)


def test_a_damaged_error_of_a_rank_is_reported_and_the_others_count(tmp_path: Path) -> None:
    run = Case([ended(1), ended(1)], errors=[Error(0, NOW - 9), Error(1, NOW - 8)]).make(tmp_path / "run")
    run.rank_error(0).write_text('{"rank": 0')
    found = findings(run, observe(run, NOW))
    assert found.verdict.reason == "rank 1 (stage 0, dp 1, tp 0, node local-0) failed with RuntimeError: boom"
    (fault,) = found.faults
    assert "rank-00000.json is not JSON" in fault


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    run = Case(last=5000).make(tmp_path / "run")
    log = observe(run, NOW).log
    assert log[-1].iteration == 5000
    assert 100 < len(log) < 1000


def test_the_last_evaluation_is_shown_with_what_is_wanted(tmp_path: Path) -> None:
    train = (*EVALUATING, "train.until=loss<=3.5")
    run = Case(last=25, train=train, evaluated={10: 2.0, 20: 2.0}).make(tmp_path / "run")
    assert "evaluation: loss 3.25, after iteration 20; train.until=loss<=3.5" in as_text(
        findings(run, observe(run, NOW))
    )


@pytest.mark.parametrize(
    ("case", "shown", "left_s"),
    [
        (Case(last=20, length={"epochs": 3, "samples": 810}), "20 of 50, epoch 1.19 of 3, loss", 5.0),
        (Case(last=20, length={"samples": 810}), "20 of 50, 320 of 810 samples, loss", 5.0),
        (
            Case(last=20, length={"samples": 810}, adapt=NOISE),
            f"20 of at most 50, 320 of 810 samples, loss 4.0000, {SPEED} 1 s ago",
            490 / 80 - 1,
        ),
        (
            Case(last=20, length={"samples": 810}, adapt=NOISE, train=EVALUATING, evaluated={20: 2.0}),
            "20 of at most 50, 320 of 810",
            490 / 80 + 4 * 2.0 - 1,
        ),
        (
            Case([OK, OK], last=20, length={"samples": 320}, adapt=NOISE, goal=TRAINED),
            "20 of 20, 320 of 320 samples, loss",
            None,
        ),
        (Case(length={"samples": 810}, adapt=NOISE), "none of at most 50 logged yet", None),
        (Case(last=25, train=EVALUATING, evaluated={10: 2.0, 20: 4.0}), "end: about 13 s left, ends ", 4.0 + 3 * 3.0),
        (
            Case(last=20, train=(*EVALUATING, "train.until=loss<=1"), evaluated={20: 4.0}),
            "end: at most 17 s left, ends ",
            17.0,
        ),
        (Case(last=20, train=("train.eval_interval=20",), evaluated={20: 4.0}), "end: about 13 s left, ends ", 13.0),
        (Case(), "none of 50 logged yet", None),
        (Case([OK, OK], last=50, length={"samples": 810}), "50 of 50, 800 of 810 samples, loss", None),
    ],
    ids=[
        *("epochs", "samples", "adaptive", "adaptive and evaluated", "adaptive and over", "adaptive and nothing yet"),
        *("evaluations", "until", "the last one", "nothing yet", "over"),
    ],
)
def test_the_status_says_how_far_it_is_in_the_runs_own_terms(
    tmp_path: Path, case: Case, shown: str, left_s: float | None
) -> None:
    run = case.make(tmp_path / "run")
    found = findings(run, observe(run, NOW))
    text = as_text(found)
    assert shown in text
    assert (" left" in text) == (left_s is not None)
    content = as_json(found)
    assert content["left_s"] == (None if left_s is None else pytest.approx(left_s))
    assert (content["samples"], content["epochs"]) == (case.length.get("samples"), case.length.get("epochs"))
    assert content["consumed_samples"] == 16 * case.last
