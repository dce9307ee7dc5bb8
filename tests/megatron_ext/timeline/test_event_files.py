"""Whatever ends a run, the events up to its last moment are in the files."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.contract.events import MAGIC, NAMES, RECORD
from megatron_ext.contract.schedule.check import actions_of
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.engine.executor.executor import Executor, Key
from megatron_ext.timeline import cuda_recorder
from megatron_ext.timeline.event_files import EventBuffer, EventFile
from megatron_ext.timeline.recorder import Recorder, begin_events
from reports.readers.events import read_rank
from tests.megatron_ext.engine import test_parts
from tests.megatron_ext.test_worker import alive, ended, pids, wait_for
from tests.support.full_disk import largest_file
from tests.support.megatron_ext.engine_run import EngineRun
from tests.support.megatron_ext.pretended_gpus import pretended_gpus

LAYOUT = (
    *("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=2"),
    *("train.iterations=100", "train.log_interval=1000", "train.checkpoint=false"),
)
GPU = "cluster.gpus.cpu.name=GPU"
LAST = 4
"""The iteration in which runs end here, before this micro-batch's backward pass on the last stage:"""
MICRO_BATCH = 2


def put(buffer: EventBuffer, number: int) -> None:
    buffer.put(2, 0, number, 3, 4, 5, 6)


def numbers(content: bytes) -> list[int]:
    return np.frombuffer(content, test_parts.RECORD)["iteration"].tolist()


def test_records_are_taken_in_their_order_round_and_round() -> None:
    buffer = EventBuffer(records=5)
    taken = []
    for number in range(100):
        put(buffer, number)
        if number % 3 == 2:
            waiting = buffer.waiting(buffer.end)
            taken += numbers(waiting)
            buffer.take(len(waiting))
    assert taken + numbers(buffer.waiting(buffer.end)) == list(range(100))


def test_a_full_buffer_waits_and_loses_nothing() -> None:
    buffer = EventBuffer(records=3)
    rank = threading.Thread(target=lambda: [put(buffer, number) for number in range(10)])
    rank.start()
    time.sleep(0.05)
    assert numbers(buffer.waiting(buffer.end)) == [0, 1, 2]
    taken = []
    while len(taken) < 10:
        waiting = buffer.waiting(buffer.end)
        taken += numbers(waiting)
        buffer.take(len(waiting))
        time.sleep(0.002)
    rank.join()
    assert taken == list(range(10))


def test_what_a_killed_process_put_in_can_be_taken() -> None:
    buffer = EventBuffer()
    pid = os.fork()
    if pid == 0:
        put(buffer, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    assert numbers(buffer.waiting(buffer.end)) == [7]


def test_a_file_has_a_header_and_the_records_as_they_were_made(
    tmp_path: Path, engine_run: Callable[..., EngineRun]
) -> None:
    plan = engine_run("parallel.data=2", "parallel.pipeline=1").plan
    path, buffer = tmp_path / "rank.bin", EventBuffer()
    begin_events(path, plan, plan.ranks[1])
    file, recorder = EventFile(path, buffer), Recorder(buffer)
    recorder.iteration = 7
    recorder.record("forward-send", 10, 20, micro_batch=3, peer=2, chunk=1)
    recorder.clock(100, 250, 2**40)
    header = path.read_bytes()
    assert header.startswith(MAGIC)
    assert len(header) == 12 + int.from_bytes(header[8:12], "little")
    assert json.loads(header[12:])["rank"] == 1
    file.write()
    assert path.read_bytes() == header  # what is as new as this look is for the next one
    file.write()
    assert np.frombuffer(path.read_bytes()[len(header) :], test_parts.RECORD).tolist() == [
        (NAMES.index("forward-send"), 1, 7, 3, 2, 10, 20),
        (NAMES.index("clock"), 0, 7, -1, 2**31 - 1, 100, 250),
    ]
    recorder.record("optimizer", 30, 40)
    file.write(last=True)
    assert len(path.read_bytes()) == len(header) + 3 * RECORD.size


def test_events_for_which_the_disk_has_no_room_are_counted_and_the_file_stays_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, buffer = tmp_path / "rank.bin", EventBuffer(records=8)
    path.write_bytes(b"header")
    file = EventFile(path, buffer)
    for number in range(3):
        put(buffer, number)
    with largest_file(len(b"header") + RECORD.size + 10):
        file.write(last=True)
    for number in range(3, 10):  # more than the buffer has room for, were nothing taken
        put(buffer, number)
    file.write(last=True)
    assert numbers(path.read_bytes()[len(b"header") :]) == [0, *range(3, 10)]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"{path}: cannot be written: File too large; events are lost",
        f"{path}: 2 events were lost",
        f"{path}: 2 events were lost",
    ]


