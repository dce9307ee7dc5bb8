"""Logs of Megatron-LM as it is, and of tdpp, have a page of what they tell; no more is said than they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conf.run_folder import log_lines
from launch.commands.report import main
from reports.errors import ReportError
from reports.readers import megatron_log
from reports.readers.events import Timeline
from reports.readers.megatron_log import Sizes, read
from reports.readers.record import Record
from reports.readers.upstream_log import Evaluation, parse
from tests.reports.readers.test_upstream_log import LOG
from tests.support.reports.figures import course_of, lines_of
from tests.support.reports.legacy import Job, calls, job_info, log
from tests.support.reports.records import records

ARGUMENTS = """\
using world size: 8, data-parallel size: 2, context-parallel size: 1, tensor-model-parallel size: 2, \
pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  data_parallel_size .............................. 2
  global_batch_size ............................... 4
  hidden_size ..................................... 1600
  micro_batch_size ................................ 1
  num_attention_heads ............................. 16
  num_layers ...................................... 48
  padded_vocab_size ............................... 50304
  pipeline_model_parallel_size .................... 2
  seq_length ...................................... 1024
  tensor_model_parallel_size ...................... 2
  virtual_pipeline_model_parallel_size ............ None
  world_size ...................................... 8
-------------------- end of arguments ---------------------
"""
RANKS = """\
times across ranks (ms):
  forward-backward:
     rank  0: 400.10
     rank  1: 402.50
  optimizer:
     rank  0: 10.00
     rank  1: 12.25
"""


def pages(folder: Path, text: str, *arguments: str) -> str:
    path = folder / "train.log"
    path.write_text(text)
    assert main([str(path), *arguments]) == 0
    assert (folder / "train.report/timeline.html").exists()
    return (folder / "train.report/index.html").read_text()


def read_text(folder: Path, text: str) -> tuple[Record, Timeline]:
    path = folder / "train.log"
    path.write_bytes(text.encode())
    return read(path, Sizes())


def test_a_log_of_megatron_lm_has_its_course_timers_and_memory(tmp_path: Path):
    summary = pages(tmp_path, ARGUMENTS + LOG)
    for part in ("30 of 30", "440.0 ms", "forward-backward", "8,150.8", "9,309", "hidden size 1600, 16 heads"):
        assert part in summary
    assert "8 ranks = 2 pipeline stages × 2 data-parallel replicas × 2 tensor-parallel" in summary
    assert "Missing from this page" not in summary


@pytest.mark.parametrize("listed", [False, True], ids=["first line alone", "with the arguments"])
@pytest.mark.parametrize("comma", ["", ", "], ids=["without a comma, as in 0.9", "with a comma"])
def test_ranks_that_share_sequences_are_neither_replicas_nor_a_tensor_group(tmp_path: Path, comma: str, listed: bool):
    """`--context-parallel-size 2` on 16 ranks: it was refused as 8 ranks, or shown as four tensor ranks."""
    world, arguments = ARGUMENTS.split("\n", 1)
    world = world.replace("world size: 8", "world size: 16").replace(
        "context-parallel size: 1, ", f"context-parallel size: 2, hierarchical context-parallel sizes: None{comma}"
    )
    arguments = arguments.replace(
        "world_size ...................................... 8\n", "context_parallel_size .... 2\n"
    )
    summary = pages(tmp_path, f"{world}\n{arguments if listed else ''}{LOG}")
    ranks = "16 ranks = 2 pipeline stages × 2 data-parallel replicas × 2 that share sequences × 2 tensor-parallel"
    assert ranks in summary
    assert not listed or "2 micro-batches of 1 per replica" in summary


def test_without_sizes_a_log_has_no_stages_and_its_page_says_why(tmp_path: Path):
    summary = pages(tmp_path, LOG)
    for part in ("30 of 30", "the log does not give the layout of its ranks; set --tensor, --data and --pipeline"):
        assert part in summary
    assert "8 ranks" not in summary
    assert "Bubble" not in summary  # neither events nor stages tell one
    assert "8 ranks = 4 pipeline stages" in pages(tmp_path, LOG, "--tensor", "1", "--data", "2", "--pipeline", "4")


def test_times_of_every_rank_without_their_calls_give_the_least_and_largest(tmp_path: Path):
    first, second = LOG.index(" [2026"), LOG.index(" [2026", LOG.index(" [2026") + 1)
    record, _ = read_text(tmp_path, LOG[first:second].split("(min, max)")[0] + RANKS)
    assert record.upstream is not None
    assert record.upstream.timers == {"forward-backward": (400.10, 402.5), "optimizer": (10.0, 12.25)}


@pytest.mark.parametrize("label", ["15: ", "07: ", "[default7]:", "[rank15]:", "1: [default7]:"])
def test_what_a_launcher_puts_before_every_line_changes_nothing(tmp_path: Path, label: str):
    job = Job(pipeline=2, data=2)
    for name, text in (("upstream", ARGUMENTS + LOG), ("profiled", job_info(job, 0) + log(job, calls(job)))):
        (tmp_path / name).mkdir()
        plain, events = read_text(tmp_path / name, text)
        other = "".join(f"0: noise of another task\n{label}{line}" for line in text.splitlines(keepends=True))
        labelled, same = read_text(tmp_path / name, other)
        assert len(plain.metrics)
        assert labelled.metrics.equals(plain.metrics)
        assert (labelled.upstream, labelled.plan) == (plain.upstream, plain.plan)
        assert same.events.equals(events.events)


def test_the_output_of_all_nodes_in_one_file_is_no_single_nodes(tmp_path: Path):
    job = Job(pipeline=2, data=4)
    text = "".join(f"{rank}: {line}\n" for rank in (0, 4) for line in job_info(job, rank // 4).splitlines())
    record, _ = read_text(tmp_path, text + "".join(f"7: {line}\n" for line in log(job, calls(job)).splitlines()))
    assert [node.name for node in record.plan.nodes] == ["node 0", "node 1"]
    assert not [note for note in record.notes if "node_rank" in note]


LOGGER = "INFO:megatron.core.timers:"


@pytest.mark.parametrize("logger", ["", LOGGER], ids=["printed", "by-a-logger"])
@pytest.mark.parametrize("head", ["max", "(min, max)"])
def test_of_timers_that_only_tell_the_largest_time_the_page_shows_that(tmp_path: Path, head: str, logger: str):
    """Megatron-LM 0.4 has the other option's heading."""
    text = re.sub(r": \(\d+\.\d+, (\d+\.\d+)\)", r": \1", LOG).replace("(min, max) time", f"{logger}{head} time")
    summary = pages(tmp_path, ARGUMENTS + text)
    assert cells(summary, "Times across ranks", "forward-backward") == ["forward-backward", "–", "410.00"]
    assert "model-and-optimizer-setup" not in summary


