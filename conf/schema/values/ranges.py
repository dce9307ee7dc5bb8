"""Whether the numbers of a configuration lie in the ranges of their keys, before anything is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conf.errors import ConfigError
from megatron_ext.contract.keys import Range, ranges_of

MOST_RANKS = 2**17
"""The most ranks of a plan."""
MOST_LAYERS = 10_000
"""The most layers of a model."""
MOST_NODES = 2**16
"""The most nodes of a group, and of a node order."""


def check(part: str, values: Any, without: Sequence[str] = ()) -> None:
    """Raises ConfigError for a number in `values` that lies outside its range; null, where it is allowed, does not.

    `part` is what a user calls these keys together, empty for those of the run. Keys `without` a range here are not
    checked.
    """
    for key, allowed in ranges_of(type(values)).items():
        value = getattr(values, key)
        if key not in without and isinstance(value, (int, float)):
            check_number(f"{part}.{key}" if part else key, value, allowed)


def check_number(key: str, value: float, allowed: Range) -> None:
    """Raises ConfigError where the value of a key lies outside its range."""
    if broken := allowed.broken_by(value):
        raise ConfigError(f"{key}={value} must be {broken}")


def divides(key: str, value: int, whole_key: str, whole: int) -> None:
    if whole % value:
        near = ", ".join(map(str, nearest_divisors(whole, value)))
        raise ConfigError(
            f"{whole_key}={whole} is not divisible by {key}={value}; nearest {key} that divide it: {near}"
        )


def nearest_divisors(whole: int, value: int) -> list[int]:
    """The largest divisor of `whole` below `value` and the smallest above, where they exist."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in divisors if d < value][-1:]
    above = [d for d in divisors if d > value][:1]
    return below + above
