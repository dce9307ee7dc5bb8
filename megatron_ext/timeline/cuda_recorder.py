"""The timeline of a rank on a GPU: CUDA events mark when its kernels ran, and nothing waits for them.

A GPU's clock is not the host's: both are read at an anchor, about once a second, and what lies between two anchors is
stretched to fit, so that clocks of different speed do not drift apart. An anchor is an event on a stream of its own,
which has nothing else to do: the GPU passes it at once, whatever the other streams are at, and the host, which asks
until it has, knows when to within half of the time between its last two questions. If it takes too long, as where
CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue, there is no anchor this time. So only the first and the
last anchor wait for the GPU. A rank that hangs takes no anchors: a thread records what the GPU has passed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import Deque, Iterator, List, NamedTuple, Optional, Union

import torch

from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.progress import Wait
from megatron_ext.timeline.recorder import Recorder, UnderWay

READINGS = 5
"""Readings of both clocks at an anchor, of which the most precise counts."""
ASKING_NS = 1_000_000
"""So long the host asks whether the GPU has passed an anchor's event; usually it takes some 20 us."""
ANCHOR_S = 1.0
"""Between two anchors at least."""
GRACE_S = 0.1
"""So long a failed rank's GPU may go on with what is queued; the rank's message waits for it."""
PATIENCE_S = 2.0
"""After so long without an anchor the thread takes what the GPU has passed."""


class Anchor:
    """A moment on both clocks, and how fast the GPU's runs from there on."""

    def __init__(self, event: torch.cuda.Event, host_ns: int) -> None:
        self.event = event
        self.host_ns = host_ns
        self.ns_per_ms = 1e6
        """Nanoseconds of the host's clock in a millisecond of the GPU's."""

    def rate(self, later: Anchor) -> float:
        """`ns_per_ms` between two anchors."""
        ms = self.event.elapsed_time(later.event)
        return (later.host_ns - self.host_ns) / ms if ms > 0 else 1e6


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
        self._pending: Deque[Union[Pending, Anchor]] = deque()
        """In the order of the host; the spans behind an anchor are measured from it."""
        self._spare: List[torch.cuda.Event] = []
        """Events that have been read: to make one anew for each span takes longer."""
        self._clock_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._first = self._anchor = self._newest = self._anchor_at_rest()
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
        """Turns the marks that the GPU has passed into times; not more often than `ANCHOR_S`."""
        if time.monotonic_ns() - self._newest.host_ns >= ANCHOR_S * 1e9:
            anchor = self._sampled(ASKING_NS)
            with self._reading:
                if anchor is not None:
                    self._add(anchor)
                self._record_passed()

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
        anchor = self._anchor_at_rest()
        with self._reading:
            self._add(anchor)
            self._record_passed()
        super().close()
        if self._nvtx:
            # A rank ends without its process' exit handlers: the profiler writes now what it still holds.
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def _watch(self) -> None:
        """Watches in a thread of its own: the rank's own may be waiting for the GPU."""
        while not self._over.wait(ANCHOR_S):
            if time.monotonic_ns() - self._newest.host_ns > PATIENCE_S * 1e9:
                self._take_passed()

    def _take_passed(self) -> None:
        """Records what the GPU has passed, as far as it answers: after a failed kernel it does not."""
        with self._reading, suppress(RuntimeError):
            self._record_passed()

    def _add(self, anchor: Anchor) -> None:
        """What is marked from now on is measured from there, since an event's distance is a 32-bit float; what was
        marked since the anchor before is stretched between the two."""
        self._newest.ns_per_ms = self._newest.rate(anchor)
        anchor.ns_per_ms = self._first.rate(anchor)
        self._newest = anchor
        self._pending.append(anchor)

    def _record_passed(self) -> None:
        while self._pending:
            span = self._pending[0]
            if isinstance(span, Anchor):
                self._anchor = span
            elif span.end.query():  # type: ignore[no-untyped-call]
                start_ns, end_ns = (
                    self._anchor.host_ns + int(self._anchor.event.elapsed_time(event) * self._anchor.ns_per_ms)
                    for event in (span.start, span.end)
                )
                self.record(span.name, start_ns, end_ns, span.micro_batch, span.peer, span.chunk, span.iteration)
                self._spare += (span.start, span.end)
            else:
                break
            self._pending.popleft()

    def _anchor_at_rest(self) -> Anchor:
        """One that waits for all that the GPU has to do."""
        with Wait("all that its GPU has to do"):
            torch.cuda.synchronize()
            anchor = self._sampled(math.inf)
        assert anchor is not None
        return anchor

    def _sampled(self, asking_ns: float) -> Optional[Anchor]:
        """The most precise of several readings; None if one takes longer than `asking_ns`."""
        best, least = None, math.inf
        for _ in range(READINGS):
            event, lower = _event(), time.monotonic_ns()
            event.record(self._clock_stream)
            until = lower + asking_ns
            while True:
                asked = time.monotonic_ns()
                passed = event.query()  # type: ignore[no-untyped-call]
                upper = time.monotonic_ns()
                if passed:
                    break
                if upper > until:
                    return None
                lower = asked
            if upper - lower < least:
                best, least = Anchor(event, (lower + upper) // 2), upper - lower
        return best


class _Marked(UnderWay):
    """Ends where the computation has what was under way: when that ended before, nothing on the GPU tells."""

    def __init__(self, recorder: CudaRecorder, name: str, start: torch.cuda.Event) -> None:
        self._recorder = recorder
        self._name = name
        self._start = start

    def end(self) -> None:
        self._recorder.ended(self._name, self._start)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
