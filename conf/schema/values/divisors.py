"""Sizes that must divide others."""

from __future__ import annotations

from conf.errors import ConfigError


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
