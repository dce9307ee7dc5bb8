"""The timeline of a rank on a GPU: CUDA events mark when its kernels ran, and nothing waits for them.

A GPU's clock is not the host's: both are read at an anchor whenever the marks are turned into times, and what lies
between two anchors is stretched to fit, so that clocks of different speed do not drift apart. An anchor waits for the
GPU, so it is taken between iterations. A GPU that hangs never gets there: a thread records what the GPU has passed,
without a new anchor and without waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import Deque, Iterator, List, NamedTuple

import torch

from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.progress import Wait
from megatron_ext.timeline.recorder import Recorder, UnderWay

READINGS = 5
"""Of both clocks at an anchor, of which the quickest counts."""
ANCHOR_S = 1.0
"""Between two anchors at least: one takes some 0.1 ms."""
GRACE_S = 0.1
"""So long a failed rank's GPU may go on with what is queued; the rank's message waits for it."""
PATIENCE_S = 2.0
"""After so long without an anchor the thread takes what the GPU has passed."""


class Anchor(NamedTuple):
    """A moment on both clocks."""

    event: torch.cuda.Event
    host_ns: int


class Pending(NamedTuple):
    """A span whose times are not known yet."""

    name: str
    iteration: int
    micro_batch: int
    peer: int
    chunk: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaRecorder(Recorder):
    """Times are those of the GPU's stream, not of the host that fills it."""

    def __init__(self, buffer: EventBuffer, nvtx: bool) -> None:
        """`nvtx` also shows every span to NVIDIA's profilers, under the same name."""
        super().__init__(buffer)
        self._nvtx = nvtx
        self._pending: Deque[Pending] = deque()
        self._spare: List[torch.cuda.Event] = []
        """Events that have been read: to make one anew for each span takes longer."""
        self._first = self._anchor = _anchor()
        self._ns_per_ms = 1e6
        """Nanoseconds of the host's clock in a millisecond of the GPU's, since the first anchor."""
        self._reading = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="events", daemon=True).start()

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
        self._pending.append(Pending(name, self.iteration, micro_batch, peer, chunk, start, self.mark()))

    def flush(self) -> None:
        """Turns the marks so far into times, once the GPU has passed them all; not more often than `ANCHOR_S`."""
        if time.monotonic_ns() - self._anchor.host_ns >= ANCHOR_S * 1e9:
            self._stretch()

    def clock(self, own_ns: int, rank0_ns: int, uncertainty_ns: int) -> None:
        with self._reading:
            super().clock(own_ns, rank0_ns, uncertainty_ns)

    def core_waits(self, ns: int, in_passes_ns: int) -> None:
        with self._reading:
            super().core_waits(ns, in_passes_ns)

    def abandon(self) -> None:
        self._over.set()
        until = time.monotonic() + GRACE_S
        self._take_passed()
        while self._pending and time.monotonic() < until:
            time.sleep(GRACE_S / 100)
            self._take_passed()

    def close(self) -> None:
        self._over.set()
        self._stretch()
        super().close()
        if self._nvtx:
            # A rank ends without its process' exit handlers: the profiler writes now what it still holds.
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def _stretch(self) -> None:
        anchor = _anchor()  # anew each time: an event's distance to it is a 32-bit float
        with self._reading:
            before, self._anchor = self._anchor, anchor
            ns_per_ms = _ns_per_ms(before, anchor)
            while self._pending:
                self._record(self._pending.popleft(), before, ns_per_ms)
            self._ns_per_ms = _ns_per_ms(self._first, anchor)

    def _watch(self) -> None:
        """In a thread of its own: the rank's own may be waiting for the GPU."""
        while not self._over.wait(ANCHOR_S):
            if time.monotonic_ns() - self._anchor.host_ns > PATIENCE_S * 1e9:
                self._take_passed()

    def _take_passed(self) -> None:
        """Records what the GPU has passed, as far as it answers: after a failed kernel it does not."""
        with self._reading, suppress(RuntimeError):
            while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
                self._record(self._pending.popleft(), self._anchor, self._ns_per_ms)

    def _record(self, span: Pending, anchor: Anchor, ns_per_ms: float) -> None:
        start_ns, end_ns = (
            anchor.host_ns + int(anchor.event.elapsed_time(event) * ns_per_ms) for event in (span.start, span.end)
        )
        self.record(span.name, start_ns, end_ns, span.micro_batch, span.peer, span.chunk, span.iteration)
        self._spare += (span.start, span.end)


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
    with Wait("all that its GPU has to do"):
        torch.cuda.synchronize()
    readings = []
    for _ in range(READINGS):
        event, before = _event(), time.monotonic_ns()
        event.record()
        torch.cuda.synchronize()
        after = time.monotonic_ns()
        readings.append((after - before, Anchor(event, (before + after) // 2)))
    return min(readings, key=lambda reading: reading[0])[1]


def _ns_per_ms(first: Anchor, last: Anchor) -> float:
    """Nanoseconds of the host's clock in a millisecond of the GPU's."""
    ms = first.event.elapsed_time(last.event)
    return (last.host_ns - first.host_ns) / ms if ms > 0 else 1e6


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
