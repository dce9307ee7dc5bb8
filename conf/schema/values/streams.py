"""Numbers of streams on a GPU (`parallel.streams`), and of forward passes that stages run ahead (`parallel.depth`)."""

from __future__ import annotations

import re
from dataclasses import replace

from conf.errors import ConfigError
from conf.schema.values.partition import numbers_in
from conf.visible import plural
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedule.stream_check import prove
from megatron_ext.contract.schedule.streams import TWO, Stream

AUTO = "auto"
"""A launch is to choose them."""
MOST = 64
"""Copies on one GPU."""


def by_replica(text: str | None, replicas: int) -> tuple[int, ...]:
    """The streams of each replica; where they are still to be chosen, 1 each.

    Raises:
        ConfigError: the text does not say that.
    """
    try:
        numbers = (1,) if text is None or text == AUTO else numbers_in(text)
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= MOST for number in numbers):
        raise ConfigError(
            f"parallel.streams={text} must be a number from 1 to {MOST}, or one for each replica, such as "
            "3-1 or 3*4-1*4, or auto"
        )
    if len(numbers) == 1:
        return numbers * replicas
    if len(numbers) != replicas:
        raise ConfigError(
            f"parallel.streams={text} is for {plural(len(numbers), 'replica')}, but parallel.data={replicas}; "
            "give one number, or one per replica"
        )
    return numbers


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
