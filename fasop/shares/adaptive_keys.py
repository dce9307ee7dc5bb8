"""What a configuration of JABAS says of a batch that adapts, as the keys of a run (docs/adaptive.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.schema.adapt import Adapt, Rule
from fasop.errors import SearchError
from fasop.shares.json_files import number_in, object_in, shown, whole_in

LOWER, UPPER, TARGET = OF_JABAS = ("batch_size_lower_bound", "batch_size_upper_bound", "similarity_target")
"""JABAS takes these together."""
RATE, INTERVAL = "batch_size_adjust_rate", "batch_size_adjust_interval"


def adaptive_words(file: Path, global_batch_size: int) -> list[str]:
    """`adapt`'s of a run that starts with this batch; none of a configuration of IIDP, or where `enable_adjust` is
    false. Raises SearchError: a value cannot be read, or breaks a rule of `adapt`."""
    content = object_in(file)
    if LOWER not in content or not _adjusts(file, content):
        return []
    metric = content.get("metric", str(Rule.similarity))
    if metric != Rule.similarity:
        raise SearchError(f"{file}: metric={shown(metric)} must be {Rule.similarity}")
    lower, upper = (whole_in(file, key, content[key]) for key in (LOWER, UPPER))
    if not lower <= global_batch_size <= upper:
        raise SearchError(
            f"parallel.global_batch_size={global_batch_size}, the first batch of a run, must lie between {LOWER}="
            f"{lower} and {UPPER}={upper} of {file}; use one of these, or change the bounds"
        )
    values = {
        "rule": Rule.similarity,
        "target": number_in(file, TARGET, content[TARGET]),
        "lower": None if lower == global_batch_size else lower,
        "upper": upper,
        "rate": number_in(file, RATE, content[RATE]) if RATE in content else None,
        "every": whole_in(file, INTERVAL, content[INTERVAL]) if INTERVAL in content else None,
    }
    given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    try:
        Adapt(**given)
    except ConfigError as error:
        raise SearchError(f"{file}: {error}") from error
    return [f"adapt.{key}={value}" for key, value in given.items()]


def _adjusts(file: Path, content: Mapping[str, Any]) -> bool:
    value = content.get("enable_adjust", True)
    text = str(value).lower()
    if text not in ("true", "false"):
        raise SearchError(f"{file}: enable_adjust={shown(value)} must be true or false")
    return text == "true"
