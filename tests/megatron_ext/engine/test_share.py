"""A replica's share of the flat weights: the same part of every bucket, which together are all of them once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ext.engine.gradients.flat import FlatWeights


def flats(sizes: list[int], late: list[bool], shares: list[int], bucket_bytes: int) -> list[FlatWeights]:
    """By replica, with distinct numbers above 0."""
    whole = torch.arange(1.0, 1 + sum(sizes)).split(sizes)
    names = [str(number) for number in range(len(sizes))]
    last = {name for name, is_late in zip(names, late, strict=False) if is_late}
    return [
        FlatWeights(
            [(name, nn.Parameter(values.clone())) for name, values in zip(names, whole, strict=True)],
            torch.float32,
            torch.device("cpu"),
            shares,
            rank=rank,
            bucket_bytes=bucket_bytes,
            late=last,
        )
        for rank in range(len(shares))
    ]


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SHARES = st.integers(1, 5).map(lambda replicas: [1] * replicas) | st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(SIZES, st.lists(st.booleans(), min_size=8, max_size=8), SHARES, st.integers(1, 400))
def test_shares_are_all_weights_once(sizes: list[int], late: list[bool], shares: list[int], bucket_bytes: int) -> None:
    found = flats(sizes, late, shares, bucket_bytes)
    kept = [flat.share.of(flat.weight) for flat in found]
    unit = sum(map(len, kept)) // sum(shares)
    assert [len(one) for one in kept] == [unit * number for number in shares]
    together = torch.cat(kept)
    assert together[together > 0].sort().values.tolist() == list(range(1, 1 + sum(sizes)))
    laid_out = torch.zeros_like(found[0].weight)
    for flat, own in zip(found, kept, strict=True):
        flat.share.put(own, laid_out)
        moved = flat.weight.clone()
        flat.share.compact(moved)
        assert torch.equal(moved[: flat.share.length], own)
    assert torch.equal(laid_out, found[0].weight)


@given(SIZES, st.lists(st.booleans(), min_size=8, max_size=8), SHARES, st.integers(1, 400))
def test_a_parameter_lies_where_its_numbers_are(
    sizes: list[int], late: list[bool], shares: list[int], bucket_bytes: int
) -> None:
    found = flats(sizes, late, shares, bucket_bytes)
    for name, here in found[0].slices.items():
        parts = [flat.share.of(flat.weight)[flat.share.within(here)] for flat in found]
        assert torch.equal(torch.cat(parts), found[0].weight[here])
        assert torch.equal(torch.cat(parts), found[0].parameters[name])


@given(SIZES, st.lists(st.booleans(), min_size=8, max_size=8), SHARES)
def test_late_parameters_have_the_last_bucket_to_themselves(
    sizes: list[int], late: list[bool], shares: list[int]
) -> None:
    (flat, *_) = flats(sizes, late, shares, 10**9)
    expected = {str(number) for number, is_late in enumerate(late[: len(sizes)]) if is_late}
    _, names = flat.buckets[-1]
    assert set(names) == (expected or set(flat.slices))
    assert len(flat.buckets) == 1 + (0 < len(expected) < len(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_lie_where_products_of_experts_on_a_gpu_take_them(dtype: torch.dtype) -> None:
    named = [(str(size), nn.Parameter(torch.ones(size))) for size in (4, 3, 40, 1, 8)]
    flat = FlatWeights(named, dtype, torch.device("cpu"), (1, 1, 1), bucket_bytes=100)
    assert len(flat.buckets) > 1
    assert all(one.data_ptr() % 16 == 0 for one in flat.parameters.values())
