"""Sums of gradients that travel in 16 bits: each number is rounded once on its way out and once on its way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_ext.parallel.summing import begin_all_reduce, begin_reduce_scatter

RANKS, NUMBERS = 8, 1003


def own_of(rank: int, numbers: int) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(rank))


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    whole = own_of(rank, NUMBERS)
    begin_all_reduce(whole, None, torch.bfloat16).wait()
    scattered = own_of(rank, RANKS * 128)
    share = scattered.view(RANKS, -1)[rank]
    begin_reduce_scatter(scattered, share, None, torch.bfloat16).wait()
    ring = own_of(rank, NUMBERS).bfloat16()
    dist.all_reduce(ring)
    torch.save((whole, share.clone(), ring.float()), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[torch.Tensor, ...]]:
    folder: Path = tmp_path_factory.mktemp("sums")
    torch.multiprocessing.spawn(one_rank, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


def summed(numbers: int) -> torch.Tensor:
    """In fp32, of what travels."""
    return torch.stack([own_of(rank, numbers).bfloat16().float() for rank in range(RANKS)]).sum(0)


def test_sums_are_fp32_ones_of_what_was_sent(sums: list[tuple[torch.Tensor, ...]]) -> None:
    for rank, (whole, share, _) in enumerate(sums):
        torch.testing.assert_close(share, summed(RANKS * 128).view(RANKS, -1)[rank], rtol=1e-6, atol=1e-6)
        assert torch.equal(whole, sums[0][0])
        torch.testing.assert_close(whole, summed(NUMBERS), rtol=2**-8, atol=1e-6)


def test_the_error_is_that_of_single_roundings_not_of_one_a_rank(sums: list[tuple[torch.Tensor, ...]]) -> None:
    exact = torch.stack([own_of(rank, NUMBERS).double() for rank in range(RANKS)]).sum(0)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt())

    whole, _, ring = sums[0]
    once = error(exact.bfloat16().float())
    assert error(whole) < 1.6 * once  # of what is sent, and of the sum
    assert error(ring) > 1.8 * once
