"""What a run costs is shown while it does, and which jobs it had once it has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.judge.evidence import evidence_of
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.observe.look import observe
from tests.launch.judge.test_slurm_verdict import seen_of
from tests.support.launch.run_folders import NOW, OK, Case, Node

PRICED = ("cluster.groups.local.price_per_hour=1800",)  # a dollar a second for both nodes
BEGUN = [Node(started=NOW - 20)] * 2


def told(case: Case, tmp_path: Path, spent: float | None = None) -> dict[str, str]:
    run = case.make(tmp_path / "run")
    if spent is not None:
        run.write_json(run.spent, {"dollars": spent})
    seen = observe(run, NOW)
    return {one.label: one.text for one in evidence_of(seen, decide(seen).state, ())}


@pytest.mark.parametrize(
    ("train", "spent", "text"),
    [
        (PRICED, None, "$20.00 so far, about $25.00 at the end"),
        ((*PRICED, "train.max_cost=100"), 31.5, "$31.50 so far of train.max_cost=100, about $36.50 at the end"),
        (
            (*PRICED, "train.max_cost=33"),
            31.5,
            "$31.50 so far of train.max_cost=33, which all iterations would exceed: about $36.50",
        ),
        ((), None, None),
    ],
    ids=["no limit", "within its limit", "above its limit", "no price"],
)
def test_dollars_so_far_of_the_limit_and_at_the_end_are_shown(
    tmp_path: Path, train: tuple[str, ...], spent: float | None, text: str | None
) -> None:
    """Five seconds are left of a run that began 20 s ago; what earlier starts have cost counts in its own figure."""
    assert told(Case(nodes=BEGUN, last=20, train=train), tmp_path, spent).get("cost") == text


def test_what_iterations_still_send_between_groups_counts(tmp_path: Path) -> None:
    """At a dollar each of the 30 that are left."""
    case = Case(nodes=BEGUN, last=20, train=(*PRICED, "train.max_cost=100"), length={"traffic_price": 1})
    assert told(case, tmp_path, 31.5)["cost"] == "$31.50 so far of train.max_cost=100, about $66.50 at the end"


def test_of_a_run_that_is_over_the_whole_cost_is_shown(tmp_path: Path) -> None:
    nodes = [replace(OK, started=NOW - 65)] * 2
    assert told(Case(nodes=nodes, last=50, train=PRICED), tmp_path)["cost"] == "$60.00"


def test_the_status_of_an_ended_run_has_its_job_ids(tmp_path: Path) -> None:
    seen = seen_of(tmp_path, Case([OK, OK], last=50), "COMPLETED", "COMPLETED")
    assert seen.job_ids == ("11", "12")
    shown = [str(one) for one in evidence_of(replace(seen, jobs=()), State.succeeded, ())]
    assert "jobs: 11, 12" in shown
