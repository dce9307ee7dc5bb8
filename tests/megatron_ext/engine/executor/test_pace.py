"""A GPU's host is never more than a few passes ahead of it, and tells when the GPU does not come on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_ext.contract.errors import PeerLost
from megatron_ext.engine.executor import pace
from megatron_ext.engine.executor.pace import PASSES_AHEAD, Pace


class Gpu:
    """Ends one pass each time it is asked whether it has ended one."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.queued = 0
        self.ended = 0

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.queued += 1
        self.number = self.gpu.queued

    def query(self) -> bool:
        if self.gpu.ended < min(self.gpu.queued, self.gpu.passes):
            self.gpu.ended += 1
        return self.gpu.ended >= self.number


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu(passes=20)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_the_host_is_at_most_a_few_passes_ahead(gpu: Gpu) -> None:
    own = Pace(torch.device("cuda"), 30.0)
    ahead = []
    for micro_batch in range(20):
        own.passed("forward-compute", micro_batch)
        ahead.append(gpu.queued - gpu.ended)
    assert max(ahead) == PASSES_AHEAD
    assert ahead[-1] == PASSES_AHEAD  # and not less: the GPU has work queued
    gpu.passes += 1
    own.finished()
    assert gpu.ended == gpu.queued == 21


def test_a_gpu_that_stands_still_is_told_in_time_with_the_pass_it_is_in(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.passes = 3
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    monkeypatch.setattr(pace.time, "sleep", sleep)
    own = Pace(torch.device("cuda"), 60.0)
    with pytest.raises(PeerLost, match=r"^backward-compute of micro-batch 3 did not end on the GPU within .*=60: "):
        for micro_batch in range(20):
            own.passed("backward-compute", micro_batch)
    assert 60.0 < now < 60.1
