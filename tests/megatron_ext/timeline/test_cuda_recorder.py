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
    """A host's, and a GPU's that began at another time and runs too fast."""

    TOO_FAST = 1.0001

    def __init__(self) -> None:
        self.ns = 10**15
        self.wait_ns = iter([8_000, 5_000_000, 8_000, 30_000, 9_000] * 20)  # now and then another process has the CPU

    def pass_ns(self, ns: int) -> None:
        self.ns += ns

    def monotonic_ns(self) -> int:
        return self.ns

    def synchronize(self) -> None:
        self.pass_ns(next(self.wait_ns))

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.clock.pass_ns(1000)
        self.ns = (self.clock.ns - 10**15) * Clock.TOO_FAST

    def elapsed_time(self, other: Event) -> float:
        return float(np.float32((other.ns - self.ns) / 1e6))


def test_a_gpu_whose_clock_runs_too_fast_does_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    monkeypatch.setattr(cuda_recorder.time, "monotonic_ns", clock.monotonic_ns)
    buffer = EventBuffer()
    recorder = CudaRecorder(buffer, nvtx=False)
    true = []
    for iteration in range(1, 201):
        recorder.iteration = iteration
        begun = clock.ns
        with recorder.span("forward-compute", micro_batch=iteration % 4):
            clock.pass_ns(200_000_000)
        true.append((begun, clock.ns))
        clock.pass_ns(300_000_000)
        if iteration % 100 == 0:  # 50 s, in which the GPU's clock gains 5 ms
            recorder.flush()
    recorder.close()
    records = np.frombuffer(buffer.waiting(buffer.end), RECORD)
    found = np.stack([records["start_ns"], records["end_ns"]], 1)
    assert records["iteration"].tolist() == list(range(1, 201))
    assert np.abs(found - np.array(true)).max() < 20_000
