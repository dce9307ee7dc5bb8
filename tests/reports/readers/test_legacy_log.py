"""A text log of the modified Megatron-LM tells every event of its run, whatever else is in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.commands.report import main
from reports.errors import ReportError
from reports.readers.events import Timeline
from reports.readers.legacy_log import HEAD
from reports.readers.megatron_log import Sizes, read
from reports.readers.record import Record
from tests.reports.conftest import Opener
from tests.support.cases import fewer
from tests.support.reports.in_browser import ready, until
from tests.support.reports.legacy import Call, Job, calls, job_info, log, memory_line
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run

JOB = Job(pipeline=3, data=2, micro_batches=4, iterations=5, before=3, interval=4, skipped=frozenset({6}))
CALLS = calls(JOB)
TEXT = job_info(JOB, 1) + log(JOB, CALLS)
SAID = Sizes()
DAMAGE = settings(max_examples=fewer(25, 60))


def shown(folder: Path, text: str, sizes: Sizes = SAID) -> tuple[Record, Timeline]:
    path = folder / "n061.out"
    path.write_text(text, encoding="utf-8", newline="")
    return read(path, sizes)


def rows(timeline: Timeline) -> list[tuple[int, str, int, int]]:
    """Rank, name, iteration, micro-batch of all events, as they are drawn."""
    events = records(timeline)
    keys = ("rank", "name", "iteration", "micro_batch")
    return [
        (rank, timeline.names[name], iteration, micro_batch)
        for rank, name, iteration, micro_batch in zip(*(events[key].tolist() for key in keys), strict=True)
    ]


def expected(known: list[Call] = CALLS) -> list[Call]:
    """All but the spans over other timers, by rank and time, what is inside another after it."""
    events = [call for call in known if call.name != "forward-backward"]
    return sorted(events, key=lambda call: (call.rank, call.start, -call.end))


def complete_job(job: Job) -> Job:
    """Without the iterations after the last log line, of which the log says nothing."""
    return Job(**{**vars(job), "iterations": (job.before + job.iterations) // job.interval * job.interval - job.before})


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(iterations=20, interval=10), id="two-stages"),
        pytest.param(Job(pipeline=4, data=2, micro_batches=8, iterations=6, interval=3), id="steady-state"),
        pytest.param(Job(pipeline=4, micro_batches=2), id="fewer-micro-batches-than-stages"),
        pytest.param(Job(pipeline=1, data=2), id="no-pipeline"),
        pytest.param(Job(iterations=9, before=34, interval=4), id="goes-on-from-a-checkpoint"),
        pytest.param(Job(iterations=12, interval=6, skipped=frozenset({1, 2, 3, 7})), id="skipped-fp16-steps"),
        pytest.param(Job(iterations=3, interval=1), id="a-line-for-each-iteration"),
    ],
)
def test_every_call_is_an_event_of_its_iteration_and_micro_batch_the_last_ones_too(tmp_path: Path, job: Job):
    job = complete_job(job)
    known = expected(calls(job))
    _, timeline = shown(tmp_path, job_info(job, 0) + log(job, known))
    assert rows(timeline) == [call[:4] for call in known]
    for key, index in (("start_ns", 4), ("end_ns", 5)):
        assert np.abs(records(timeline)[key] / 1e9 - [call[index] for call in known]).max() < 3e-7  # a double of today
    assert timeline.notes == ()
    assert timeline.uncertainty_ns is None


def test_a_transfer_knows_the_rank_at_its_other_end(tmp_path: Path):
    _, timeline = shown(tmp_path, TEXT)
    events = records(timeline)
    names = np.array(timeline.names)[events["name"]]
    apart = {"forward-recv": -2, "backward-send-forward-recv": -2, "backward-send": -2, "forward-send": 2}
    apart |= {"backward-recv": 2, "forward-send-backward-recv": 2}
    for name, difference in apart.items():
        assert set((events["peer"] - events["rank"])[names == name].tolist()) == {difference}
    assert set(events["peer"][~np.isin(names, list(apart))].tolist()) == {-1}


STRANGE = st.sampled_from(
    [
        memory_line(2, 4),
        memory_line(2, 4) + memory_line(4, 4),
        "WARNING:torch.distributed: slow </script><script>alert(1)</script>\n",
        "  > building the index\n     rank of the world\n",
        "\n",
        "iteration 7 is slow\n",
    ]
)


@given(at=st.integers(TEXT.index(HEAD) + len(HEAD) + 1, len(TEXT)), line=STRANGE)
@DAMAGE
def test_lines_of_other_ranks_that_land_anywhere_inside_a_block_cost_nothing(tmp_path_factory, at: int, line: str):
    second = TEXT.index(" iteration", TEXT.index(HEAD))
    if second <= at < TEXT.index(HEAD, second) + len(HEAD):  # the iteration's own line is printed at once
        at = second
    _, timeline = shown(tmp_path_factory.mktemp("log"), TEXT[:at] + line + TEXT[at:])
    assert rows(timeline) == [call[:4] for call in expected() if call.iteration <= 8]


def test_what_landed_inside_is_read_as_well(tmp_path: Path):
    at = TEXT.index("backward-compute start time lst") + 60
    record, _ = shown(tmp_path, TEXT[:at] + memory_line(2, 4) + TEXT[at:])
    assert record.upstream is not None
    assert record.upstream.memory[2].max_allocated == 3871.25


@given(at=st.integers(0, len(TEXT)))
@DAMAGE
def test_a_log_that_is_cut_off_shows_what_is_whole(tmp_path_factory, at: int):
    folder = tmp_path_factory.mktemp("log")
    if "elapsed time per iteration" not in TEXT[:at].rpartition("\n")[0]:
        with pytest.raises(ReportError, match="is not a log of Megatron-LM"):
            shown(folder, TEXT[:at])
        return
    _, timeline = shown(folder, TEXT[:at])
    found, known = rows(timeline), [call[:4] for call in expected() if call.iteration <= 8]
    assert set(found) <= {*known, *((*call[:3], -1) for call in known)}
    if at > TEXT.index(" iteration        8/"):
        assert {row for row in found if row[2] == 4} == {row for row in known if row[2] == 4}


HOSTILE = st.sampled_from(
    [
        "nan", "inf", "-inf", "-1686726492.25", "32503680000.5", "1e308", "0.0", "1_0.5", "９", "\x00",
        "</script><script>alert(1)</script>", " iteration 99999999999999999999999/ 1 |", " iteration 5/ 8 | consumed",
        " iteration  5/ 8 | elapsed time per iteration (ms): nan |", "times across ranks (ms):",
        "     rank 999999: 1.00", "     rank  0: 1.00", "  forward-compute:", " forward-compute start time lst:  1 2 3",
        "WORLD_SIZE: 999999999", "DP_SIZE: 7", "NNODES: 0", "PARTITION: 1-2",
        "[Rank 9] (after 1 iterations) memory (MB) | allocated: 1 | max allocated: 2 | reserved: 3 | max reserved: 4",
    ]
)  # fmt: skip


@pytest.mark.slow
@given(damage=st.lists(st.tuples(st.integers(0, len(TEXT)), st.booleans(), HOSTILE), min_size=1, max_size=6))
@DAMAGE
def test_hostile_text_ends_in_a_page_without_it_or_in_one_message(
    tmp_path_factory, damage: list[tuple[int, bool, str]]
):
    text = TEXT
    for at, own_line, said in damage:
        text = text[:at] + (f"\n{said}\n" if own_line else said) + text[at:]
    path = tmp_path_factory.mktemp("log") / "n061.out"
    path.write_text(text, encoding="utf-8")
    try:
        main([str(path)])
    except ReportError as error:
        assert str(error)
    else:
        for page in ("index.html", "timeline.html"):
            assert "<script>alert" not in (path.with_suffix(".report") / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param(b"", "it is empty", id="empty"),
        pytest.param(b"\x7fELF\x02\x01\n\x00\x00", "from line 1 on, which begins 'ELF", id="binary"),
        pytest.param(b"a,b\n1,2\n", "from line 1 on, which begins 'a,b'", id="csv"),
        pytest.param(
            job_info(JOB, 0).encode() + b"Traceback (most recent call last):\n",
            "from line 19 on",
            id="failed-at-the-start",
        ),
        pytest.param(b"NODE_RANK: 1\nDP_SIZE: 4\n", "it ends after line 2", id="ended-at-the-start"),
    ],
)
def test_a_file_that_is_no_log_says_what_was_expected_and_where_it_makes_no_sense(
    tmp_path: Path, content: bytes, found: str
):
    path = tmp_path / "n060.out"
    path.write_bytes(content)
    with pytest.raises(ReportError) as error:
        read(path, Sizes())
    assert "expected lines such as ' iteration       10/      50 | consumed samples: …" in str(error.value)
    assert found in str(error.value)


def without_sizes(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "_SIZE:" not in line)


def test_sizes_that_the_log_does_not_say_follow_from_who_receives_and_that_is_told(tmp_path: Path):
    record, _ = shown(tmp_path, without_sizes(TEXT))
    assert (record.plan.tensor, record.plan.data, record.plan.pipeline) == (1, 2, 3)
    assert [rank.stage for rank in record.plan.ranks] == [0, 0, 1, 1, 2, 2]
    assert "tensor 1 x data 2 x pipeline 3 is derived from the ranks that receive nothing" in record.notes[0]


def test_given_sizes_win_over_what_the_log_says(tmp_path: Path):
    record, _ = shown(tmp_path, TEXT, Sizes(tensor=2, data=1))
    assert [(rank.stage, rank.dp, rank.tp) for rank in record.plan.ranks[:3]] == [(0, 0, 0), (0, 0, 1), (1, 0, 0)]


def test_sizes_that_do_not_fit_the_ranks_are_an_error_that_names_the_product(tmp_path: Path):
    with pytest.raises(ReportError, match="tensor 1 x data 4 x pipeline 3 = 12 ranks, but the log shows 6: give"):
        shown(tmp_path, TEXT, Sizes(data=4))


def test_the_plan_is_as_far_as_the_log_says_it(tmp_path: Path):
    plan = shown(tmp_path, TEXT)[0].plan
    assert (plan.partition, plan.micro_batches[0], plan.micro_batch_size, plan.train.iterations) == ([6, 6, 6], 4, 1, 8)
    assert (plan.model.layers, plan.model.hidden, plan.model.heads) == (18, 1600, 0)


def test_a_folder_of_a_job_knows_its_nodes(tmp_path: Path):
    folder = tmp_path / "10932251"
    folder.mkdir()
    for node, text in enumerate([job_info(JOB, 0) + memory_line(0, 4), TEXT]):
        (folder / f"n{60 + node:03d}.out").write_text(text)
    record, timeline = read(folder, Sizes())
    assert [(node.name, node.ranks) for node in record.plan.nodes] == [("n060", [0, 1, 2]), ("n061", [3, 4, 5])]
    assert record.upstream is not None
    assert list(record.upstream.memory) == [0]
    assert len(timeline.events) == sum(call.iteration <= 8 and call.name != "forward-backward" for call in CALLS)


def test_the_pages_lie_beside_the_log_and_have_its_course_stages_and_timers(tmp_path: Path, capsys):
    path = tmp_path / "10932251/n061.out"
    path.parent.mkdir()
    path.write_text(TEXT)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(path.with_suffix(".report") / page) for page in ("index.html", "timeline.html")
    ]
    summary = (path.with_suffix(".report") / "index.html").read_text()
    assert "Tokens per second" not in summary and "nothing to draw" not in summary  # the log does not tell
    for part in (
        "log of Megatron-LM",
        "10932251/n061",
        "8 of 8",
        "10.2000",
        "6 + embedding",
        "Times across ranks",
        "forward-backward",
    ):
        assert part in summary
    for part in ("Reproduce", "tdpp launch"):
        assert part not in summary


def test_in_a_browser_every_call_of_the_last_iteration_is_a_bar(tmp_path: Path, open_page: Opener):
    path = tmp_path / "n061.out"
    path.write_text(TEXT)
    main([str(path)])
    page = ready(open_page(path.with_suffix(".report") / "timeline.html"))
    page.fill("#iteration", "8")
    page.press("#iteration", "Enter")
    until(page, "columns.iterations[view.iteration] === 8")
    calls_of_it = [call for call in CALLS if call.iteration == 8 and call.name != "forward-backward"]
    until(page, f"chart.shown.bars.reduce((sum, bar) => sum + bar.count, 0) === {len(calls_of_it)}")
    assert "clock offset between nodes unknown" in page.inner_text("#said")


def test_sizes_of_a_run_cannot_be_given(tmp_path: Path):
    make_run(tmp_path / "runs/tiny/20260101-000000-aaaa", Shape(iterations=1))
    with pytest.raises(ReportError, match="leave out --tensor, --data and --pipeline"):
        main(["--runs-dir", str(tmp_path / "runs"), "--data", "2"])
