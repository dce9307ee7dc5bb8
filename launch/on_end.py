"""python -m launch.on_end RUN [alarms]: tells that a run has ended, if it has, or with `alarms` what happens meanwhile.

The agent of the run's last node starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.control.alarms import notify_alarms
from launch.control.notify import notify_end

if __name__ == "__main__":
    try:
        tell = notify_alarms if sys.argv[2:] == ["alarms"] else notify_end
        tell(RunDir(Path(sys.argv[1])))
    except TdppError as error:
        sys.exit(f"the run's end could not be reported: {error}")
