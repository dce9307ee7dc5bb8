"""Processes are recognised by the token of their run, whatever else they are, and ended for certain."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.machine import processes
from tests.support.launch.live import wait_for
from tests.support.ordinary_user import ordinary_user

TOKEN = secrets.token_hex(8)
"""Others may run these tests on the same machine."""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], env={"TDPP_RUN_TOKEN": TOKEN, "NODE_RANK": "1"}, start_new_session=True)
    wait_for(lambda: Path(f"/proc/{process.pid}/environ").read_bytes() != b"")  # just after exec it is empty
    yield process
    process.kill()
    process.wait()


def test_a_process_is_found_by_the_whole_token(sleeper: subprocess.Popen[bytes]) -> None:
    assert processes.find(TOKEN) == {sleeper.pid}
    assert processes.find(TOKEN[:-1]) == set()


def test_a_process_is_found_by_its_node(sleeper: subprocess.Popen[bytes]) -> None:
    assert processes.find(TOKEN, node_rank=1) == {sleeper.pid}
    assert processes.find(TOKEN, node_rank=11) == set()


def test_a_process_tells_which_signals_it_handles(sleeper: subprocess.Popen[bytes]) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not processes.catches(os.getpid(), signal.SIGUSR2)
    assert not processes.catches(sleeper.pid, signal.SIGUSR2)
    sleeper.kill()
    sleeper.wait()
    assert not processes.catches(sleeper.pid, signal.SIGUSR2)


def test_the_dead_are_not_found_before_their_parent_waits(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert processes.find(TOKEN) == set()


def test_a_process_tells_whose_it_is_if_it_can_be_seen(sleeper: subprocess.Popen[bytes]) -> None:
    assert processes.is_of(TOKEN, sleeper.pid) is True
    assert processes.is_of(TOKEN[:-1], sleeper.pid) is False
    with ordinary_user():
        assert processes.is_of(TOKEN, 1) is False
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert processes.is_of(TOKEN, sleeper.pid) is None
    sleeper.wait()
    assert processes.is_of(TOKEN, sleeper.pid) is None


def trapping(does: str, work: str) -> subprocess.Popen[bytes]:
    """A shell at work that will do this on SIGTERM."""
    shell = subprocess.Popen(
        ["bash", "-c", f"trap '{does}' TERM; echo; {work}"],
        env={"TDPP_RUN_TOKEN": TOKEN, "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    shell.stdout.readline()
    return shell


def test_terminate_asks_first() -> None:
    with trapping("exit 7", "while :; do sleep 0.02; done") as polite:
        assert polite.pid in processes.terminate(TOKEN, grace_s=5)
        assert polite.wait() == 7


def test_terminate_kills_what_does_not_listen() -> None:
    with trapping("", "sleep 60") as deaf:
        begun = time.monotonic()
        assert deaf.pid in processes.terminate(TOKEN, grace_s=0.2)
        assert deaf.wait() == -signal.SIGKILL
        assert time.monotonic() - begun < 30
        assert processes.find(TOKEN) == set()


def test_a_signal_to_a_process_that_has_gone_is_no_error(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    processes.send([sleeper.pid], signal.SIGTERM)
