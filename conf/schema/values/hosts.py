"""Hosts without Slurm, as `executor.hosts` names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import ConfigError

MOST_RANKS = 1024
"""Of a host, as of a node of a cluster."""
_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*):(?:(?P<ranks>[0-9]{1,6})|gpu(?P<gpus>[0-9]{1,4}(?:\+[0-9]{1,4})*))"
)


@dataclass(frozen=True)
class Host:
    """A node of the plan."""

    name: str
    """By which ssh reaches it."""
    ranks: int
    gpus: tuple[int, ...] | None = None
    """Numbers of the GPUs that its ranks use, in their order; None for the first ones."""

    @classmethod
    def parse(cls, text: str, key: str) -> Host:
        """From `NAME:RANKS`, or `NAME:gpu0+3`, which `key` has.

        Raises:
            ConfigError: it is neither.
        """
        found = _HOST.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{key}: {text!r} is not a host; write NAME:RANKS, such as a:2, or NAME:gpu0+3 for exact "
                "GPUs. NAME is a name for ssh; put a user, a port or a key into ~/.ssh/config"
            )
        if found["gpus"] is None:
            ranks = int(found["ranks"])
            if not 1 <= ranks <= MOST_RANKS:
                raise ConfigError(f"{key}: {text!r}: a host runs 1 to {MOST_RANKS} ranks")
            return cls(found["name"], ranks)
        gpus = tuple(map(int, found["gpus"].split("+")))
        if len(set(gpus)) < len(gpus):
            raise ConfigError(f"{key}: {text!r} names a GPU twice; each rank needs its own GPU")
        return cls(found["name"], len(gpus), gpus)


def hosts(texts: Sequence[str], key: str = "executor.hosts") -> tuple[Host, ...]:
    """All of them; raises ConfigError for one that is none, or is named twice."""
    found = tuple(Host.parse(text, key) for text in texts)
    names = [host.name for host in found]
    for name in names:
        if names.count(name) > 1:
            ranks = sum(host.ranks for host in found if host.name == name)
            raise ConfigError(f"{key} names {name} twice; give all its ranks at once, such as {name}:{ranks}")
    return found
