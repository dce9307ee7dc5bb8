"""The names of the schedules in sentences and tables."""

from __future__ import annotations

from conf.schema.values.schedules import Schedule


def schedule_name(key: str) -> str:
    """The label of a schedule's key. An unknown key, as of a log that does not name the schedule, stays as it is."""
    return Schedule(key).label if key in {*Schedule} else key
