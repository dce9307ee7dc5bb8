"""Records what a rank does and when, at a cost that does not show (docs/formats.md, events).

A record is packed into memory, from which `megatron_ext.timeline.event_files` takes it to the rank's file.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, ContextManager, Iterator, Optional

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ext.contract import events
from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.usage import Traffic

_INDEX = {name: index for index, name in enumerate(events.NAMES)}
_PASSES = frozenset(
    ("forward-compute", "backward-compute", "backward-input-compute", "backward-weight-compute", "loss-compute")
)
_LARGEST_UNCERTAINTY_NS = 2**31 - 1


def begin_events(path: Path, plan: Plan, place: Place) -> None:
    """Begins the event file of a rank: everything up to the first record.

    A run that goes on starts it anew, for the clock may be another one; that of an earlier start moves to
    rank-*.1.bin, rank-*.2.bin and so on.
    """
    if path.exists():
        path.rename(next(old for n in count(1) if not (old := path.with_suffix(f".{n}.bin")).exists()))
    write_atomic(
        path,
        events.head(
            {
                "rank": place.rank,
                "stage": place.stage,
                "dp": place.dp,
                "tp": place.tp,
                "node": place.emulates or plan.nodes[place.node].name,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "names": events.NAMES,
                "monotonic_ns": time.monotonic_ns(),
                "unix_ns": time.time_ns(),
                "cores": usable_cores(),
                "load": os.getloadavg()[0],
            }
        ),
        durable=False,
    )


NOTHING = nullcontext()


class UnderWay:
    """What goes on beside the rank's work, such as an all-reduce that nothing waits for yet; recorded by a subclass."""

    def follow(self, work: Any) -> None:
        """Has the end noted when `work`, a message of torch.distributed, ends; else it is when `end` is called."""

    def end(self) -> None:
        """Records it."""


class Recorder:
    """Puts fixed-size records into the buffer of one rank; with no buffer it records nothing."""

    def __init__(self, buffer: Optional[EventBuffer]) -> None:
        self._buffer = buffer
        self.iteration = 0
        """Iteration that the next records belong to, from 1."""
        self.micro_batch = -1
        """That of the pass under way, which the communication inside it belongs to."""
        self.chunk = 0
        self.traffic = Traffic()
        self._cores: Optional[CoreWaits] = None
        self._in_passes_ns = 0

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        micro_batch: int = -1,
        peer: int = -1,
        chunk: int = 0,
        iteration: Optional[int] = None,
    ) -> None:
        """Notes one event, of the current iteration unless another one is given; times are `time.monotonic_ns`."""
        if self._buffer is not None:
            self._buffer.put(
                _INDEX[name],
                chunk,
                self.iteration if iteration is None else iteration,
                micro_batch,
                peer,
                start_ns,
                end_ns,
            )

    def span(self, name: str, micro_batch: int = -1, peer: int = -1, chunk: int = 0) -> ContextManager[None]:
        """Records the time that its block takes, if the block ends well."""
        if self._buffer is None:
            return NOTHING
        if name in _PASSES and self._cores is not None and self._cores.known:
            return _Pass(self, self._cores, _Span(self._buffer, _INDEX[name], chunk, self.iteration, micro_batch, peer))
        return _Span(self._buffer, _INDEX[name], chunk, self.iteration, micro_batch, peer)

    def inside(self, name: str) -> ContextManager[None]:
        """The same for a part of the pass under way; nothing before the first iteration, where a model warms up."""
        return self.span(name, self.micro_batch, chunk=self.chunk) if self.iteration else NOTHING

    def begin(self, name: str) -> UnderWay:
        """The begin of what goes on beside the rank's work."""
        return UnderWay() if self._buffer is None else _Timed(self, name)

    def clock(self, own_ns: int, rank0_ns: int, uncertainty_ns: int) -> None:
        """Notes that two clocks showed these times at one moment, give or take the uncertainty."""
        self.record(events.CLOCK, own_ns, rank0_ns, peer=min(uncertainty_ns, _LARGEST_UNCERTAINTY_NS))

    @contextmanager
    def iterates(self) -> Iterator[None]:
        """Notes how long this thread waits for a CPU core while its block, an iteration, lasts."""
        if self._buffer is not None and self._cores is None:
            self._cores = CoreWaits()
        cores = self._cores
        if cores is None or not cores.known:
            yield
            return
        self._in_passes_ns, before = 0, cores.ns()
        yield
        self.core_waits(cores.ns() - before, self._in_passes_ns)

    def core_waits(self, ns: int, in_passes_ns: int) -> None:
        """Notes waits for a CPU core in the current iteration: all of them, and those in passes."""
        end = time.monotonic_ns()
        self.record(events.CORE_WAIT, end - ns, end)
        self.record(events.CORE_WAIT_IN_PASSES, end - in_passes_ns, end)

    def passes(self, waited_ns: int) -> None:
        """Called after a pass that waited so long for a core."""
        self._in_passes_ns += waited_ns

    def flush(self) -> None:
        """Called between two iterations; puts into the buffer what is not there yet."""

    def abandon(self) -> None:
        """Called when the rank fails: as `flush`, but for what may never come it does not wait."""

    def close(self) -> None:
        """Called after the last event."""
        self.flush()
        self._buffer = None


