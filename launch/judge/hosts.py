"""The names that machines have for themselves and Slurm, beside those that the plan gives its nodes."""

from __future__ import annotations

import re

from launch.observe.observation import Kind, Observation


class HostNames:
    """Says of each node of a run on which host it is: `node gpu2-1` becomes `node gpu2-1 on gpu2-002`.

    A run on one machine alone needs no such words.
    """

    def __init__(self, seen: Observation) -> None:
        remote = seen.kind in (Kind.slurm, Kind.hosts)
        self._hosts = {node.name: node.host for node in seen.nodes if remote and node.host not in (None, node.name)}
        names = "|".join(sorted(map(re.escape, self._hosts), key=len, reverse=True))
        self._node = re.compile(rf"\bnode ({names})(?![\w-])(?! on )") if names else None

    def beside(self, text: str) -> str:
        """The text, with the host behind each node that it names."""
        return text if self._node is None else self._node.sub(self._named, text)

    def _named(self, found: re.Match[str]) -> str:
        """What says the host next anyway stays as it is."""
        said = found.string.startswith(f": {self._hosts[found[1]]} ", found.end())
        return found[0] if said else f"node {self.of(found[1])}"

    def of(self, node: str) -> str:
        """`gpu2-1 on gpu2-002`, or the node's name alone."""
        host = self._hosts.get(node)
        return node if host is None else f"{node} on {host}"