@pytest.mark.parametrize("logger", ["", LOGGER], ids=["printed", "by-a-logger"])
def test_timers_with_least_and_largest_time_are_shown_with_both(tmp_path: Path, logger: str):
    summary = pages(tmp_path, ARGUMENTS + LOG.replace("(min, max) time", f"{logger}(min, max) time"))
    assert cells(summary, "Times across ranks", "forward-backward") == ["forward-backward", "400.00", "410.00"]


def cells(summary: str, title: str, first: str) -> list[str]:
    """Of the row of a section's table that begins so."""
    section = summary.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in section.split("<tr>")]
    return next(row for row in rows if row and row[0] == first)


def test_no_more_is_said_of_nodes_than_a_log_tells(tmp_path: Path):
    summary = pages(tmp_path, ARGUMENTS + LOG)
    assert "on nodes that the log does not name" in summary
    assert "1 node" not in summary


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "The 48 transformer layers are divided 24-24"),
        ({"virtual_pipeline_model_parallel_size": "4"}, "The 48 transformer layers are divided 6-6-6-6-6-6-6-6"),
        ({"decoder_first_pipeline_num_layers": "20"}, "The 48 transformer layers are divided 20-28"),
        ({"decoder_last_pipeline_num_layers": "20"}, "The 48 transformer layers are divided 28-20"),
        ({"pipeline_model_parallel_layout": "Et*24|t*24L"}, "Model: 48 layers, hidden size 1600"),
        ({"account_for_loss_in_pipeline_split": "True"}, "Model: 48 layers, hidden size 1600"),
        ({"account_for_loss_in_pipeline_split": "False"}, "The 48 transformer layers are divided 24-24"),
        ({"num_layers": "47"}, "Model: 47 layers, hidden size 1600"),
    ],
    ids=lambda value: "-".join(value) or "even" if isinstance(value, dict) else "",
)
def test_the_layers_of_stages_follow_from_the_arguments(tmp_path: Path, arguments: dict[str, str], expected: str):
    kept = [
        line
        for line in ARGUMENTS.splitlines(keepends=True)
        if not line.startswith(tuple(f"  {key} ." for key in arguments))
    ]
    added = "".join(f"  {f'{key} ':.<48} {value}\n" for key, value in arguments.items())
    summary = pages(tmp_path, "".join([*kept[:-1], added, kept[-1]]) + LOG)
    assert expected in summary


