"""The signals that ask a node agent to end its node, or to save first."""

from __future__ import annotations

import signal
import time
from types import FrameType

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.files.records import Start, StopRecord


class StopSignals:
    """Remembers the signals that ask this process to end, or to save first."""

    end: signal.Signals | None = None
    end_unix: float | None = None
    save = False
    stop_saves = False
    """Whether it is who stops the run that wants it saved first, and says when that takes too long."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        # By it submitit and Slurm announce the end; submitit's own handler would not know of the run's other nodes.
        signal.signal(signal.SIGUSR2, self._note_save)

    def note_end(self, signum: int) -> None:
        """Counts only the first time."""
        if self.end is None:
            self.end, self.end_unix = signal.Signals(signum), time.time()

    def look_for_stop(self, run: RunDir) -> None:
        """Takes note of a request to stop the run, which may be to save first."""
        if not run.stop_request.exists():
            return
        try:
            request = run.read(run.stop_request, StopRecord)
        except RunFolderError:
            request = None
        if request is not None and request.saves:
            self.save = self.stop_saves = True
        else:
            self.note_end(signal.SIGTERM)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.note_end(signum)

    def _note_save(self, _signum: int, _: FrameType | None) -> None:
        self.save = True


def ask_all_to_save(run: RunDir, start: Start, node: str) -> None:
    """Has all nodes save and end, since a signal may have come to this one, or its job, alone."""
    request = run.save_request(str(start))
    if not request.exists():
        run.write_json(request, {"node": node, "unix": time.time()})
