"""Where in Python each rank of a node is, also one that hangs: asked for by a signal, and written to shared memory.

Python's faulthandler writes the stacks from the signal's own handler, so a rank needs not come back from a library to
do so. It does nothing until it is asked, and then takes about a millisecond.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

SIGNAL = signal.SIGUSR1
MOST_FRAMES = 24
MOST_BYTES = 1 << 18
QUIET_S = 0.01
"""A stack is whole once nothing was written for this long."""
PATIENCE_S = 0.1
"""A process that waits for a disk or a driver answers no signal."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_file: Optional[int] = None


class Stacks:
    """Made before the ranks are forked; each writes to its own file in memory, this process reads all of them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._files = {rank: os.memfd_create(f"stacks-{rank}") for rank in ranks}

    def take(self, rank: int) -> None:
        """Has this process, a rank, write its stacks when it is asked, or when it is killed by a fault of its own."""
        answer_to(self._files[rank])

    def ask(self, rank: int, pid: int) -> Dict[str, Any]:
        """Where a rank, or a process that prepares its samples, is now.

        Returns:
            `at`, the innermost line that no library has: of the rank, or where that one waits in tdpp's own code, of
            what prepares its samples; and `stack`, the frames from the innermost on. Both are empty where nothing
            answers.
        """
        file, texts = self._files[rank], []
        for one in filter(_catches, (pid, *_children(pid))):
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)  # the rank and what it has forked share the position
            with suppress(ProcessLookupError):
                os.kill(one, SIGNAL)
            texts.append(self._written(file))
        return located(texts)

    def fault(self, rank: int) -> str:
        """Where a rank was that a fault of its own has killed; empty where it was not."""
        text = os.pread(self._files[rank], MOST_BYTES, 0).decode("utf-8", "replace")
        return str(located([text])["at"]) if "Fatal Python error" in text else ""

    def _written(self, file: int) -> str:
        """Waits until a process has written, and returns what."""
        size, changed = 0, time.monotonic()
        until = changed + PATIENCE_S
        while time.monotonic() < until and not (size and time.monotonic() - changed > QUIET_S):
            time.sleep(QUIET_S / 4)
            if os.fstat(file).st_size != size:
                size, changed = os.fstat(file).st_size, time.monotonic()
        return os.pread(file, MOST_BYTES, 0).decode("utf-8", "replace")


def answer_to(file: int) -> None:
    """Has this process write its stacks to a file when it is asked."""
    global _file
    _file = file
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable(file=file, all_threads=True)


def own_file() -> Optional[int]:
    """The file that this process answers to; None where nobody asks."""
    return _file


def _children(pid: int) -> List[int]:
    """Processes that a rank has forked, such as those that prepare its samples."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return list(map(int, found))


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (SIGNAL - 1) & 1)
    return False


def located(texts: Sequence[str]) -> Dict[str, Any]:
    """What faulthandler has written of a rank and then of its processes, as `Stacks.ask` returns it.

    A process's main thread comes last in its text.
    """
    mains: List[List[str]] = []
    others: List[List[str]] = []
    for text in texts:
        threads: List[List[str]] = []
        for line in text.splitlines():
            if line.endswith("(most recent call first):"):
                threads.append([])
            elif threads and (found := _FRAME.fullmatch(line)) is not None:
                threads[-1].append(f"{found[1]}:{found[2]} {found[3]}")
        threads = [stack for stack in threads if stack]
        mains += threads[-1:]
        others += threads[:-1]
    libraries = (*_LIBRARIES, "<frozen")
    of_programs = [
        ([frame for frame in stack if not frame.startswith(libraries)], stack) for stack in (*mains, *others)
    ]
    own = [(frames[0], stack) for frames, stack in of_programs if frames]
    at, stack = next((pair for pair in own if not pair[0].startswith(_OURS)), own[0] if own else ("", []))
    return {"at": at.rpartition("/")[2], "stack": (stack or (mains or [[]])[0])[:MOST_FRAMES]}
