"""How many bytes tensors take at once that take none: on torch's device meta, as a GPU's allocator would give them."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROUNDED = 512
"""Bytes of which every piece of memory is a multiple (c10/cuda/CUDACachingAllocator.cpp)."""
WIDEST_HEAD = 256
"""Up to which FlashAttention computes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
MASK_MULTIPLE = 16
"""Numbers of a mask's row, of which efficient attention has a multiple (aten/…/transformers/attention.cpp)."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes note, while it is entered, of the storages that operators make, and of the most there are at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are there."""
        self.part = 0
        """To which what is made belongs from now on."""
        self.peaks: Dict[int, int] = {}
        """The most that is there at once in each part since `begin`."""
        self.work: Dict[int, List[int]] = {}
        """Operations of each part, bytes that kernels read and write, and kernels."""
        self._storages: Dict[int, Any] = {}

    def begin(self, part: int) -> None:
        """Has what follows belong to another part."""
        self.part = part
        self.peaks[part] = max(self.now, self.peaks.get(part, 0))

    def kept(self) -> Dict[int, int]:
        """Bytes that are there, by the part that made them."""
        found: Dict[int, int] = {}
        for _, size, part in self._storages.values():
            found[part] = found.get(part, 0) + size
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _known_by_shape(func, args, kwargs)
        out = func(*args, **kwargs) if found is None else found
        taken = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        given = {id(one.untyped_storage()) for one in taken}
        made = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor)]
        made = [one for one in made if one.is_meta and id(one.untyped_storage()) not in given]
        for one in made:
            self._note(one.untyped_storage())
        if made:
            work = self.work.setdefault(self.part, [0, 0, 0])
            formula = flop_registry.get(func.overloadpacket)
            work[0] += formula(*args, **kwargs, out_val=out) if formula is not None else 0
            work[1] += sum(one.nbytes for one in (*taken, *made))
            work[2] += 1
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages or not storage.nbytes():
            return
        size = -(-storage.nbytes() // ROUNDED) * ROUNDED
        self._storages[key] = weakref.ref(storage, lambda _: self._gone(key)), size, self.part
        self.now += size
        self.peaks[self.part] = max(self.now, self.peaks.get(self.part, 0))

    def _gone(self, key: int) -> None:
        self.now -= self._storages.pop(key)[1]


def _known_by_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """What operators give that torch does not compute on the device meta: they ask for content, such as whether all
    positions follow each other, which is so."""
    if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
        dtype = args[0].dtype
        return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
    if func is torch.ops.aten._grouped_mm.default:
        left, right = args[:2]
        if left.dim() == right.dim() == 2:
            offsets: List[Any] = [*args[2:3], *[kwargs[key] for key in ("offs",) if key in kwargs]]
            return left.new_empty(len(offsets[0]), left.shape[0], right.shape[-1])
        return left.new_empty(*left.shape[:-1], right.shape[-1])
    return None


_USUAL = F.scaled_dot_product_attention


@contextmanager
def attention_as_on_gpu() -> Iterator[None]:
    """Has attention keep what the kernel keeps that torch takes on a GPU, while the block lasts.

    A backward pass that computes again calls it, too, in which torch asks no mode for its functions.
    """
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _USUAL


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend by FlashAttention without a mask in 16 bits; else by efficient attention, or by products and a softmax
    where these cannot."""
    width, multiple = query.shape[-1], 4 if query.dtype == torch.float32 else 8
    if attn_mask is None and query.dtype != torch.float32 and max(width, value.shape[-1]) <= WIDEST_HEAD:
        return _flash(query, key, value, dropout_p, is_causal)
    grouped = query.shape[1] != key.shape[1]
    if not grouped and width % multiple == 0 and value.shape[-1] % multiple == 0:
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal)
    return _USUAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool) -> Tensor:
    width = value.shape[-1]
    if lacking := -query.shape[-1] % 8:
        query, key, value = (F.pad(one, (0, lacking)) for one in (query, key, value))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal)[0]
    return out[..., :width]


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], dropout: float, causal: bool
) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, 0.0)
        if lacking := -mask.shape[-1] % MASK_MULTIPLE:
            mask = F.pad(mask, (0, lacking))[..., : key.shape[-2]]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    found = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, dropout, causal)
    return found[0]
