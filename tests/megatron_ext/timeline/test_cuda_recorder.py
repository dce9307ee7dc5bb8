"""Marks on a GPU become times on the host's clock, however fast the GPU's own runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.timeline import cuda_recorder
from megatron_ext.timeline.cuda_recorder import CudaRecorder
from megatron_ext.timeline.event_files import EventBuffer
from tests.megatron_ext.engine.test_parts import RECORD


class Clock:
    """A host's, and that of a GPU which began at another time, runs too fast, and has a queue of kernels to do."""

    TOO_FAST = 1.0001

    def __init__(self) -> None:
        self.ns = 10**15
        self.done_ns = 0
        """When the GPU has done all that its computing stream has been given so far."""
        self.streams_share_a_queue = False
        self.answer_ns = iter([1_000, 1_000, 40_000, 3_000_000, 1_000, 2_000, 9_000] * 2000)
        """Now and then another process has the CPU."""

    def pass_ns(self, ns: int) -> None:
        self.ns += ns

    def monotonic_ns(self) -> int:
        return self.ns

    def compute(self, ns: int) -> None:
        self.done_ns = max(self.ns, self.done_ns) + ns

    def synchronize(self) -> None:
        self.ns = max(self.ns, self.done_ns)

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """`record` is queued at once; the GPU passes it when its stream gets there, on an idle one within 6 us."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self, stream: object = None) -> None:
        self.clock.pass_ns(1000)
        waits = stream is None or self.clock.streams_share_a_queue
        self.passed_ns = max(self.clock.ns, self.clock.done_ns) if waits else self.clock.ns + 6000
        self.ns = (self.passed_ns - 10**15) * Clock.TOO_FAST

    def query(self) -> bool:
        self.clock.pass_ns(next(self.clock.answer_ns))
        return self.clock.ns >= self.passed_ns

    def elapsed_time(self, other: Event) -> float:
        assert self.passed_ns <= self.clock.ns
        assert other.passed_ns <= self.clock.ns
        assert self.ns <= other.ns, "CUDA does not promise negative times"
        return float(np.float32((other.ns - self.ns) / 1e6))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    monkeypatch.setattr(cuda_recorder.time, "monotonic_ns", clock.monotonic_ns)
    monkeypatch.setattr(cuda_recorder.CudaRecorder, "_watch", lambda recorder: None)
    return clock


def found(buffer: EventBuffer) -> np.ndarray:
    """The iterations, begins and ends of all that is recorded."""
    records = np.frombuffer(buffer.waiting(buffer.end), RECORD)
    return np.stack([records["iteration"], records["start_ns"], records["end_ns"]], 1)


def test_a_gpu_whose_clock_runs_too_fast_does_not_drift(clock: Clock) -> None:
    buffer = EventBuffer()
    recorder = CudaRecorder(buffer, nvtx=False)
    true = []
    for iteration in range(1, 201):
        recorder.iteration = iteration
        begun = clock.ns
        with recorder.span("forward-compute", micro_batch=iteration % 4):
            clock.pass_ns(200_000_000)
        true.append((iteration, begun, clock.ns))
        clock.pass_ns(300_000_000)
        if iteration % 100 == 0:  # 50 s, in which the GPU's clock gains 5 ms
            recorder.flush()
    recorder.close()
    recorded = found(buffer)
    assert recorded[:, 0].tolist() == list(range(1, 201))
    assert np.abs(recorded - np.array(true)).max() < 20_000


@pytest.mark.parametrize("streams_share_a_queue", [False, True])
def test_a_gpu_that_always_has_something_queued_is_not_waited_for(clock: Clock, streams_share_a_queue: bool) -> None:
    """As where micro-batches stream without a flush: the host is 600 ms ahead. Only where all streams share a queue
    does the GPU's clock run away, as far as it does until the end."""
    buffer = EventBuffer()
    recorder = CudaRecorder(buffer, nvtx=False)
    clock.streams_share_a_queue = streams_share_a_queue
    clock.compute(600_000_000)
    true, waited, early = [], 0, 0
    for iteration in range(1, 301):
        recorder.iteration = iteration
        begun = clock.done_ns
        with recorder.span("forward-compute"):
            clock.compute(200_000_000)
        true.append((iteration, begun, clock.done_ns))
        clock.pass_ns(max(0, clock.done_ns - clock.ns - 600_000_000))
        before = clock.ns
        recorder.flush()
        waited = max(waited, clock.ns - before)
        assert clock.done_ns - clock.ns > 500_000_000
        early += len(found(buffer)) >= iteration - 10
    assert waited < 50_000_000
    assert early == 300
    clock.streams_share_a_queue = False
    recorder.close()
    recorded = found(buffer)
    assert recorded[:, 0].tolist() == list(range(1, 301))
    off = np.abs(recorded - np.array(true)).max()
    assert off < (7_000_000 if streams_share_a_queue else 40_000)
