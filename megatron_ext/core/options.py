"""`engine.options`: fields of the installed megatron.core's TransformerConfig, by their names and types there."""

from __future__ import annotations

import types
from difflib import get_close_matches
from enum import Enum
from typing import Any, Collection, Dict, Literal, Mapping, Union, get_args, get_origin, get_type_hints

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.rules.engine import LATENT

_MAY_BE_NULL = ("q_lora_rank",)
"""What megatron.core reads as absent, although its type has no null."""
_VALUES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
}
"""Values of options of which megatron.core reads every other name as none of these."""
_SIMPLE = (bool, int, float, str, type(None))
_UNIONS = (Union, getattr(types, "UnionType", Union))


def checked(
    options: Mapping[str, object], config: Any, fixed: Mapping[str, Any], latent: Collection[str]
) -> Dict[str, object]:
    """Returns the options as `config` takes them. `fixed` is what the plan says, and `latent` are the fields that
    there are with multi-latent attention.

    Raises:
        EngineError: there is no such field, or the plan says it, or it takes another type.
    """
    hints, found = get_type_hints(config), {}
    for name, value in options.items():
        shown = f"engine.options.{name}={'null' if value is None else value}"
        if name not in hints and name in latent:
            raise EngineError(f"{shown} needs engine.options.{LATENT}=true")
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            meant = f"did you mean {near[0]}?" if near else "see the fields of its TransformerConfig"
            raise EngineError(f"{shown}: this megatron-core has no such option; {meant}")
        if name in fixed:
            raise EngineError(f"{shown}: the plan says {name}={fixed[name]}, from keys of tdpp; leave it out")
        known = _VALUES.get(name)
        if known is not None and any(one not in known for one in (value if isinstance(value, list) else [value])):
            raise EngineError(f"{shown} must be {' or '.join(known)}")
        found[name] = None if value is None and name in _MAY_BE_NULL else _typed(shown, value, hints[name])
    return found


def _typed(shown: str, value: object, hint: Any) -> object:
    """Returns a value as a field of this type takes it. A whole number is a number, too, and a name stands for what an
    Enum has. Nothing stands for other types, such as functions."""
    kinds = get_args(hint) if get_origin(hint) in _UNIONS else (hint,)
    for kind in kinds:
        of = get_origin(kind) or kind
        if of is Literal and isinstance(value, str) and value in get_args(kind):
            return value
        if _is_enum(kind) and value in kind.__members__:
            return kind[value]
        if of in (list, tuple) and isinstance(value, list):
            return of(value)
        if of in _SIMPLE and (type(value) is of or (of is float and type(value) is int)):
            return value
    raise EngineError(f"{shown} must be of the type {' or '.join(map(_words, kinds))}")


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if kind is type(None):
        return "null"
    if _is_enum(kind):
        return " or ".join(kind.__members__)
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