class _Span:
    """A block whose time is recorded; a class of its own costs half of what `contextmanager` does."""

    __slots__ = ("_buffer", "_chunk", "_iteration", "_micro_batch", "_name", "_peer", "_start")

    def __init__(self, buffer: EventBuffer, name: int, chunk: int, iteration: int, micro_batch: int, peer: int) -> None:
        self._buffer = buffer
        self._name = name
        self._chunk = chunk
        self._iteration = iteration
        self._micro_batch = micro_batch
        self._peer = peer

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            end = time.monotonic_ns()
            self._buffer.put(self._name, self._chunk, self._iteration, self._micro_batch, self._peer, self._start, end)


class _Pass:
    """A pass, of which it is also noted how long it waited for a core; passes do not nest."""

    __slots__ = ("_before", "_cores", "_recorder", "_span")

    def __init__(self, recorder: Recorder, cores: CoreWaits, span: _Span) -> None:
        self._recorder = recorder
        self._cores = cores
        self._span = span

    def __enter__(self) -> None:
        self._before = self._cores.ns()
        self._span.__enter__()

    def __exit__(self, failed: object, *more: object) -> None:
        self._span.__exit__(failed, *more)
        self._recorder.passes(self._cores.ns() - self._before)


class _Timed(UnderWay):
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._end_ns: Optional[int] = None
        self._start_ns = time.monotonic_ns()

    def follow(self, work: Any) -> None:
        work.get_future().add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self._end_ns = time.monotonic_ns()  # and no more: this is a thread of the library's

    def end(self) -> None:
        end_ns = self._end_ns
        self._recorder.record(self._name, self._start_ns, time.monotonic_ns() if end_ns is None else end_ns)


_COUNTS = "/proc/thread-self/schedstat"
"""proc(5): ns on a core, ns ready but waiting for one, time slices."""


class CoreWaits:
    """Counts the waits of the thread that makes it."""

    def __init__(self) -> None:
        try:
            self._file: Optional[int] = os.open(_COUNTS, os.O_RDONLY | os.O_CLOEXEC)
            self.ns()
        except (OSError, IndexError, ValueError):  # a kernel that does not count
            self._file = None

    def ns(self) -> int:
        """How long it has been ready but waiting for a core, since it began; 0 where the kernel keeps no count."""
        return 0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1])

    def close(self) -> None:
        """Has `ns` give 0 from now on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def known(self) -> bool:
        return self._file is not None


def traced(plan: Plan, place: Place, iteration: int) -> ContextManager[None]:
    """Around an iteration: traces the one that the plan names, on the first rank of each stage.

    Under Nsight Systems, which a GPU can report to while torch does not, the first rank of each node marks it instead:
    the profiler captures all ranks of the node from its first mark to the next.
    """
    if iteration != plan.trace_iteration:
        return nullcontext()
    if plan.nsys and plan.device == "cuda":
        return _captured() if place.local_rank == 0 else nullcontext()
    return nullcontext() if place.dp or place.tp else _traced(plan, place, iteration)


@contextmanager
def _captured() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextmanager
def _traced(plan: Plan, place: Place, iteration: int) -> Iterator[None]:
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (plan.device == "cuda")
    with profile(activities=kinds) as found:
        yield
        if plan.device == "cuda":
            torch.cuda.synchronize()  # what the host has begun belongs to the iteration
    path = plan.files.rank_trace(place.rank, iteration)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")  # the ending says that it is compressed
    found.export_chrome_trace(str(partial))
    partial.replace(path)
