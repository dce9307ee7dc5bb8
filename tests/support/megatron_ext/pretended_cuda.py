"""What of `torch.cuda` the engine uses, for pretended GPUs: as strict as CUDA, and with the same signatures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.support.megatron_ext.pretended_tensors import Gpus

MEMORY = {"memory_allocated": 3, "max_memory_allocated": 5, "memory_reserved": 7, "max_memory_reserved": 11}
"""MiB."""


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.waited = False
        """Whether it has waited for an event: then it may use all that there is, for nobody counts what that was."""

    def wait_event(self, event: Any) -> None:
        self.waited = True


class Cuda:
    """The doubles by their names below `torch.cuda`."""

    def __init__(self, gpus: Gpus, parent: int | None) -> None:
        """`parent` is the process that forks the ranks, and may not use CUDA before."""
        self._gpus = gpus
        self._parent = parent
        self._synchronised = 0
        """Which record of an event was the last that the host has waited for."""
        self._recorded = 0
        self._ranges: list[str] = []
        self.doubles: dict[str, Any] = {
            "Event": self._event_class(),
            "Stream": Stream,
            "stream": self._stream_class(),
            "current_stream": lambda device=None: Stream(),
            "synchronize": self.synchronize,
            "device_count": lambda: gpus.count,
            "set_device": self.set_device,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            **{name: self._memory(mib) for name, mib in MEMORY.items()},
            "nccl.version": lambda: (2, 21, 5),
            "nvtx.range_push": self.range_push,
            "nvtx.range_pop": self.range_pop,
            "profiler.start": self.start,
            "profiler.stop": self.stop,
        }

    def checked(self, name: str) -> Any:
        """The double, which refuses to be used in `parent`."""
        double = self.doubles[name]
        if isinstance(double, type):
            return double

        def call(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._parent:
                raise RuntimeError(f"torch.cuda.{name} in the process that forks the ranks")
            return double(*args, **kwargs)

        return call

    def synchronize(self, device: Any = None) -> None:
        self._synchronised = self._recorded

    def set_device(self, device: Any) -> None:
        self._gpus.current = self._gpus.device(device).index

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._gpus.device("cuda" if device is None else device)

    def _memory(self, mib: int) -> Callable[..., int]:
        def measured(device: Any = None) -> int:
            self._gpus.device("cuda" if device is None else device)
            return mib * 2**20

        return measured

    def range_push(self, msg: str) -> int:
        self._ranges.append(msg)
        return len(self._ranges) - 1

    def range_pop(self) -> int:
        if not self._ranges:
            raise RuntimeError("range_pop without a range_push")
        self._ranges.pop()
        return len(self._ranges)

    def start(self) -> None:
        if self._ranges:
            raise RuntimeError(f"the profiler starts within the ranges {self._ranges}")
        if self._synchronised < self._recorded:
            raise RuntimeError("the profiler starts while the GPU is at work")

    def stop(self) -> None:
        if self._ranges:
            raise RuntimeError(f"the profiler stops within the ranges {self._ranges}")

    def _stream_class(cuda) -> type:
        class StreamContext:
            """Of the streams only the usual one is not `aside`."""

            def __init__(self, stream: Stream) -> None:
                self._stream = stream

            def __enter__(self) -> None:
                assert cuda._gpus.aside is None, "a stream within another one"
                if not self._stream.waited:
                    cuda._gpus.aside = []

            def __exit__(self, *_: object) -> None:
                cuda._gpus.aside = None

        return StreamContext

    def _event_class(cuda) -> type:
        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
                self._timing = enable_timing
                self._number: int | None = None
                self._ns = 0
                self._asked = False

            def record(self, stream: Any = None) -> None:
                cuda._recorded += 1
                self._number, self._ns = cuda._recorded, time.monotonic_ns()

            def query(self) -> bool:
                """As if the GPU were a little behind: only who asks again, or has waited, sees that it has passed."""
                before, self._asked = self._asked, True
                if self._number is None or self._number <= cuda._synchronised:
                    return True
                if before:
                    cuda._synchronised = self._number
                return before

            def synchronize(self) -> None:
                if self._number is not None:
                    cuda._synchronised = max(cuda._synchronised, self._number)

            def elapsed_time(self, end_event: Event) -> float:
                """Milliseconds."""
                for event in (self, end_event):
                    if not event._timing or event._number is None:
                        raise RuntimeError("CUDA error: invalid resource handle")
                    if event._number > cuda._synchronised:
                        raise RuntimeError("CUDA error: device not ready")
                return (end_event._ns - self._ns) / 1e6

        return Event


def resolve(name: str) -> tuple[Any, str]:
    """Where below `torch.cuda` a name lies: the module or class, and the last part of the name."""
    *path, last = name.split(".")
    holder: Any = torch.cuda
    for part in path:
        holder = getattr(holder, part)
    return holder, last
