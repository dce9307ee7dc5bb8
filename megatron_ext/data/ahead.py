"""Samples that take long to prepare, such as images: other processes prepare the next ones while a rank computes.

What a micro-batch holds follows from its samples' numbers alone, so it is the same whoever prepares it. The rank says
which micro-batches it will take next. One that it did not announce, as after a change of the batch, is prepared when it
is asked for; one that it no longer wants is dropped.

A helper is forked from the rank and writes to memory that both share. That memory is anonymous: `/dev/shm`, which
torch's DataLoader needs, has 64 MiB in many containers. A thread of the rank copies it out, for a GPU to pinned memory,
so that the next micro-batch can be written while this one waits for its turn.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import signal
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.worker import die_with_parent
from megatron_ext.data.samples import Samples
from megatron_ext.timeline.stacks import SIGNAL, own_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_HELPERS = 16
"""Helpers of a rank, at most. With RandAugment they prepare some 3,000 images of 224 x 224 a second, as many as a GPU
of 2025 takes."""
SMALLEST = 2**16
"""Bytes of a micro-batch for which a helper pays; handing it over costs some 0.2 ms."""
LIMIT = 2**31
"""Bytes that a rank's prepared micro-batches take, unless two take more; and again what its helpers write to."""
_ALIGNED = 64
_INDEX = struct.Struct("<q")
_Key = Tuple[int, bytes]
"""A micro-batch: which of the known samples, and their numbers."""


def helpers_of(plan: Plan, place: Place) -> int:
    """The usable cores divided among the node's ranks, less the one that the rank itself needs.

    A rank on a GPU has at least one helper, for its own core has little to do while the GPU computes.
    """
    spare = usable_cores() // len(plan.nodes[place.node].ranks) - 1
    return min(MOST_HELPERS, max(spare, int(plan.device == "cuda")))