def hang() -> None:
    time.sleep(60)


def fail() -> None:
    raise ValueError("of the test's own")


def run_out_of_memory() -> None:
    bytearray(2**60)


def kill(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


ENDS: dict[str, Callable[[], object]] = {
    "exception": fail,
    "out-of-memory": run_out_of_memory,
    "SIGKILL": kill(signal.SIGKILL),
    "SIGTERM": kill(signal.SIGTERM),
    "os._exit": lambda: os._exit(0),
    "hangs-and-is-stopped": hang,
    "SIGSTOP-and-is-stopped": kill(signal.SIGSTOP),
}


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Makes the last stage do something in the middle of an iteration."""

    def set_end(end: Callable[[], object]) -> None:
        backward = Executor._backward

        def last(self: Executor, kind: Kind, key: Key) -> None:
            if self._recorder.iteration == LAST and self._chunks[0].stage.last and key == (MICRO_BATCH, 0):
                end()
            backward(self, kind, key)

        monkeypatch.setattr(Executor, "_backward", last)

    return set_end


def recorded(run: EngineRun, rank: int, iteration: int) -> list[str]:
    read = read_rank(run.run.rank_events(rank))
    assert not read.notes
    return [read.names[record["name"]] for record in read.records if record["iteration"] == iteration]


def expected(run: EngineRun) -> list[str]:
    """What the last stage records of the last iteration."""
    names = ["batch-generator"]
    for kind, m, _ in actions_of(run.plan, 1, 0):
        if kind is Kind.BACKWARD and m == MICRO_BATCH:
            return names
        names += [kind.value] + ["loss-compute"] * (kind is Kind.FORWARD)
    raise AssertionError("it has no such backward pass")


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_whatever_ends_a_rank_its_events_are_there_to_the_last(
    engine_run: Callable[..., EngineRun],
    ends: Callable[[Callable[[], object]], None],
    end: Callable[[], object],
) -> None:
    ends(end)
    run = engine_run(*LAYOUT)
    worker = run.start()
    if "stopped" in next(name for name, known in ENDS.items() if known is end):
        events = run.run.rank_events(1)
        wait_for(
            lambda: events.exists() and recorded(run, 1, LAST) == expected(run), 120
        )  # a run at work can be looked at
        os.kill(worker, signal.SIGTERM)
    ended(worker)
    assert recorded(run, 1, LAST) == expected(run)
    for rank in (0, 1):
        one, *others = (recorded(run, rank, iteration) for iteration in range(1, LAST))
        assert one[-1] == "optimizer"
        assert others == [one] * 2


def test_if_all_processes_are_killed_only_the_last_moment_is_lost(
    engine_run: Callable[..., EngineRun], ends: Callable[[Callable[[], object]], None]
) -> None:
    ends(hang)
    run = engine_run(*LAYOUT)
    worker = run.start()
    events = run.run.rank_events(1)
    wait_for(lambda: events.exists() and recorded(run, 1, LAST), 120)
    time.sleep(1.0)
    os.kill(worker, signal.SIGKILL)
    ended(worker)
    wait_for(lambda: not any(alive(pid) for pid in pids(run).values()))
    assert recorded(run, 1, LAST) == expected(run)


@pytest.mark.parametrize("end", ["exception", "hangs-and-is-stopped"])
def test_a_gpus_events_are_kept_as_far_as_it_has_come(
    engine_run: Callable[..., EngineRun],
    ends: Callable[[Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    monkeypatch.setattr(cuda_recorder, "PATIENCE_S", 0.2)
    monkeypatch.setattr(cuda_recorder, "ANCHOR_S", 0.02)
    ends(ENDS[end])
    run = engine_run(GPU, *LAYOUT)
    worker = run.start(pretended_gpus())
    if end != "exception":
        events = run.run.rank_events(1)
        wait_for(lambda: events.exists() and recorded(run, 1, LAST) == expected(run), 120)
        os.kill(worker, signal.SIGTERM)
    ended(worker)
    assert recorded(run, 1, LAST) == expected(run)
