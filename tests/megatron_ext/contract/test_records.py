"""What ranks write is what others read: failures, the head of an event file, a plan and those of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from megatron_ext.contract import events
from megatron_ext.contract.errors import RankFailure
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import checkpoint_iteration, checkpoint_name

FAILURE = RankFailure(3, 1, 0, 1, "a-0", start="0.0", unix=1.5, type="OSError", message="gone", symptom=True)


def test_a_failure_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_json(run.plan, vars(FAILURE))
    assert run.read(run.plan, RankFailure) == FAILURE


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [("rank", -1, "rank=-1 must be 0 or more"), ("unix", -1.0, "unix=-1.0 must be seconds since 1970")],
)
def test_numbers_of_a_failure_that_cannot_be_are_named(tmp_path: Path, key: str, value: Any, rule: str) -> None:
    run = RunDir(tmp_path)
    run.write_json(run.plan, vars(FAILURE) | {key: value})
    with pytest.raises(RunFolderError, match=f"is damaged: {rule}"):
        run.read(run.plan, RankFailure)


def test_records_follow_the_header_and_are_numpys() -> None:
    content = events.head({"rank": 3}) + events.RECORD.pack(1, 2, 3, -1, -2, 5, 6)
    text, start = events.header_of(content)
    assert json.loads(text) == {"version": events.VERSION, "rank": 3}
    assert np.frombuffer(content, np.dtype(list(events.FIELDS)), offset=start).tolist() == [(1, 2, 3, -1, -2, 5, 6)]


def test_a_plan_that_lacks_what_was_added_since_is_read_as_it_was_meant(tmp_path: Path) -> None:
    content = make_plan(compose([]), "a/b").as_json()
    for key in ("chunks", "recompute", "sharded_optimizer", "schedule_file", "rehearsal", "data_cache", "nsys"):
        del content[key]
    for place in content["ranks"]:
        del place["emulates"]
    plan = Plan.parse(content, tmp_path)
    assert (plan.chunks, plan.recompute, plan.rehearsal, plan.data_cache) == (1, "none", None, None)
    assert plan.node_of(3) == "local-0"


def test_checkpoints_are_named_after_their_iteration() -> None:
    assert checkpoint_iteration(checkpoint_name(50)) == 50
    assert checkpoint_iteration("../iter_0000050") is None
