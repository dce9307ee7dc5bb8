"""Whose a run is, and what another user may do with it: root may stop it, and nobody else can go on with it."""

from __future__ import annotations

import os
import pwd
import stat

from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError


def owner_of(run: RunDir) -> int:
    """The id of the user who started the run: its jobs and processes are that user's."""
    return run.path.stat().st_uid


def has_rights_of(user: int) -> bool:
    """Whether this process sees and ends what is that user's."""
    return os.geteuid() in (0, user)


def check_may_stop(run: RunDir) -> None:
    """Raises LaunchError unless this user can end the run's jobs and processes."""
    owner = owner_of(run)
    if not has_rights_of(owner):
        raise LaunchError(
            f"{run.path}: the run belongs to {name_of(owner)}, and user {name_of(os.geteuid())} cannot end its "
            f"processes; only {' or '.join(dict.fromkeys([name_of(owner), 'root']))} can stop it"
        )


def check_may_resume(run: RunDir) -> None:
    """Raises LaunchError unless the run is this user's own: what root starts would be root's, in another's folder."""
    owner, user = owner_of(run), os.geteuid()
    if owner == user:
        return
    way_out = f"start a run of your own with train.load={run.path} to continue from its checkpoint"
    if user == 0:
        way_out = f"use 'runuser -u {name_of(owner)} -- tdpp launch resume={run.path}', or {way_out}"
    raise LaunchError(
        f"resume={run.name}: the run belongs to {name_of(owner)}, but its jobs would run as user "
        f"{name_of(user)}; {way_out}"
    )


def other_writers(mode: int) -> str | None:
    """Who may write to a file or folder beside its owner, by its mode; None if nobody may."""
    if mode & stat.S_IWOTH:
        return "everybody"
    return "its group" if mode & stat.S_IWGRP else None


def name_of(user: int) -> str:
    """A user id that has no name, as in some containers, is given as a number."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
