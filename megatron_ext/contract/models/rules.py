"""What a model's keys have to do with each other and with its family, for a user's configuration and for plan.json."""

from __future__ import annotations

from typing import Iterator

from megatron_ext.contract.keys import Get, shown
from megatron_ext.contract.models.keys import ROTARY
from megatron_ext.contract.models.model import OPTIONS, Family, families_with


def broken_by_model(get: Get, family: Family) -> Iterator[str]:
    """Every rule that a model of this family breaks, as a message; each key alone is known to be right.

    Args:
        get: the value of a key of `model`, or what it is to be where there is none.
    """
    yield from _broken_options(get, family)
    if family.user_code:
        return
    of_family = f"model.family={family.name}"
    for key in family.needs:
        if get(key, None) is None:
            yield f"model.{key} is not set, but {of_family} needs it; give model.{key}=…"
    if family.counts_all:
        return
    if family.one_head:
        heads, layers = get("heads", 1), get("layers", family.fewest_layers)
        if heads != 1:
            yield f"model.heads={heads}: {family.one_head}; use 1"
        if layers < family.fewest_layers:
            yield f"model.layers={layers}: {family.why_layers}; use {family.fewest_layers} or more"
    yield from _broken_positions(get, family)
    yield from _broken_window(get)


def _broken_options(get: Get, family: Family) -> Iterator[str]:
    """Options that say nothing with this family."""
    of_family = f"model.family={family.name}"
    for key, default in OPTIONS.items():
        value, families = get(key, default), families_with(key)
        if value == default:
            continue
        if families and key not in family.options:
            *others, last = families
            whose = f"{', '.join(others)} or {last}" if others else last
            yield (
                f"model.{key}={shown(value)} is only for model.family={whose}, not for {of_family}; leave it out, or "
                f"use model.{key}={shown(default)}"
            )
        if family.one_head and key in family.without:
            yield f"model.{key}={shown(value)} is for transformers, not for {of_family}; leave it out"


def _broken_window(get: Get) -> Iterator[str]:
    every = get("full_attention_every", None)
    if every is not None and get("sliding_window", None) is None:
        yield f"model.full_attention_every={every} says nothing without model.sliding_window; set that, or leave it out"

    base = get("sliding_rotary_base", None)
    if base is not None and get("sliding_window", None) is None:
        yield f"model.sliding_rotary_base={base:g} says nothing without model.sliding_window; set that, or leave it out"
    if get("geglu", False) and not get("swiglu", False):
        yield "model.geglu=true says nothing without model.swiglu=true, the gate; set that, or leave it out"


def _broken_positions(get: Get, family: Family) -> Iterator[str]:
    key = "position_embedding_type"
    positions, width, scaling = get(key, OPTIONS[key]), get("kv_channels", None), get("rope_scaling_factor", None)
    percent = get("rotary_percent", 1.0)
    if positions not in family.positions:
        yield (
            f"model.{key}={positions} cannot be combined with model.family={family.name}; use "
            f"{' or '.join(family.positions)}"
        )
    if positions != ROTARY:
        if scaling is not None:
            yield (
                f"model.rope_scaling_factor={scaling} is only for model.{key}=rope, not for {positions}; use null, or "
                "rope"
            )
        if (base := get("sliding_rotary_base", None)) is not None:
            yield f"model.sliding_rotary_base={base:g} is only for model.{key}=rope, not for {positions}; leave it out"
        if percent != 1.0:
            yield f"model.rotary_percent={percent} is only for model.{key}=rope, not for {positions}; use 1.0, or rope"
        return
    if width is not None and width % 2:
        yield (
            f"model.kv_channels={width} is odd, but model.{key}=rope rotates pairs of numbers; use {width + 1}, or "
            "another even number"
        )
    hidden, heads = get("hidden", 0), get("heads", 1)
    if width is None and heads and not hidden % heads and hidden // heads % 2:
        yield (
            f"model.hidden={hidden} and model.heads={heads} give heads of width {hidden // heads}, but "
            f"model.{key}=rope rotates pairs of numbers; choose sizes whose ratio is even"
        )
    whole = width or (hidden // heads if heads else 0)
    rotated = int(whole * percent)
    if percent != 1.0 and whole and (rotated % 2 or not rotated):
        yield (
            f"model.rotary_percent={percent} rotates {rotated} of a head's {whole} numbers, but model.{key}=rope "
            f"rotates pairs of them; use {2 * max(1, rotated // 2) / whole:g}, or another even number of them"
        )
