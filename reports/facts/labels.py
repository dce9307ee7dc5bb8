"""Numbers of replicas as `parallel.shares` has them, written short."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema.values.partition import run_length_text
from megatron_ext.contract.parallel_config import Schedule

FEW = 4
"""So many are each written: 1-1 is read more easily than 1*2."""


def dashed(numbers: Sequence[int]) -> str:
    """3-1, or 16*8-11*4 of many."""
    return "-".join(map(str, numbers)) if len(numbers) <= FEW else run_length_text(numbers, "-")


def schedule_name(key: str) -> str:
    """The label of a schedule's key. An unknown key, as of a log that does not name the schedule, stays as it is."""
    return Schedule(key).label if key in {*Schedule} else key
