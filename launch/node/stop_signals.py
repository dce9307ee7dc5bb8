"""The signals that ask a node agent to end its node, or to save first."""

from __future__ import annotations

import signal
import time
from types import FrameType

from conf.run_folder.rundir import RunDir
from launch.files.attempt import Start


class StopSignals:
    """Remembers the signals that ask this process to end, or to save first."""

    end: signal.Signals | None = None
    end_unix: float | None = None
    save = False

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        # By it submitit and Slurm announce the end; submitit's own handler would not know of the run's other nodes.
        signal.signal(signal.SIGUSR2, self._note_save)

    def note_end(self, signum: int) -> None:
        """Counts only the first time."""
        if self.end is None:
            self.end, self.end_unix = signal.Signals(signum), time.time()

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.note_end(signum)

    def _note_save(self, _signum: int, _: FrameType | None) -> None:
        self.save = True


def ask_all_to_save(run: RunDir, start: Start, node: str) -> None:
    """Has all nodes save and end, since a signal may have come to this one, or its job, alone."""
    request = run.save_request(str(start))
    if not request.exists():
        run.write_json(request, {"node": node, "unix": time.time()})
