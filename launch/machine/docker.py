"""docker: its command lines, and the end of containers. These outlive what started them, for they are its daemon's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from launch.machine.processes import captured

LABEL = "tdpp.run"
"""The label of a run's containers, whose value is its token."""
TIMEOUT_S = 60.0
_WITH_UMASK = 'umask "$0"; exec "$@"'
"""The daemon starts what it starts with a umask of its own."""


def run(
    image: str,
    command: Sequence[str],
    *,
    name: str,
    token: str,
    folder: Path,
    gpus: str | None,
    mounts: Sequence[str],
    variables: Sequence[str],
    umask: int,
) -> list[str]:
    """Runs a command in a new container as this user. `gpus` and `mounts` are values of their options.

    Variables go by their names alone: everybody on the node can read a command's words, but not its environment.

    The host's network, memory and processes are the container's, as with enroot: ranks of several nodes meet, NCCL
    finds its shared memory, and the agent finds the worker. The image's own entry point could be anything.
    """
    words = ["docker", "run", "--rm", "--pull=never", f"--name={name}", f"--label={LABEL}={token}"]
    words += ["--network=host", "--ipc=host", "--pid=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"]
    words += [f"--user={os.getuid()}:{os.getgid()}", *(f"--group-add={group}" for group in sorted(os.getgroups()))]
    words += [f"--workdir={folder}", *([] if gpus is None else [f"--gpus={gpus}"])]
    for mount in mounts:
        words += ["--mount", mount]
    for variable in variables:
        words += ["--env", variable]
    return [*words, "--entrypoint=sh", image, "-c", _WITH_UMASK, f"{umask:04o}", *command]


def pull(image: str) -> list[str]:
    """Brings an image that is not there."""
    return ["docker", "pull", "--quiet", image]


def image_id(image: str) -> list[str]:
    """Prints the ID of an image, sha256:…; fails where there is none."""
    return ["docker", "image", "inspect", "--format={{.Id}}", image]


def containers_of(token: str) -> list[str]:
    """Prints the ids of a run's containers, also of those that have ended."""
    return ["docker", "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={token}"]


def removal(*names: str) -> list[str]:
    """Ends containers, and removes them."""
    return ["docker", "rm", "--force", *names]


def remove(command: Sequence[str]) -> None:
    """Ends a container that may be gone already; a daemon that does not answer has to be looked after by its user."""
    _run(command)


def remove_all(token: str) -> int:
    """Ends all containers of a run on this machine; returns how many there were."""
    names = _run(containers_of(token)).split()
    if names:
        _run(removal(*names))
    return len(names)


def _run(command: Sequence[str]) -> str:
    try:
        return captured(command, TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
