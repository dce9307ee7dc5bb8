"""How a class of the configuration is declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass that Hydra may still compose.

    OmegaConf makes every node of a frozen class read-only before the YAML files and overrides are merged
    into it, so nothing can be set (hydra issue 724). It looks at the flag, Python at the methods: clearing
    the flag lets Hydra compose, and the objects stay frozen.
    """
    frozen = dataclass(kw_only=True, frozen=True)(cls)
    frozen.__dataclass_params__.frozen = False  # type: ignore[attr-defined]
    return frozen
