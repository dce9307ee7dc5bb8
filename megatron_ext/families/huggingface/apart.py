"""Whether the layers of a model of transformers keep documents that share a sequence apart."""

from __future__ import annotations

import inspect
from typing import Any, Callable, List

import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.anatomy import Anatomy
from megatron_ext.families.huggingface.library import POSITIONS, WAYS, Headed
from megatron_ext.tasks.task import SEQUENCE

TOKENS = 8
"""Tokens of two documents by which a layer is tried."""


def require_positions(model: nn.Module, name: str) -> None:
    """Raises EngineError for a model that does not take positions."""
    if POSITIONS not in inspect.signature(model.forward).parameters and not isinstance(model, Headed):
        raise EngineError(
            f"data.packing=true: {name} takes no positions, by which documents that share a sample are kept apart; "
            "leave data.packing out"
        )


def way_of(anatomy: Anatomy, number: int, weight: Tensor, passed: Callable[..., Any]) -> int:
    """The way in which a layer keeps documents apart: no document changes what the one behind it gives.

    `passed` is its forward pass, of hidden states, what comes over wires, and `way`; `weight` is one of its own.

    Raises:
        EngineError: in every way it does not.
    """
    half = TOKENS // 2
    source = torch.Generator().manual_seed(0)
    at = anatomy.hidden.dims.index(SEQUENCE)
    x, other = (torch.randn(_shape(anatomy.hidden.dims), generator=source).to(weight) for _ in range(2))
    other = torch.cat([other.narrow(at, 0, half), x.narrow(at, half, half)], at)
    taken: List[Tensor] = [torch.arange(half, device=weight.device).repeat(2)[None]]
    if anatomy.by_tokens:
        taken.insert(0, torch.zeros_like(taken[0]))
    for one in anatomy.crossing[number]:
        taken.append(torch.ones(_shape(one.wire.dims), dtype=one.wire.dtype or weight.dtype, device=weight.device))
    for way in range(WAYS):
        try:
            with torch.no_grad():
                found = [passed(given, *taken, way=way) for given in (x, other)]
        except Exception:  # noqa: BLE001  (as the family's own code fails with what it does not take)
            continue
        behind = [(out[0] if isinstance(out, tuple) else out).narrow(at, half, half) for out in found]
        if torch.allclose(behind[0], behind[1], 1e-4, 1e-5):
            return way
    raise EngineError(
        f"data.packing=true: in a layer of {anatomy.name} documents that share a sample would see each other; "
        "leave data.packing out"
    )


def _shape(dims: Any) -> List[int]:
    return [TOKENS if one == SEQUENCE else 1 if isinstance(one, str) else one for one in dims]
