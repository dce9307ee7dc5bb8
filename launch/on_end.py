"""python -m launch.on_end RUN: tells that a run has ended, if it has. The agent of its last node starts this."""

from __future__ import annotations

import sys
from pathlib import Path

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.control.notify import notify_end

if __name__ == "__main__":
    try:
        notify_end(RunDir(Path(sys.argv[1])))
    except TdppError as error:
        sys.exit(f"the run's end could not be reported: {error}")
