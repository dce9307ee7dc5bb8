"""Attention that drops weights without ever holding them: FlashAttention-2 (Dao 2023) as kernels of Triton's, for GPUs.

torch's own flash attention draws what it drops from a generator, so that masks would change with the layout. Here they
are those of `megatron_ext.tasks.dropout`: a hash of the row, of which every kernel works out what it needs. One kernel
goes forward, and two go backward. Importing this module needs Triton.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron_ext.tasks.dropout import LEVELS


def dropped_flash(
    query: Tensor, key: Tensor, value: Tensor, seen: Optional[Tensor], causal: bool, rate: float, rows: Tensor
) -> Tensor:
    """query [batch, heads, sequence, width], key and value [batch, groups, tokens, width] -> [batch, sequence, heads,
    width].

    `seen` [batch, tokens] is False where no token stands; `rows` [batch, heads, sequence] is by `rows_of`.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _DroppedFlash.apply(query, key, value, seen, causal, rate, rows)  # type: ignore[no-untyped-call]


class _DroppedFlash(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Optional[Tensor],
        causal: bool,
        rate: float,
        rows: Tensor,
    ) -> Tensor:
        batch, heads, sequence, width = query.shape
        out = query.new_empty(batch, sequence, heads, width)
        log_sums = torch.empty(batch, heads, sequence, dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, seen, rows, out, log_sums)
        ctx.causal, ctx.rate = causal, rate
        given, blocks = _arguments(query, key, value, seen, causal, rate, rows)
        dropped_flash_forward[(triton.cdiv(sequence, blocks["M"]), batch * heads)](*given, log_sums, out, **blocks)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        query, key, value, seen, rows, out, log_sums = ctx.saved_tensors
        (batch, heads, sequence, _), (groups, tokens) = query.shape, key.shape[1:3]
        given, blocks = _arguments(query, key, value, seen, ctx.causal, ctx.rate, rows)
        gradient, shrunk = gradient.contiguous(), torch.empty_like(log_sums)
        of_query, of_key, of_value = (_alike(x) for x in (query, key, value))
        dropped_flash_backward_query[(triton.cdiv(sequence, blocks["M"]), batch * heads)](
            *given, log_sums, out, gradient, shrunk, of_query, **blocks
        )
        dropped_flash_backward_key_value[(triton.cdiv(tokens, blocks["N"]), batch * groups)](
            *given, log_sums, gradient, shrunk, of_key, of_value, **blocks
        )
        return *(x.transpose(1, 2) for x in (of_query, of_key, of_value)), None, None, None, None


def _alike(x: Tensor) -> Tensor:
    """[batch, heads, places, width] -> room for [batch, places, heads, width]."""
    batch, heads, places, width = x.shape
    return x.new_empty(batch, places, heads, width)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, seen: Optional[Tensor], causal: bool, rate: float, rows: Tensor
) -> Tuple[Tuple[Any, ...], Any]:
    """What all kernels take first, and how large their blocks are."""
    (_, heads, sequence, width), (groups, tokens) = query.shape, key.shape[1:3]
    strides = [stride for x in (query, key, value) for stride in x.stride()[:3]]
    dropped = round(rate * LEVELS)
    sizes = (heads, groups, sequence, tokens, width, 1 / math.sqrt(width), dropped, LEVELS / (LEVELS - dropped))
    wide = max(16, triton.next_power_of_2(width))
    side = 64 if wide <= (128 if query.element_size() == 2 else 64) else 32
    blocks = {
        **{"CAUSAL": causal, "SEEN": seen is not None, "M": side, "N": side, "D": wide},
        **{"PRECISION": "ieee", "num_warps": 8 if wide > 64 else 4, "num_stages": 2},
    }
    return (query, key, value, seen, rows, *strides, *sizes), blocks


LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _kept(hashes, columns, dropped):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Work out what is kept as `megatron_ext.tasks.dropout.masked` does: hashes [M] of rows, columns [N] -> [M, N]."""
    found = hashes.to(tl.uint32)[:, None] + ((columns // 2).to(tl.uint32) * 0x9E3779B9).to(tl.uint32)[None, :]
    found = ((found ^ (found >> 16)) * 0x7FEB352D).to(tl.uint32) + (hashes >> 32).to(tl.uint32)[:, None]
    found = ((found ^ (found >> 15)) * 0x846CA68B).to(tl.uint32)
    found = found ^ (found >> 16)
    half = (found >> ((columns % 2) * 16).to(tl.uint32)[None, :]) & 0xFFFF
    return (half ^ 0x8000).to(tl.int32) >= dropped


@triton.jit
def _scores(q, k, seen, places, columns, sequence, tokens, scale, CAUSAL, SEEN, PRECISION):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """[M, N], such that exp2 of them are the exponentials; -inf where a place does not look at a token."""
    allowed = (places < sequence)[:, None] & (columns < tokens)[None, :]
    if SEEN:
        allowed = allowed & (tl.load(seen + columns, mask=columns < tokens, other=0) != 0)[None, :]
    if CAUSAL:
        allowed = allowed & (columns[None, :] <= places[:, None])
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return tl.where(allowed, products * (scale * LOG2_E), float("-inf"))


@triton.jit
def _block(x, places, stride, count, width, D):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """[places, D], zeros outside."""
    dims = tl.arange(0, D)
    inside = (places < count)[:, None] & (dims < width)[None, :]
    return tl.load(x + places.to(tl.int64)[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _put(x, values, places, stride, count, width, D):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    dims = tl.arange(0, D)
    inside = (places < count)[:, None] & (dims < width)[None, :]
    tl.store(x + places.to(tl.int64)[:, None] * stride + dims[None, :], values.to(x.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def dropped_flash_forward(  # type: ignore[no-untyped-def]
    query, key, value, seen, rows, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,  # noqa: ANN001
    heads, groups, sequence, tokens, width, scale, dropped, grown, log_sums, out,  # noqa: ANN001
    CAUSAL: tl.constexpr, SEEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    number = tl.program_id(1).to(tl.int64)
    batch, head = number // heads, number % heads
    group = head // (heads // groups)
    places = tl.program_id(0) * M + tl.arange(0, M)
    q = _block(query + batch * q_b + head * q_h, places, q_s, sequence, width, D)
    hashes = tl.load(rows + number * sequence + places, mask=places < sequence, other=0)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    end = tokens
    if CAUSAL:
        end = tl.minimum(tokens, (tl.program_id(0) + 1) * M)
    for start in range(0, end, N):
        columns = start + tl.arange(0, N)
        k = _block(key + batch * k_b + group * k_h, columns, k_s, tokens, width, D)
        v = _block(value + batch * v_b + group * v_h, columns, v_s, tokens, width, D)
        scores = _scores(q, k, seen + batch * tokens if SEEN else seen, places, columns, sequence, tokens, scale,
                         CAUSAL, SEEN, PRECISION)
        higher = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        before = tl.exp2(highest - finite)
        total = total * before + tl.sum(weights, 1)
        weights = tl.where(_kept(hashes, columns, dropped), weights * grown, 0.0)
        sums = sums * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = higher
    _put(out + batch * sequence * heads * width + head * width, sums / total[:, None], places, heads * width,
         sequence, width, D)
    tl.store(log_sums + number * sequence + places, highest + tl.log2(total), mask=places < sequence)


@triton.jit  # type: ignore[untyped-decorator]
def dropped_flash_backward_query(  # type: ignore[no-untyped-def]
    query, key, value, seen, rows, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,  # noqa: ANN001
    heads, groups, sequence, tokens, width, scale, dropped, grown,  # noqa: ANN001
    log_sums, out, gradient, shrunk, of_query,  # noqa: ANN001
    CAUSAL: tl.constexpr, SEEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Leaves in `shrunk` [batch, heads, sequence] the sum of each weight times its gradient, for the other kernel."""
    number = tl.program_id(1).to(tl.int64)
    batch, head = number // heads, number % heads
    group = head // (heads // groups)
    here = batch * sequence * heads * width + head * width
    places = tl.program_id(0) * M + tl.arange(0, M)
    q = _block(query + batch * q_b + head * q_h, places, q_s, sequence, width, D)
    of_out = _block(gradient + here, places, heads * width, sequence, width, D)
    was = _block(out + here, places, heads * width, sequence, width, D)
    less = tl.sum(of_out.to(tl.float32) * was.to(tl.float32), 1)
    tl.store(shrunk + number * sequence + places, less, mask=places < sequence)
    hashes = tl.load(rows + number * sequence + places, mask=places < sequence, other=0)
    log_sum = tl.load(log_sums + number * sequence + places, mask=places < sequence, other=0.0)
    sums = tl.zeros([M, D], tl.float32)
    end = tokens
    if CAUSAL:
        end = tl.minimum(tokens, (tl.program_id(0) + 1) * M)
    for start in range(0, end, N):
        columns = start + tl.arange(0, N)
        k = _block(key + batch * k_b + group * k_h, columns, k_s, tokens, width, D)
        v = _block(value + batch * v_b + group * v_h, columns, v_s, tokens, width, D)
        scores = _scores(q, k, seen + batch * tokens if SEEN else seen, places, columns, sequence, tokens, scale,
                         CAUSAL, SEEN, PRECISION)
        weights = tl.exp2(scores - log_sum[:, None])
        of_weights = tl.dot(of_out, tl.trans(v), input_precision=PRECISION) * grown
        of_weights = tl.where(_kept(hashes, columns, dropped), of_weights, 0.0)
        of_scores = weights * (of_weights - less[:, None])
        sums += tl.dot(of_scores.to(k.dtype), k, input_precision=PRECISION)
    _put(of_query + here, sums * scale, places, heads * width, sequence, width, D)