class Ahead:
    """The helpers of a rank, started with its second micro-batch: the first one tells how large they are."""

    def __init__(self, helpers: int, device: torch.device) -> None:
        """Micro-batches for a GPU are in memory from which it takes them without waiting."""
        self._most = helpers
        self._device = device
        self._room = 0
        """Bytes that a helper can write."""
        self._largest = 0
        """Bytes of a micro-batch so far."""
        self._helpers: List[_Helper] = []
        self._idle: SimpleQueue[_Helper] = SimpleQueue()
        self._threads: Optional[ThreadPoolExecutor] = None
        self._held: Dict[_Key, Future[Optional[Dict[str, Tensor]]]] = {}
        """Prepared, or under way."""
        self._known: List[Samples] = []
        """Those that helpers have been forked with, the training's and the evaluation's."""

    @property
    def helps(self) -> bool:
        """Whether it pays to take micro-batches from here, as far as that is known."""
        return self._most > 0 and (not self._largest or self._largest >= SMALLEST)

    def take(
        self, samples: Samples, numbers: NDArray[np.int64], coming: Iterable[NDArray[np.int64]]
    ) -> Iterator[Dict[str, Tensor]]:
        """What each micro-batch holds, of samples with these `numbers` [micro-batches, samples of each]. Those that are
        `coming`, in their order and perhaps without end, are prepared meanwhile.

        Raises:
            DataError: as `samples.batch`.
            EngineError: a helper was killed.
        """
        own, is_new = len(numbers), samples not in self._known
        if is_new:
            self._known.append(samples)
        if not self._largest:
            yield self._taken(samples, numbers[0])
            numbers = numbers[1:]
        if self.helps and (is_new or self._largest > self._room):
            self._start()
        wanted = chain(numbers, _inside(coming, len(samples)))
        announced = list(islice(wanted, self._announced(own)))
        of = self._known.index(samples)
        keys = {(of, each.tobytes()) for each in announced}
        for key in [key for key in self._held if key[0] == of and key not in keys]:
            self._held.pop(key).cancel()
        for each in announced:
            self._announce(samples, each)
        for each in numbers:
            yield self._taken(samples, each)
            for following in islice(wanted, 1):
                self._announce(samples, following)

    def close(self) -> None:
        """Ends the helpers, once they have prepared what is under way; the rest of what was announced is dropped."""
        self._held = {key: future for key, future in self._held.items() if not future.cancel()}
        if self._threads is not None:
            self._threads.shutdown()
        for helper in self._helpers:
            helper.end()
        self._helpers, self._threads, self._idle = [], None, SimpleQueue()

    def _announced(self, own: int) -> int:
        """Micro-batches that are prepared ahead; a rank takes `own` of them in an iteration."""
        if not self._helpers:
            return 0
        return max(2, min(max(own, len(self._helpers) + 1), LIMIT // self._room))

    def _start(self) -> None:
        """Or once more, for larger micro-batches or other samples."""
        self.close()
        count = min(self._most, max(1, LIMIT // self._largest))
        self._room = self._largest
        self._helpers = [_Helper(self._room, self._known) for _ in range(count)]
        for helper in self._helpers:
            self._idle.put(helper)
        on_gpu = self._device.type == "cuda"
        own_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
        self._threads = ThreadPoolExecutor(count, "ahead", own_gpu)

    def _announce(self, samples: Samples, numbers: NDArray[np.int64]) -> None:
        key = self._known.index(samples), numbers.tobytes()
        if self._threads is not None and key not in self._held:
            self._held[key] = self._threads.submit(self._helped, key)

    def _taken(self, samples: Samples, numbers: NDArray[np.int64]) -> Dict[str, Tensor]:
        under_way = self._held.pop((self._known.index(samples), numbers.tobytes()), None)
        prepared = None if under_way is None else under_way.result()
        if prepared is not None:
            return prepared
        held = samples.batch(numbers)
        self._largest = max(self._largest, _bytes_of(held))
        return {name: torch.from_numpy(array) for name, array in held.items()}

    def _helped(self, key: _Key) -> Optional[Dict[str, Tensor]]:
        """In a thread of its own. None: the rank prepares it, because it is too large, or to raise what a helper met
        as if there were no helper."""
        helper = self._idle.get()
        try:
            written = helper.ask(key, self._known[key[0]])
            pinned = self._device.type == "cuda"
            return None if written is None else {one.name: one.copied(helper.shared, pinned) for one in written}
        finally:
            self._idle.put(helper)


class _Written(NamedTuple):
    """An array in the memory that a helper shares."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    start: int

    def copied(self, shared: mmap.mmap, pinned: bool) -> Tensor:
        count = math.prod(self.shape)
        there = torch.from_numpy(np.frombuffer(shared, self.dtype, count, self.start).reshape(self.shape))
        return torch.empty(self.shape, dtype=there.dtype, pin_memory=pinned).copy_(there)


class _Helper:
    """A process that prepares one micro-batch at a time. It ends with the thread that makes it, however that ends."""

    def __init__(self, room: int, known: Sequence[Samples]) -> None:
        self.shared = mmap.mmap(-1, room)
        self._ours, theirs = Pipe()
        rank = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _serve(theirs, self.shared, known, rank)
        theirs.close()

    def ask(self, key: _Key, samples: Samples) -> Optional[List[_Written]]:
        """What it has written to the memory that it shares; None: it could not. Raises EngineError: the helper is
        gone."""
        try:
            self._ours.send_bytes(_INDEX.pack(key[0]) + key[1])
            written = json.loads(self._ours.recv_bytes())
        except (EOFError, OSError) as error:
            numbers = np.frombuffer(key[1], np.int64)
            raise EngineError(f"{samples.source}: {self._gone(numbers)}") from error
        return None if written is None else [_Written(*one) for one in written]

    def end(self) -> None:
        """At once."""
        self._ours.close()
        with suppress(ProcessLookupError, ChildProcessError):  # `_gone` has seen it end
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _gone(self, numbers: NDArray[np.int64]) -> str:
        what = f"the process that prepared samples {numbers.min()} to {numbers.max()}"
        try:
            status = os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            return f"{what} had ended before"
        if not os.WIFSIGNALED(status):
            return f"{what} ended with exit code {os.WEXITSTATUS(status)}"
        signum = os.WTERMSIG(status)
        why = {
            signal.SIGBUS: "; the file is shorter than when it was opened, or cannot be read any more",
            signal.SIGKILL: ": by somebody, or by the kernel because memory ran out",
        }.get(signal.Signals(signum), "")
        return f"{what} was killed by {signal.Signals(signum).name}{why}"


def _serve(asked: Connection, shared: mmap.mmap, known: Sequence[Samples], rank: int) -> NoReturn:
    """All that a helper does, until its rank is gone."""
    try:
        die_with_parent(signal.SIGKILL)
        stacks = own_file()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, *([SIGNAL] if stacks is None else [])):
            signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to every process; the rank decides
        gc.freeze()  # a collection would write to, and so copy, all memory that it shares with the rank
        _close_all_but(asked.fileno(), *([] if stacks is None else [stacks]))
        while os.getppid() == rank:
            key = asked.recv_bytes()
            samples, numbers = known[_INDEX.unpack_from(key)[0]], np.frombuffer(key, np.int64, offset=_INDEX.size)
            asked.send_bytes(json.dumps(_written(samples, numbers, shared)).encode())
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    """The rank's files and connections, which others are to see closed as soon as it dies; not the standard ones."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in kept:
            with suppress(OSError):  # that of the listing
                os.close(number)


def _written(samples: Samples, numbers: NDArray[np.int64], shared: mmap.mmap) -> Optional[List[_Written]]:
    """What is in `shared` now; None: they are too large for it, or cannot be prepared."""
    try:
        held = samples.batch(numbers)
    except Exception:  # noqa: BLE001  (the rank meets the same, and reports it)
        return None
    if _bytes_of(held) > len(shared):
        return None
    start, written = 0, []
    for name, array in held.items():
        np.frombuffer(shared, array.dtype, array.size, start).reshape(array.shape)[...] = array
        written.append(_Written(name, array.dtype.str, array.shape, start))
        start += _aligned(array.nbytes)
    return written


def _inside(coming: Iterable[NDArray[np.int64]], count: int) -> Iterator[NDArray[np.int64]]:
    """Until the first that has a sample which is not there."""
    for numbers in coming:
        if numbers.max() >= count:
            return
        yield numbers


def _bytes_of(held: Dict[str, NDArray[Any]]) -> int:
    return sum(_aligned(array.nbytes) for array in held.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
