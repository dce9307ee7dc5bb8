"""How a class of the configuration is declared, and whether its numbers lie in the ranges of their keys."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from conf.errors import ConfigError
from megatron_ext.contract.keys import Range, ranges_of

T = TypeVar("T")
MISSING: Any = "???"
"""The value of a key that must be given, as OmegaConf spells it."""
MOST_LAYERS = 10_000
"""The most layers of a model."""
MOST_NODES = 2**16
"""The most nodes of a group, and of a node order."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that Hydra may still compose.

    OmegaConf makes every node of a frozen class read-only before the YAML files and overrides are merged
    into it, so nothing can be set (hydra issue 724). It looks at the flag, Python at the methods: clearing
    the flag lets Hydra compose, and the objects stay frozen. Where a class declares inherited keys again and adds
    others, its own stand first, in its order.
    """
    frozen = dataclass(kw_only=True, frozen=True)(cls)
    frozen.__dataclass_params__.frozen = False  # type: ignore[attr-defined]
    own, inherited = inspect.get_annotations(cls), {key for base in cls.__bases__ for key in _keys(base)}
    if own.keys() & inherited and own.keys() - inherited:
        keys = _keys(frozen)
        frozen.__dataclass_fields__ = {name: keys[name] for name in (*own, *keys)}  # type: ignore[attr-defined]
    return frozen


def _keys(cls: type) -> dict[str, Any]:
    return getattr(cls, "__dataclass_fields__", {})


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