@triton.jit  # type: ignore[untyped-decorator]
def dropped_flash_backward_key_value(  # type: ignore[no-untyped-def]
    query, key, value, seen, rows, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,  # noqa: ANN001
    heads, groups, sequence, tokens, width, scale, dropped, grown,  # noqa: ANN001
    log_sums, gradient, shrunk, of_key, of_value,  # noqa: ANN001
    CAUSAL: tl.constexpr, SEEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Add up the gradients of one group over its heads."""
    number = tl.program_id(1).to(tl.int64)
    batch, group = number // groups, number % groups
    columns = tl.program_id(0) * N + tl.arange(0, N)
    k = _block(key + batch * k_b + group * k_h, columns, k_s, tokens, width, D)
    v = _block(value + batch * v_b + group * v_h, columns, v_s, tokens, width, D)
    sums_key = tl.zeros([N, D], tl.float32)
    sums_value = tl.zeros([N, D], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.program_id(0) * N // M * M
    for member in range(0, heads // groups):
        head = group * (heads // groups) + member
        of_head = (batch * heads + head) * sequence
        for start in range(begin, sequence, M):
            places = start + tl.arange(0, M)
            q = _block(query + batch * q_b + head * q_h, places, q_s, sequence, width, D)
            of_out = _block(gradient + batch * sequence * heads * width + head * width, places, heads * width,
                            sequence, width, D)
            hashes = tl.load(rows + of_head + places, mask=places < sequence, other=0)
            log_sum = tl.load(log_sums + of_head + places, mask=places < sequence, other=0.0)
            less = tl.load(shrunk + of_head + places, mask=places < sequence, other=0.0)
            scores = _scores(q, k, seen + batch * tokens if SEEN else seen, places, columns, sequence, tokens, scale,
                             CAUSAL, SEEN, PRECISION)
            weights = tl.exp2(scores - log_sum[:, None])
            kept = _kept(hashes, columns, dropped)
            left = tl.where(kept, weights * grown, 0.0)
            sums_value += tl.dot(tl.trans(left).to(of_out.dtype), of_out, input_precision=PRECISION)
            of_weights = tl.dot(of_out, tl.trans(v), input_precision=PRECISION) * grown
            of_scores = weights * (tl.where(kept, of_weights, 0.0) - less[:, None])
            sums_key += tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision=PRECISION)
    there = batch * tokens * groups * width + group * width
    _put(of_key + there, sums_key * scale, columns, groups * width, tokens, width, D)
    _put(of_value + there, sums_value, columns, groups * width, tokens, width, D)
# fmt: on
