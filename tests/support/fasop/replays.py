"""What a replay of a schedule is compared by."""

from __future__ import annotations

from collections.abc import Sequence

from fasop.simulation.ranks.replay import Event


def pipeline_time(events: Sequence[Event]) -> float:
    """From the start of the iteration to the end of its last action."""
    return max(event.end for event in events)
