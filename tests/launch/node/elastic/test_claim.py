"""Of two agents of one node exactly one runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.files.records import BEAT_S, NodeState, Start
from launch.node.elastic.peer_status import QUIET_S, Claim, Replaced
from tests.launch.node.elastic.test_runs import agent, decided, elastic, saved_and_ended, start, wait_until_training
from tests.launch.node.elastic.test_runs import corpus as corpus
from tests.support.launch import live
from tests.support.launch.live import command, wait_for

NAME = "local-1"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.nodes.mkdir()
    return run


def test_a_node_that_gives_signs_of_life_cannot_be_claimed(run: RunDir) -> None:
    first, second = Claim(run, NAME, 0, "7"), Claim(run, NAME, 0, "8")
    first.take(at_once=False)
    state = NodeState(run, NAME, 1, Start(0, 0), "7", holds=lambda: first.holds)
    over = threading.Event()

    def live() -> None:
        while not over.wait(BEAT_S / 4):
            state.beat()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(Replaced, match=rf"^node local-1 is run by process {os.getpid()} on \S+ of job 7: this"):
            second.take(at_once=False)
    finally:
        over.set()
        thread.join()
    first.check()


def test_a_silent_node_goes_to_the_agent_that_comes_and_the_one_that_had_it_writes_nothing_more(run: RunDir) -> None:
    first, second = Claim(run, NAME, 0, "7"), Claim(run, NAME, 0, "8")
    first.take(at_once=False)
    state = NodeState(run, NAME, 1, Start(0, 0), "7", holds=lambda: first.holds)
    began = time.monotonic()
    second.take(at_once=False)
    assert time.monotonic() - began >= QUIET_S
    with pytest.raises(Replaced, match="of job 8: this agent ends"):
        first.check()
    before = run.node_state(NAME).read_bytes()
    state.publish(state="ended", exit_code=1)
    assert run.node_state(NAME).read_bytes() == before
    second.check()


@pytest.mark.parametrize("over", ["ended", "requeued", "none", "earlier"])
def test_what_is_over_is_claimed_at_once(run: RunDir, over: str) -> None:
    Claim(run, NAME, 1, None).take(at_once=False)
    if over != "none":
        NodeState(run, NAME, 1, Start(0 if over == "earlier" else 1, 0), None).publish(state=over)
    began = time.monotonic()
    Claim(run, NAME, 1, None).take(at_once=False)
    assert time.monotonic() - began < BEAT_S


def test_of_agents_that_come_at_once_one_wins(run: RunDir) -> None:
    claims = [Claim(run, NAME, 0, None) for _ in range(16)]
    won: list[Claim] = []
    barrier = threading.Barrier(len(claims))

    def take(claim: Claim) -> None:
        barrier.wait()
        try:
            claim.take(at_once=True)
            claim.check()
        except Replaced:
            return
        won.append(claim)

    threads = [threading.Thread(target=take, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [claim.holds for claim in won].count(True) == 1


def second_agent(run: RunDir, pid: int) -> subprocess.Popen[str]:
    """Starts what an agent's process was started with once more."""
    words = [word.decode() for word in command(pid).split(b"\0")[:-1]]
    lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environment = dict(line.decode().split("=", 1) for line in lines if b"=" in line)
    # The agent of a local job ends with the process that started it.
    environment["SUBMITIT_LOCAL_JOB_ID"] = str(os.getpid())
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_a_stalled_agent_that_is_back_leaves_its_node_to_the_one_that_came_for_it(runs: Path, corpus: Path) -> None:
    """Then yet another one comes, and finds the node at work."""
    run = start(runs, corpus, *elastic(3))
    wait_for(run.latest_checkpoint.exists)
    stalled = agent(run, 1)
    os.kill(stalled, signal.SIGSTOP)
    wait_until_training(run, "0.1", 2)
    second = second_agent(run, stalled)
    wait_for(lambda: agent(run, 1) == second.pid)
    os.kill(stalled, signal.SIGCONT)
    wait_for(lambda: not live.command(stalled))
    wait_until_training(run, "0.2", 3)
    assert agent(run, 1) == second.pid
    assert decided(run)["0.2"]["reason"] == "1 node came back: local-1"
    line = f"node local-1 is run by process {second.pid} on {os.uname().nodename}: this agent ends"
    wait_for(lambda: any(line in path.read_text() for path in run.submitit.rglob("*.out")))
    third = second_agent(run, second.pid)
    told, _ = third.communicate(timeout=60)
    assert third.returncode == 0
    assert told.splitlines()[-1] == line
    assert agent(run, 1) == second.pid
    saved_and_ended(run, "0.2")
    assert second.wait(60) is not None
    second.communicate()
