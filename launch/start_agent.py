"""python -m launch.start_agent FOLDER [group]: starts a task of a job with the agent that submitit pickled in FOLDER.

Who can write a pickle runs whatever he likes in the process that loads it. So this one is loaded only where nobody but
the user of the job can have written it, and what it lies in. Only the run's folder, around FOLDER, may be its group's
to write, where `group` (runs_mode=group) says that this was wanted.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.errors import LaunchError

PICKLED_S = 60.0
"""submitit gives the pickle its name when sbatch has named the job, which may start before that."""


def main(argv: Sequence[str]) -> int:
    from submitit.core.job_environment import JobEnvironment
    from submitit.core.submission import process_job

    folder = Path(argv[0])
    os.umask(os.umask(0o022) | 0o022)
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    pickled = JobEnvironment().paths.submitted_pickle
    until = time.monotonic() + PICKLED_S
    while not pickled.exists() and time.monotonic() < until:
        time.sleep(0.1)
    try:
        require_own(folder.parent, group=argv[1:] == ["group"])
        for path in (folder, pickled):
            require_own(path)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    process_job(folder)
    return 0


def require_own(path: Path, *, group: bool = False) -> None:
    """Raises LaunchError where somebody else owns `path`, or may write to it; with `group` its group may."""
    try:
        found = path.lstat()
    except OSError as error:
        raise LaunchError(f"{path}: the file that this job should start is missing ({error.strerror})") from error
    if stat.S_ISLNK(found.st_mode):
        why = "is a link"
    elif found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, not to {os.geteuid()}, whose job this is"
    elif found.st_mode & (0o002 if group else 0o022):
        why = f"can be written by others (mode {stat.S_IMODE(found.st_mode):03o})"
    else:
        return
    raise LaunchError(
        f"{path} {why}, so somebody else could have put code there; nothing was started. Check that it holds what you "
        f"launched, then remove others' write permission (chmod -R go-w), or launch again; with runs_mode=group the "
        f"group of a new run's folder may write there"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
