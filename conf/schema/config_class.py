"""How a class of the configuration is declared."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


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
