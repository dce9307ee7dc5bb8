"""Whichever process of a run dies: the verdict names it first, and nothing is left running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.control.follow import follow
from launch.control.stop import stop
from launch.control.submit import resume
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import Verdict, judge
from launch.machine import processes
from launch.observe.look import observe
from tests.support.launch.live import (
    FOREVER,
    TWO_NODES,
    WORKER,
    agents,
    controller,
    ranks,
    start,
    token,
    wait_for,
    wait_until_running,
    workers,
)

SOON_S = 50


def end(run: RunDir) -> None:
    """Follows the run to its end, which must come soon and leave nothing."""
    begun = time.monotonic()
    follow(run)
    assert time.monotonic() - begun < SOON_S
    assert processes.find(token(run)) == set()


@pytest.mark.parametrize("when", ["at-start", "mid-run"])
@pytest.mark.parametrize("rank", [0, 3], ids=["first-rank", "last-rank"])
def test_a_killed_rank_is_named_with_its_place_and_signal(runs: Path, rank: int, when: str) -> None:
    run = start(runs, *FOREVER)
    wait_for(lambda: len(ranks(run)) == 4)
    if when == "mid-run":
        wait_until_running(run)
    os.kill(ranks(run)[rank], signal.SIGKILL)
    end(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.failed, "rank-failed")
    place = run.read_json(run.plan)["ranks"][rank]
    expected = f"rank {rank} (stage {place['stage']}, dp {place['dp']}, tp 0, node local-0) was killed by SIGKILL"
    assert verdict.reason == expected


@pytest.mark.fast
def test_a_rank_that_raises_comes_before_those_that_only_lost_it(runs: Path) -> None:
    run = start(runs, *FOREVER, *TWO_NODES, "+cluster.environment.FAIL_RANK=3")
    end(run)
    verdict = judge(run)
    assert verdict.state == State.failed
    place = "rank 3 (stage 1, dp 1, tp 0, node local-1)"
    assert verdict.reason == f"{place} failed with RuntimeError: out of luck; in detail"
    assert any("failed only because another one was lost" in line for line in verdict.evidence)


def test_a_run_of_one_node_ends_soon_when_its_ranks_only_lost_each_other(runs: Path) -> None:
    """As when one of them hangs. No other node could tell more, so none is waited for."""
    run = start(runs, *FOREVER, "+cluster.environment.FAIL_RANK=3", "+cluster.environment.SYMPTOM=1")
    end(run)
    assert judge(run).state is State.failed


def test_a_run_that_has_saved_nothing_is_not_said_to_be_a_start_for_others(runs: Path) -> None:
    run = start(runs, "train.checkpoint=false")
    end(run)
    with pytest.raises(LaunchError, match="cannot be resumed, because it saves no checkpoints"):
        resume(run, WORKER)


VICTIMS = {
    "worker": (workers, {"worker-killed"}),
    "agent": (agents, {"agent-lost", "never-started"}),
    "controller": (lambda run: [controller(run)], {"ended-from-outside", "never-started"}),
}
"""How to find it, and which rules may judge its death: the second only before a node has told anything."""


@pytest.mark.parametrize("victim", [workers, agents], ids=["worker", "agent"])
def test_a_helper_process_that_was_stopped_is_told_until_it_goes_on(
    runs: Path, victim: Callable[[RunDir], list[int]]
) -> None:
    """Its ranks train on, but nobody would notice their end."""
    run = start(runs, *FOREVER)
    wait_until_running(run)
    (pid,) = victim(run)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: judge(run).rule == "process-stopped")
    verdict = judge(run)
    assert (verdict.state, verdict.exit_code) == (State.stalled, 5)
    assert " of node local-0 was stopped by SIGSTOP or Ctrl-Z" in verdict.reason
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: judge(run).state is State.running)
    stop(run)


@pytest.mark.parametrize("when", ["at-start", "mid-run"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_helper_process_ends_the_run(
    runs: Path, victim: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, rules = VICTIMS[victim]
    monkeypatch.setattr("launch.observe.executors.START_S", 1.0)
    run = start(runs, *FOREVER)
    wait_for(lambda: find(run))
    if when == "mid-run":
        wait_until_running(run)
    os.kill(find(run)[0], signal.SIGKILL)
    end(run)
    verdict = judge(run)
    assert verdict.rule in (rules - {"never-started"} if when == "mid-run" else rules)
    assert verdict.exit_code in (1, 4)


def test_a_failed_node_takes_the_others_along(runs: Path) -> None:
    run = start(runs, *FOREVER, *TWO_NODES)
    wait_until_running(run)
    victim = next(pid for pid in workers(run) if ranks(run)[0] in children(pid))
    os.kill(victim, signal.SIGKILL)
    end(run)
    assert judge(run).reason == "the worker of node local-0 was killed by SIGKILL"
    assert run.read_json(run.node_state("local-1"))["stopped"] == "SIGTERM"


def time_runs_out(run: RunDir) -> Verdict:
    wait_until_running(run)
    for pid in agents(run):
        os.kill(pid, signal.SIGUSR2)  # what submitit sends 10 s before the limit
    end(run)
    return judge(run)


def test_wherever_a_run_is_resumed_its_relative_paths_are_those_of_where_it_was_launched(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("launched", "resumed"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "launched")
    run = start(runs, *FOREVER)
    stop(run)
    monkeypatch.chdir(tmp_path / "resumed")
    resume(run, WORKER)
    wait_for(lambda: workers(run))
    assert Path(f"/proc/{workers(run)[0]}/cwd").readlink() == tmp_path / "launched"
    assert Path.cwd() == tmp_path / "resumed"
    stop(run)


def test_a_run_that_is_resumed_is_a_start_of_its_own(runs: Path) -> None:
    """An earlier try to resume it failed, and is not counted, but one of its nodes had begun."""
    run = start(runs, *FOREVER)
    stop(run)
    state = run.read_json(run.node_state("local-0"))
    run.write_json(run.node_state("local-0"), {**state, "start": "1.0"})
    resume(run, WORKER)
    stop(run)
    assert run.read_json(run.node_state("local-0"))["start"] == "2.0"


def test_a_run_that_is_resumed_is_followed_from_there_to_its_end(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ends that its nodes told before are not taken for new ones, nor are old lines printed again."""
    monkeypatch.setattr("launch.control.follow.GRACE_S", 0.1)
    run = start(runs, "+cluster.environment.ITERATION_S=0.2")
    wait_until_running(run)
    stop(run)
    resume(run, WORKER)
    end(run)
    assert judge(run).state is State.succeeded
    assert [line.split()[1] for line in capfd.readouterr().err.splitlines()] == [f"{n}/" for n in range(1, 7)]


