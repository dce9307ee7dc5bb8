"""What is asked of several hosts at the same time. Whoever only looks at runs imports this, and so nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from launch.errors import LaunchError
from launch.machine import ssh
from launch.node.worker_command import GRACE_S

AT_ONCE = 32
"""Connections."""
One = TypeVar("One")
Answer = TypeVar("Answer")


def end(
    names: Iterable[str], token: str, container: str, grace_s: float = GRACE_S
) -> tuple[int, dict[str, LaunchError]]:
    """Ends what is left of a run on hosts: how many processes that were, and why some hosts could not be asked.

    `container` is the kind that its workers are in."""
    failed: dict[str, LaunchError] = {}

    def ask(name: str) -> int:
        try:
            return int(ssh.call(name, "end", {"token": token, "grace_s": grace_s, "container": container})["ended"])
        except LaunchError as error:
            failed[name] = error
            return 0

    return sum(of_each(list(names), ask)), failed


def of_each(them: Sequence[One], ask: Callable[[One], Answer]) -> list[Answer]:
    """What each of them says, all asked at once; of several errors the first one's is raised, when all are done."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(ask, one) for one in them]
    return [future.result() for future in futures]
