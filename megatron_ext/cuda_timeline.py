"""The timeline of a rank on a GPU: CUDA events mark when its kernels ran, and nothing waits for them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import BinaryIO, Iterator, List, Tuple

import torch

from megatron_ext.timeline import Recorder


class CudaRecorder(Recorder):
    """Times are those of the GPU's stream, not of the host that fills it."""

    def __init__(self, file: BinaryIO, nvtx: bool) -> None:
        """`nvtx` also shows every span to NVIDIA's profilers, under the same name."""
        super().__init__(file)
        self._nvtx = nvtx
        self._spans: List[Tuple[str, int, int, int, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._anchor = self._drop_anchor()

    @contextmanager
    def span(self, name: str, micro_batch: int = -1, peer: int = -1, chunk: int = 0) -> Iterator[None]:
        """Records the time between the GPU's reaching the block's begin and its end."""
        start, end = _event(), _event()
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._spans.append((name, self.iteration, micro_batch, peer, chunk, start, end))

    def flush(self) -> None:
        """Turns the marks so far into times, once the GPU has passed them all, and writes them."""
        torch.cuda.synchronize()
        anchor, at = self._anchor
        for name, iteration, micro_batch, peer, chunk, start, end in self._spans:
            begun, ended = (at + int(anchor.elapsed_time(event) * 1e6) for event in (start, end))
            self._append(name, iteration, begun, ended, micro_batch, peer, chunk)
        self._spans.clear()
        self._anchor = self._drop_anchor()  # anew each time: an event's distance to it is a 32-bit float
        super().flush()

    def close(self) -> None:
        super().close()
        if self._nvtx:
            # A rank ends without its process' exit handlers: the profiler writes now what it still holds.
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    @staticmethod
    def _drop_anchor() -> Tuple[torch.cuda.Event, int]:
        """An event, and the host's clock when the GPU passed it."""
        event = _event()
        torch.cuda.synchronize()
        event.record()
        torch.cuda.synchronize()
        return event, time.monotonic_ns()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
