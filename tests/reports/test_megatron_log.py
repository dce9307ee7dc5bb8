"""Logs of Megatron-LM as it is, and of tdpp, have a page of what they tell; no more is said than they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports import megatron_log
from reports.cli import main
from reports.events import Timeline
from reports.megatron_log import Sizes, read
from reports.record import Record
from tests.reports.legacy import Job, calls, job_info, log
from tests.reports.test_upstream_log import LOG

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
    for part in ("30 of 30", "440.0 ms", "forward-backward", "8,150.8", "9,309", "hidden 1600, 16 heads"):
        assert part in summary
    assert "8 ranks = 2 pipeline stages × 2 data-parallel replicas × 2 tensor-parallel" in summary
    assert "Missing from this page" not in summary


def test_without_sizes_a_log_has_no_stages_and_its_page_says_why(tmp_path: Path):
    summary = pages(tmp_path, LOG)
    for part in ("30 of 30", "the log does not say how its ranks lie; --tensor, --data and --pipeline do"):
        assert part in summary
    assert "8 ranks" not in summary
    assert "Bubble" not in summary  # neither events nor stages tell one
    assert "8 ranks = 4 pipeline stages" in pages(tmp_path, LOG, "--tensor", "1", "--data", "2", "--pipeline", "4")


def test_times_of_every_rank_without_their_calls_give_the_least_and_largest(tmp_path: Path):
    first, second = LOG.index(" [2026"), LOG.index(" [2026", LOG.index(" [2026") + 1)
    record, _ = read_text(tmp_path, LOG[first:second].split("(min, max)")[0] + RANKS)
    assert record.upstream is not None
    assert record.upstream.timers == {"forward-backward": (400.10, 402.5), "optimizer": (10.0, 12.25)}


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old-mac"])
def test_any_end_of_line_will_do(tmp_path: Path, ending: str):
    record, _ = read_text(tmp_path, LOG.replace("\n", ending))
    assert [line["iteration"] for line in record.metrics] == [1, 10, 20, 30]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(megatron_log, "LINE_LIMIT", 4096)
    job = Job()
    _, timeline = read_text(tmp_path, "x" * 50_000 + "\n" + job_info(job, 0) + log(job, calls(job)))
    assert len(timeline.events) == sum(call.name != "forward-backward" for call in calls(job))


def test_an_interleaved_log_shows_its_calls_without_micro_batches_and_says_so(tmp_path: Path):
    job = Job(pipeline=2, micro_batches=4)
    text = log(job, calls(job)).replace("backward-send-forward-recv", "forward-send-forward-recv")
    record, timeline = read_text(tmp_path, job_info(job, 0) + text)
    assert set(timeline.events["micro_batch"].tolist()) == {-1}
    assert "interleaved schedule: the log does not tell which call has which micro-batch" in timeline.notes
    assert record.plan.schedule == "unknown"


def test_iterations_are_not_taken_for_twice_as_many_when_a_log_was_written_twice(tmp_path: Path):
    job = Job()
    text = job_info(job, 0) + log(job, calls(job))
    record, timeline = read_text(tmp_path, text + text)
    assert [line["iteration"] for line in record.metrics] == [2, 4]
    assert len(timeline.events) == sum(call.name != "forward-backward" for call in calls(job))


def test_of_a_badly_damaged_log_the_first_places_are_named_and_the_others_counted(tmp_path: Path):
    job = Job(pipeline=2, data=2)
    text = log(job, calls(job)).replace("end time lst:  1", "end time lst:  x1")
    _, timeline = read_text(tmp_path, job_info(job, 0) + text)
    lists = text.count("end time lst:")
    assert timeline.notes[0].startswith(
        "rank 0, forward-backward up to iteration 2 (line 26): the end times are damaged"
    )
    assert (len(timeline.notes), timeline.notes[-1]) == (21, f"{lists - 20} more places of the log are left out")
