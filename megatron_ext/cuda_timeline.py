"""The timeline of a rank on a GPU: CUDA events mark when its kernels ran, and nothing waits for them.

A GPU's clock is not the host's: both are read at an anchor whenever the marks are turned into times, and what lies
between two anchors is stretched to fit, so that clocks of different speed do not drift apart.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import BinaryIO, Iterator, List, NamedTuple, Tuple

import torch

from megatron_ext.timeline import Recorder, UnderWay

READINGS = 5
"""Of both clocks at an anchor, of which the quickest counts."""


class Anchor(NamedTuple):
    """A moment on both clocks."""

    event: torch.cuda.Event
    host_ns: int


class CudaRecorder(Recorder):
    """Times are those of the GPU's stream, not of the host that fills it."""

    def __init__(self, file: BinaryIO, nvtx: bool) -> None:
        """`nvtx` also shows every span to NVIDIA's profilers, under the same name."""
        super().__init__(file)
        self._nvtx = nvtx
        self._spans: List[Tuple[str, int, int, int, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: List[torch.cuda.Event] = []
        """Events that have been read: to make one anew for each span takes longer."""
        self._anchor = _anchor()

    @contextmanager
    def span(self, name: str, micro_batch: int = -1, peer: int = -1, chunk: int = 0) -> Iterator[None]:
        """Records the time between the GPU's reaching the block's begin and its end."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        start = self.mark()
        yield
        self.ended(name, start, micro_batch, peer, chunk)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def begin(self, name: str) -> UnderWay:
        return _Marked(self, name, self.mark())

    def mark(self) -> torch.cuda.Event:
        """Notes where the GPU's computation is."""
        event = self._spare.pop() if self._spare else _event()
        event.record()
        return event

    def ended(self, name: str, start: torch.cuda.Event, micro_batch: int = -1, peer: int = -1, chunk: int = 0) -> None:
        """Records what began at a mark and ends here."""
        self._spans.append((name, self.iteration, micro_batch, peer, chunk, start, self.mark()))

    def flush(self) -> None:
        """Turns the marks so far into times, once the GPU has passed them all, and writes them."""
        before, self._anchor = self._anchor, _anchor()  # anew each time: an event's distance to it is a 32-bit float
        ms = before.event.elapsed_time(self._anchor.event)
        ns_per_ms = (self._anchor.host_ns - before.host_ns) / ms if ms > 0 else 1e6
        for name, iteration, micro_batch, peer, chunk, *events in self._spans:
            begun, ended = (before.host_ns + int(before.event.elapsed_time(event) * ns_per_ms) for event in events)
            self._append(name, iteration, begun, ended, micro_batch, peer, chunk)
            self._spare += events
        self._spans.clear()
        super().flush()

    def close(self) -> None:
        super().close()
        if self._nvtx:
            # A rank ends without its process' exit handlers: the profiler writes now what it still holds.
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


class _Marked(UnderWay):
    """Ends where the computation has what was under way: when that ended before, nothing on the GPU tells."""

    def __init__(self, recorder: CudaRecorder, name: str, start: torch.cuda.Event) -> None:
        self._recorder = recorder
        self._name = name
        self._start = start

    def end(self) -> None:
        self._recorder.ended(self._name, self._start)


def _anchor() -> Anchor:
    """Waits for all that the GPU has to do. The host's clock is right to within half of what the reading took."""
    torch.cuda.synchronize()
    readings = []
    for _ in range(READINGS):
        event, before = _event(), time.monotonic_ns()
        event.record()
        torch.cuda.synchronize()
        after = time.monotonic_ns()
        readings.append((after - before, Anchor(event, (before + after) // 2)))
    return min(readings, key=lambda reading: reading[0])[1]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