def test_losses_on_other_data_the_gradients_norm_and_energy_are_on_the_page(tmp_path: Path):
    text = LOG.replace("31.4 |", "31.4 | energy per GPU (J/iter/GPU): 1200.5 | power per GPU (W/GPU): 271.8 |")
    rule = "-" * 60
    for at, where, loss in (
        (10, "iteration 10", 9.75),
        (20, "iteration 20 on validation set", 8.5),
        (30, "iteration 30 on test set", 8.25),
    ):
        said = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: 5.0E+03 | "
        end = text.index("\n", text.index(f"iteration {at:8d}/")) + 1
        text = f"{text[:end]}{rule}\n{said}\n{rule}\n{text[end:]}"
    summary = pages(tmp_path, ARGUMENTS + text)
    shown = re.sub(r"<[^>]*>", " ", summary)
    assert re.search(r"Validation loss\s+8\.5000\s+after iteration 20", shown)
    assert re.search(r"Test loss\s+8\.2500\s+after iteration 30", shown)
    assert re.search(r"Energy per GPU\s+1,200\.5 J\s+an iteration · 271\.8 W", shown)
    lines = lines_of(course_of(summary))
    assert lines["loss/validation"] == [(10, 9.75), (20, 8.5)]
    assert lines["loss/test"] == [(30, 8.25)]
    assert dict(lines["grad_norm/grad_norm"])[20] == 2.125
    for key, value in (("power_w_per_rank", 271.8), ("energy_j_per_rank", 1200.5)):
        assert lines[f"{key}/{key}"] == [(at, value) for at in (1, 10, 20, 30)]


def test_a_loss_at_the_end_of_training_is_that_of_the_last_iteration():
    line = " validation loss at the end of training for val data | lm loss value: 8.5E+00 | lm loss PPL: 5.0E+03 | "
    assert parse([*LOG.splitlines(), line]).evaluations == (Evaluation(30, "validation", 8.5),)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old-mac"])
def test_any_end_of_line_will_do(tmp_path: Path, ending: str):
    record, _ = read_text(tmp_path, LOG.replace("\n", ending))
    assert record.metrics["iteration"].tolist() == [1, 10, 20, 30]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(log_lines, "LINE_LIMIT", 4096)
    job = Job()
    _, timeline = read_text(tmp_path, "x" * 50_000 + "\n" + job_info(job, 0) + log(job, calls(job)))
    assert len(timeline.events) == sum(call.name != "forward-backward" for call in calls(job))


def test_a_large_file_that_is_no_log_is_not_read_to_its_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(megatron_log, "STRANGE_LIMIT", 1000)
    noise = "no log at all\n" * 100
    with pytest.raises(ReportError, match="is unreadable from line 1 on"):
        read_text(tmp_path, noise + LOG)
    record, _ = read_text(tmp_path, ARGUMENTS + noise + LOG)
    assert record.metrics["iteration"].tolist() == [1, 10, 20, 30]


def test_an_interleaved_log_shows_its_calls_without_micro_batches_and_says_so(tmp_path: Path):
    job = Job(pipeline=2, micro_batches=4)
    text = log(job, calls(job)).replace("backward-send-forward-recv", "forward-send-forward-recv")
    record, timeline = read_text(tmp_path, job_info(job, 0) + text)
    assert set(records(timeline)["micro_batch"].tolist()) == {-1}
    assert "interleaved schedule: the log does not say which call has which micro-batch" in timeline.notes
    assert record.plan.schedule == "unknown"


def test_iterations_are_not_taken_for_twice_as_many_when_a_log_was_written_twice(tmp_path: Path):
    job = Job()
    text = job_info(job, 0) + log(job, calls(job))
    record, timeline = read_text(tmp_path, text + text)
    assert record.metrics["iteration"].tolist() == [2, 4]
    assert len(timeline.events) == sum(call.name != "forward-backward" for call in calls(job))


def test_of_a_badly_damaged_log_the_first_places_are_named_and_the_others_counted(tmp_path: Path):
    job = Job(pipeline=2, data=2)
    text = log(job, calls(job)).replace("end time lst:  1", "end time lst:  x1")
    _, timeline = read_text(tmp_path, job_info(job, 0) + text)
    lists = text.count("end time lst:")
    assert timeline.notes[0].startswith(
        "rank 0, forward-backward up to iteration 2 (line 26): the end times are damaged"
    )
    assert (len(timeline.notes), timeline.notes[-1]) == (21, f"{lists - 20} more notes on the log are left out")
