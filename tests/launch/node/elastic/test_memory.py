"""Elastic runs that go on from the memory of nodes (`train.save_memory`), with the engine's own worker."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.judge.verdict import judge
from megatron_ext.contract.run_files import RunFiles
from tests.launch.node.elastic.test_runs import (
    agent,
    assert_trained_as_one_process,
    corpus,
    decided,
    elastic,
    logged,
    losses,
    saved_and_ended,
    start,
)
from tests.support.launch.live import ranks, wait_for

__all__ = ["corpus"]
DISK = 20
MEMORY = ("train.save_memory=2", f"train.save_interval={DISK}")


def train_past(run: RunDir, iteration: int) -> None:
    wait_for(lambda: run.metrics.exists() and max(losses(run), default=0) > iteration)


def went_on_from(run: RunDir, start: str) -> int:
    """The iteration of the checkpoint that it loaded, once it has trained from there."""
    wait_for(lambda: run.plan_of(start).exists())
    wait_for(lambda: start in decided(run))
    line = decided(run)[start]
    wait_for(lambda: logged(run, line["unix"]) >= 6)  # and saved
    return int(line["iteration"])


def lose_after(run: RunDir, iteration: int, lose: Callable[[], None], start: str) -> int:
    train_past(run, iteration)
    before = max(losses(run))
    lose()
    found = went_on_from(run, start)
    assert found % DISK, "on disk there is the same"
    assert before - 4 <= found
    return found


LAYOUTS = {
    "replicas": [],
    "sharded replicas": ["parallel.sharded_optimizer=true"],
    "stages": ["parallel.pipeline=2", "parallel.data=2", "parallel.partition=3-1"],
    "a tensor group over stages": [
        *("cluster.groups.local.count=3", "cluster.groups.local.gpus_per_node=2"),
        *("parallel.tensor=2", "parallel.pipeline=3", "parallel.data=1"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_lost_rank_agent_or_node_costs_the_iterations_since_the_newest_one_in_memory(
    runs: Path, corpus: Path, layout: list[str]
) -> None:
    """Then two neighbours are lost at once, if others are left: what is in no memory any more is on disk."""
    run = start(runs, corpus, *elastic(4), *layout, *MEMORY)
    nodes = len(run.read_plan().nodes)

    def kill_rank() -> None:
        os.kill(ranks(run)[1], signal.SIGKILL)

    def kill_node() -> None:
        for entry in run.read_json(RunFiles(run.path).node_ranks(f"local-{nodes - 1}")):
            os.kill(entry["pid"], signal.SIGKILL)
        os.kill(agent(run, nodes - 1), signal.SIGKILL)

    lose_after(run, DISK + 4, kill_rank, "0.1")
    found = lose_after(run, max(losses(run)), kill_node, "0.2")
    last = "0.2"
    if nodes > 3:
        used, last = run.read_plan().used, "0.3"
        train_past(run, found + 2)
        for node in used[:2]:
            os.kill(agent(run, node), signal.SIGKILL)
        assert went_on_from(run, last) % DISK == 0
    saved_and_ended(run, last)
    assert_trained_as_one_process(run, runs, corpus)


@pytest.mark.slow
def test_auto_says_what_it_has_measured(runs: Path, corpus: Path) -> None:
    run = start(runs, corpus, *elastic(2), "train.save_memory=auto", f"train.save_interval={DISK}")
    train_past(run, 5)
    plan = run.read_plan()
    assert plan.train.save_memory == 0
    assert plan.train.mtbf_s is not None
    saved_and_ended(run, "0.0")


@pytest.mark.slow
def test_a_keeper_that_is_killed_is_started_again_and_a_loss_is_told_with_what_is_in_memory(
    runs: Path, corpus: Path
) -> None:
    run = start(runs, corpus, *elastic(2), *MEMORY)
    train_past(run, 4)
    keeper = RunFiles(run.path).keeper("local-0")
    first = run.read_json(keeper)["pid"]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: run.read_json(keeper)["pid"] != first)
    told: list[str] = []

    def regroups() -> bool:
        found = judge(run)
        told.append(found.reason)
        return found.rule == "regrouping" and "in the memory of the nodes" in found.reason

    def kill_agent() -> None:
        os.kill(agent(run, 1), signal.SIGKILL)
        wait_for(regroups)

    lose_after(run, max(DISK + 4, max(losses(run)) + 6), kill_agent, "0.1")
    iteration = re.search(r"saved after iteration (\d+), in the memory of the nodes", told[-1])
    assert iteration is not None, told
    assert int(iteration[1]) % DISK
    saved_and_ended(run, "0.1")
    assert_trained_as_one_process(run, runs, corpus)
