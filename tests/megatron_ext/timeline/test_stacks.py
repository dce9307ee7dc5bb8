"""A process that stands still is named by the line of the user's where it does, whatever it hangs in."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data import ahead
from megatron_ext.timeline.stacks import Stacks, located
from tests.support import PATIENCE_S

MY = """
import multiprocessing, os, queue, select, socket, subprocess, threading, time

def wait_for_nfs():
    time.sleep(1e6)

def take_a_lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()

def receive():
    one, other = socket.socketpair()
    one.recv(1)

def run_a_command():
    subprocess.run(["sleep", "1000"], check=True)

def read_a_pipe():
    reads, writes = os.pipe()
    os.read(reads, 1)

def poll():
    select.select([], [], [], 1e6)

def loop():
    while True:
        pass

def get_from_a_queue():
    queue.Queue().get()

def join_a_thread():
    threading.Thread(target=wait_for_nfs, daemon=True).start()
    threading.Event().wait()

def in_a_comprehension():
    return [time.sleep(1e6) for _ in range(3)]

def multiply():
    import torch
    while True:
        torch.ones(900, 900) @ torch.ones(900, 900)
"""
NAMES = [line[4:-3] for line in MY.splitlines() if line.startswith("def ")]


def module(folder: Path) -> object:
    (folder / "my.py").write_text(MY)
    spec = importlib.util.spec_from_file_location("my", folder / "my.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@contextmanager
def forked(does: object) -> Iterator[tuple[Stacks, int]]:
    """A process that does so, as a rank of number 3."""
    made = Stacks([3])
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # what it starts is to end with it
            made.take(3)
            does()  # type: ignore[operator]
        finally:
            os._exit(1)
    try:
        time.sleep(0.5)
        yield made, pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def asked(made: Stacks, pid: int, word: str) -> dict[str, Any]:
    """Where it is, once it has come to where it stands still."""
    until = time.monotonic() + PATIENCE_S
    while word not in (found := made.ask(3, pid))["at"] and time.monotonic() < until:
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_line_that_hangs_is_named(tmp_path: Path, name: str) -> None:
    with forked(getattr(module(tmp_path), name)) as (made, pid):
        for _ in range(2):  # it goes on standing still
            found = asked(made, pid, "my.py:")
            assert found["at"].startswith("my.py:")
            assert name in found["at"] or "comp>" in found["at"]
            assert any(frame.startswith(f"{tmp_path}/my.py:") for frame in found["stack"])


def test_a_process_that_prepares_samples_is_named_where_the_rank_waits_for_it(tmp_path: Path) -> None:
    my = module(tmp_path)

    class Hanging:
        source = "my data"

        def batch(self, numbers: object) -> None:
            my.wait_for_nfs()  # type: ignore[attr-defined]

    def rank() -> None:
        samples: Any = Hanging()
        ahead._Helper(1 << 16, [samples]).ask((0, bytes(8)), samples)

    with forked(rank) as (made, pid):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        try:
            assert "wait_for_nfs" in asked(made, pid, "wait_for_nfs")["at"]
        finally:
            for child in children:
                os.kill(int(child), signal.SIGKILL)


def test_a_process_that_is_stopped_or_gone_has_no_stack_and_costs_little_time() -> None:
    with forked(lambda: time.sleep(1e6)) as (made, pid):
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        assert made.ask(3, pid) == {"at": "", "stack": []}
        assert time.monotonic() - begun < 5
        os.kill(pid, signal.SIGCONT)
    assert made.ask(3, pid) == {"at": "", "stack": []}


def test_a_process_that_does_not_answer_yet_or_any_more_is_not_ended() -> None:
    def reset() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        time.sleep(1e6)

    with forked(reset) as (made, pid):
        assert made.ask(3, pid) == {"at": "", "stack": []}
        time.sleep(0.1)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)


def test_a_fault_of_its_own_says_where(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import ctypes\n\n\ndef reach():\n    ctypes.string_at(1)\n")
    spec = importlib.util.spec_from_file_location("bad", tmp_path / "bad.py")
    assert spec is not None
    assert spec.loader is not None
    bad = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bad)
    made = Stacks([0])
    pid = os.fork()
    if pid == 0:
        made.take(0)
        bad.reach()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert made.fault(0) == "bad.py:5 reach"


def test_a_text_that_is_no_stack_is_none() -> None:
    assert located(["", "hello\n  File x\n"]) == {"at": "", "stack": []}
