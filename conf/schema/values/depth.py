"""`parallel.depth`: how many forward passes the stages of a PipeDream pipeline run ahead."""

from __future__ import annotations

import re
from dataclasses import replace

from conf.errors import ConfigError
from conf.visible import plural
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.stream_check import prove
from megatron_ext.contract.schedule.streams import TWO, Stream


def check_depth(stream: Stream) -> None:
    """Whether a stream comes to its end, and meets the weights that it is to meet.

    Raises:
        ConfigError: it does not.
    """
    stages = range(len(stream.replicas))
    depth = "" if stream.depth is None else "-".join(map(str, stream.depth))
    if stream.depth is not None and len(stream.depth) != len(stages):
        raise ConfigError(
            f"parallel.depth={depth} is for {plural(len(stream.depth), 'stage')}, but "
            f"parallel.pipeline={len(stages)}; give a number for each stage"
        )
    deepest = max(map(stream.ahead, stages))
    if stream.semantics == TWO and stream.update_every < deepest:
        raise ConfigError(
            f"parallel.update_every={stream.update_every} must be at least {deepest} with parallel.semantics=two, the "
            f"forward passes that a stage runs ahead; otherwise a pass would need a third version; use "
            f"parallel.update_every={deepest}, or parallel.semantics=stashing"
        )
    if stream.depth is None:  # proved for all by tests
        return
    usual = "-".join(str(replace(stream, depth=None).ahead(stage)) for stage in stages)
    try:
        prove(stream, 2 * stream.in_flight + 2 * stream.period)
    except EngineError as error:
        raise ConfigError(
            f"parallel.depth={depth} would deadlock ({error}); use parallel.depth={usual}, or less on later stages"
        ) from error


def depth_in(text: str) -> tuple[int, ...]:
    """The forward passes that each stage takes ahead.

    Raises:
        ConfigError: the text does not say that.
    """
    if not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})*", text):
        raise ConfigError(
            f"parallel.depth={text!r} is not a depth: join each stage's number of forward passes before its first "
            f"backward pass by dashes, such as 3-1-0"
        )
    return tuple(int(part) for part in text.split("-"))