def test_when_time_runs_out_the_run_saves_and_can_be_resumed(runs: Path) -> None:
    run = start(runs, *FOREVER, *TWO_NODES)
    verdict = time_runs_out(run)
    assert (verdict.state, verdict.rule, verdict.exit_code) == (State.interrupted, "time-limit", 8)
    assert f"continue with 'tdpp launch resume={run.name}'" in verdict.reason
    saved = observe(run).saved
    resume(run, WORKER)
    wait_for(lambda: observe(run).log[-1].iteration > (saved or 0))
    assert judge(run).state is State.running
    stop(run)


def test_when_time_runs_out_on_a_run_that_saves_nothing_that_is_told(runs: Path) -> None:
    verdict = time_runs_out(start(runs, *FOREVER, *TWO_NODES, "train.checkpoint=false"))
    assert (verdict.state, verdict.rule) == (State.failed, "time-limit")
    assert "executor.time_min" in verdict.reason


def test_submitits_own_cancel_ends_a_worker_that_does_not_listen(runs: Path) -> None:
    run = start(runs, *FOREVER, "+cluster.environment.DEAF=1")
    wait_until_running(run)
    os.kill(controller(run), signal.SIGINT)
    end(run)
    state = run.read_json(run.node_state("local-0"))
    assert (state["state"], state["stopped"], state["exit_code"]) == ("ended", "SIGINT", -signal.SIGKILL)
    assert judge(run).rule == "ended-from-outside"


def test_a_process_that_left_the_workers_group_is_ended_with_it(runs: Path) -> None:
    run = start(runs, "+cluster.environment.STRAY=1")
    state = run.node_state("local-0")
    wait_for(lambda: state.exists() and run.read_json(state)["state"] == "ended")
    assert processes.find(token(run), node_rank=0) == set()
    end(run)
    assert judge(run).state == State.succeeded


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
