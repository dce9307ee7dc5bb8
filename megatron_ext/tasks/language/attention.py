"""The core of attention, in the way that suits the device: torch's own, as it is defined, or with weights dropped."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from importlib import import_module
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_ext.parallel.fused import Fused, fuses
from megatron_ext.tasks.dropout import dropout, masked

T = TypeVar("T")

# Documents that share a sequence do not see each other. Their positions, which restart, say where each begins.
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
        return self.found[name]


_LATEST = _Latest()


def apart(positions: Tensor) -> Tensor:
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


PLAIN_TOKENS = 512
"""See `_plainly`."""
GROUPED = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
"""Whether torch's attention shares heads of keys and values itself, since 2.5: on a GPU they are then not repeated."""

WIDEST = 256
"""Heads that `dropped_flash` takes: a block of their tokens has room in a GPU's shared memory."""

TRITON = 3
"""The first version whose products can be told how precise they are to be."""


class Dropped(NamedTuple):
    """Which weights are dropped."""

    rate: float
    rows: Tensor
    """[batch, heads, sequence], by `rows_of`."""
    holding: bool
    """What `holds_weights` says."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Optional[Tensor],
    dropped: Optional[Dropped],
    positions: Optional[Tensor] = None,
    window: Optional[int] = None,
    cap: Optional[float] = None,
) -> Tensor:
    """query [batch, heads, sequence, width], the others [batch, groups, tokens, width] -> [batch, sequence, heads,
    width]. `mask` [batch, tokens] is 0 where no token stands. With `positions` [batch, sequence], of causal attention,
    documents that share a sequence do not see each other. With a `window`, of causal attention too, a place attends to
    so many tokens at most, itself among them. `cap` is the scores' soft cap, for which all of them are held at once."""
    heads, groups = query.shape[1], key.shape[1]
    plain = cap is not None or _plainly(query)
    if positions is not None and dropped is None and window is None and cap is None and attends_apart(query):
        return attend_apart(query, key, value, positions)
    seen = None if mask is None else mask.bool()
    if dropped is not None and not dropped.holding:
        from megatron_ext.tasks.language.dropped_flash import dropped_flash

        return dropped_flash(query, key, value, seen, causal, dropped.rate, dropped.rows)
    shared: Dict[str, bool] = {}
    if groups < heads and dropped is None and cap is None and GROUPED and query.is_cuda:
        shared["enable_gqa"] = True
    elif groups < heads:
        key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    seen = None if seen is None else seen[:, None, None]
    if positions is not None:
        causal, seen = False, apart(positions)
    if window is not None:
        near = _near(query.shape[-2], window, query.device)
        causal, seen = False, near if seen is None else seen & near
    if dropped is not None:
        products = query @ key.transpose(-1, -2)
        attended = _dropped_weights(products, query.shape[-1], causal, seen, *dropped[:2], cap) @ value
    elif plain:
        attended = _weights(query, key, causal, seen, cap) @ value
    else:
        attended = F.scaled_dot_product_attention(query, key, value, seen, is_causal=causal, **shared)
    return attended.transpose(1, 2)


@lru_cache(maxsize=8)
def _near(sequence: int, window: int, device: torch.device) -> Tensor:
    """[sequence, sequence]: whether a place attends to a token: itself, and the `window - 1` before it."""
    places = torch.arange(sequence, device=device)
    distance = places.unsqueeze(1) - places
    return (distance >= 0) & (distance < window)


@lru_cache(maxsize=None)
def holds_weights(device: torch.device, width: int) -> bool:
    """Whether attention with heads of this width, of which some weights are dropped, holds all of them: [batch, heads,
    sequence, tokens]. On a GPU it says so, once."""
    if device.type != "cuda" or not fuses(device):  # which has said so
        return True
    import triton

    reason = f"heads are wider than {WIDEST}" if width > WIDEST else ""
    if int(triton.__version__.split(".")[0]) < TRITON:
        reason = f"Triton {triton.__version__} is older than {TRITON}.0"
    if reason:
        print(f"attention dropout holds all weights of a layer's attention at once: {reason}", flush=True)
    return bool(reason)


def mean_weights(query: Tensor, key: Tensor, mask: Optional[Tensor]) -> Tensor:
    """query [batch, heads, sequence, width], key [batch, groups, tokens, width], mask [batch, tokens] -> the weights of
    attention [batch, sequence, tokens], as the mean of the heads."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return _weights(query, key, False, None if mask is None else mask.bool()[:, None, None]).float().mean(1)


def _plainly(query: Tensor) -> bool:
    """Whether attention is best computed as it is defined: where a CPU trains in 16 bits, the backward pass of torch's
    own takes up to ten times as long for sentences, and as long for `PLAIN_TOKENS`."""
    short = query.shape[-2] <= PLAIN_TOKENS
    return short and query.requires_grad and query.device.type == "cpu" and query.dtype != torch.float32


def _weights(query: Tensor, key: Tensor, causal: bool, seen: Optional[Tensor], cap: Optional[float] = None) -> Tensor:
    """query [batch, heads, sequence, width], key [batch, heads, tokens, width] -> how much each place attends to each
    token, [batch, heads, sequence, tokens]."""
    return _softmax(query @ key.transpose(-1, -2), query.shape[-1], causal, seen, cap)


def _softmax(products: Tensor, width: int, causal: bool, seen: Optional[Tensor], cap: Optional[float]) -> Tensor:
    """The products of queries and keys of this width -> the weights."""
    scores = products / math.sqrt(width)
    if cap is not None:
        scores = softly_capped(scores, cap)
    if causal:
        places = torch.arange(products.shape[-2], device=products.device)
        scores = scores.masked_fill(places > places.unsqueeze(-1), -math.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return F.softmax(scores, -1, dtype=torch.float32).to(products.dtype)


def softly_capped(x: Tensor, cap: float) -> Tensor:
    """Numbers within `cap` on either side of 0, small ones nearly as they are (Bello et al. 2016)."""
    return cap * torch.tanh(x / cap)


def _dropped_weights(
    products: Tensor,
    width: int,
    causal: bool,
    seen: Optional[Tensor],
    rate: float,
    rows: Tensor,
    cap: Optional[float],
) -> Tensor:
    """The same with some of the weights dropped; `rows` as for `dropout`."""
    if _dropped_softmax.fuses(products):
        return _dropped_softmax(products, width, causal, seen, rate, rows, cap)
    return dropout(_softmax(products, width, causal, seen, cap), rate, rows)


@Fused
def _dropped_softmax(
    products: Tensor,
    width: int,
    causal: bool,
    seen: Optional[Tensor],
    rate: float,
    rows: Tensor,
    cap: Optional[float],
) -> Tensor:
    return masked(_softmax(products, width, causal, seen, cap), rate, rows)
