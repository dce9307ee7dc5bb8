"""Nodes whose agents give no sign of life, before Slurm or the other nodes have said what became of them."""

from __future__ import annotations

from launch.files.node_state import REQUEUED
from launch.node.peers import SILENCE_S
from launch.observe.observation import Kind, Node, Observation

NOTED_S = 10.0
"""From then on it is said; an agent writes every two seconds, on a busy file system less often."""


def silent_s(node: Node, seen: Observation) -> float | None:
    """For how long a node at work has shown no life; None for no longer than is usual.

    As long as the run logs iterations all of its nodes live, whatever the clock of one of them says.
    """
    if seen.kind not in (Kind.slurm, Kind.hosts) or node.ended or not node.alive or node.unseen is not None:
        return None
    if node.state in ("absent", REQUEUED):
        return None
    logged = seen.log[-1].unix if seen.log else 0.0
    silence = seen.now_unix - max(node.seen_unix, logged)
    return silence if silence > NOTED_S else None


def silent_nodes(seen: Observation) -> list[tuple[float, Node]]:
    """Those that may be lost, the longest silence first: silent for `SILENCE_S`, or for less where ranks already lost
    others."""
    least = NOTED_S if any(error.symptom for error in seen.errors) else SILENCE_S
    found = [(silence, node) for node in seen.nodes if (silence := silent_s(node, seen)) is not None]
    return sorted([pair for pair in found if pair[0] > least], key=lambda pair: -pair[0])
