"""What the field calls the schedules, which have other keys."""

from __future__ import annotations

from conf.schema.parallel import Schedule

NAMES = {
    Schedule.gpipe: "GPipe",
    Schedule.one_f_one_b: "1F1B",
    Schedule.interleaved: "interleaved 1F1B",
    Schedule.zb_h1: "ZB-H1",
    Schedule.model_parallel: "model parallelism",
    Schedule.pipedream: "PipeDream",
}


def schedule_name(key: str) -> str:
    """Of a key; what is none, such as one that a log does not say, stays as it is."""
    return NAMES[Schedule(key)] if key in {*Schedule} else key
