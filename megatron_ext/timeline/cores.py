"""How long a rank waits for a CPU core.

On a machine with more ranks or other processes than cores, these waits are inside of the rank's events, where they look
like slow work.
"""

from __future__ import annotations

import os
from typing import Optional

_COUNTS = "/proc/thread-self/schedstat"
"""proc(5): ns on a core, ns ready but waiting for one, time slices."""


class CoreWaits:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        try:
            self._file: Optional[int] = os.open(_COUNTS, os.O_RDONLY | os.O_CLOEXEC)
            self.ns()
        except (OSError, IndexError, ValueError):  # a kernel that does not count
            self._file = None

    def ns(self) -> int:
        """How long it has been ready but waiting for a core, since it began; 0 where the kernel keeps no count."""
        return 0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1])

    @property
    def known(self) -> bool:
        return self._file is not None
