"""The signals by which a node agent is told something."""

from __future__ import annotations

import signal
from types import FrameType


class Told:
    """Remembers the signals that ask this process to end, or to save first."""

    def __init__(self) -> None:
        self.end: signal.Signals | None = None
        self.save = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        # By it submitit and Slurm announce the end; submitit's own handler would not know of the run's other nodes.
        signal.signal(signal.SIGUSR2, self._note_save)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.end = self.end or signal.Signals(signum)

    def _note_save(self, _signum: int, _: FrameType | None) -> None:
        self.save = True
