"""Documents that share a sequence without seeing each other. Their positions, which restart, say where each begins."""

from __future__ import annotations

import threading
from functools import lru_cache
from importlib import import_module
from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")

CAUSAL = (-1, 0)
"""Windows of attention: all tokens before, none behind."""


class _Latest(threading.local):
    """What was worked out of one micro-batch, for all layers. Threads may have their own."""

    positions: Optional[Tensor] = None

    def __init__(self) -> None:
        self.found: Dict[str, Any] = {}

    def of(self, positions: Tensor, name: str, make: Callable[[Tensor], T]) -> T:
        if self.positions is not positions:
            self.positions, self.found = positions, {}
        if name not in self.found:
            self.found[name] = make(positions)
        found: T = self.found[name]
        return found


_LATEST = _Latest()


def seen(positions: Tensor) -> Tensor:
    """positions [batch, sequence] -> [batch, 1, sequence, tokens]: whether a place attends to a token: one of its own
    document, and not behind it."""
    return _LATEST.of(positions, "seen", _seen)


@lru_cache(maxsize=None)
def _varlen_attn() -> Any:
    """Return torch's attention over documents of different lengths; None where torch is older than 2.10. Its import
    brings torch's compiler, so it waits until it is needed."""
    try:
        return import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None


def attends_apart(query: Tensor) -> bool:
    """Whether torch has attention over documents of different lengths for queries like these."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and _varlen_attn() is not None


def attend_apart(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """query [batch, heads, sequence, width], the others [batch, groups, sequence, width] -> [batch, sequence, heads,
    width], without the pairs of tokens that do not see each other."""
    ends, longest = _LATEST.of(positions, "ends", _ends)
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    found: Tensor = _varlen_attn()(*rows, ends, ends, longest, longest, window_size=CAUSAL, enable_gqa=grouped)
    return found.view(query.shape[0], -1, *found.shape[1:])


def _seen(positions: Tensor) -> Tensor:
    document = (positions == 0).cumsum(-1)
    own = document[:, None, :, None] == document[:, None, None, :]
    places = torch.arange(positions.shape[-1], device=positions.device)
    return own & (places <= places[:, None])


def _ends(positions: Tensor) -> Tuple[Tensor, int]:
    """Where documents begin in the row of all tokens, with its end, and how long the longest is."""
    begins = (positions.flatten() == 0).nonzero().flatten().int()
    return F.pad(begins, (0, 1), value=positions.numel()), positions.shape[-1]
