"""Making and drawing weights: the same numbers in every layout, no more work than needed, and a patience of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.families.gpt.task import GptTask
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup
from megatron_ext.tasks.language import language_task
from megatron_ext.tasks.language.language_task import draw
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.test_worker import ended
from tests.support.megatron_ext.engine_run import EngineRun

SHARDS = (None, Shard(0), Shard(0, (1, 1, 1)), Shard(0, (4, 1, 1)), Shard(1))
TWO = ("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2")


def plain(rows: int, filled: int, columns: int) -> torch.Tensor:
    """What torch draws, whole."""
    whole = torch.zeros(rows, columns)
    whole[:filled] = torch.empty(filled, columns).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(5))
    return whole


def share_of(whole: torch.Tensor, filled: int, shard: Shard | None, size: int, rank: int) -> torch.Tensor:
    rows, columns = whole.shape
    shape = [rows, columns]
    if shard is not None:
        shape[shard.dim] //= size
    share = torch.full(shape, torch.nan)
    draw(share, [rows, columns], filled, shard, size, rank, 0.02, torch.Generator().manual_seed(5))
    return share


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(SHARDS),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 40),
    st.one_of(st.integers(1, 70), st.sampled_from([16, 32, 48, 64, 128])),
    st.floats(0.1, 1.0),
    st.sampled_from([64, 512, language_task.PIECE]),
)
def test_a_share_is_what_torch_draws_there(
    shard: Shard | None, size: int, rows: int, columns: int, part: float, piece: int
) -> None:
    """A share of rows may reach into padding, whose rows are not drawn."""
    if shard is not None:
        rows, columns = (rows * sum(shard.pieces) * size, columns) if shard.dim == 0 else (rows, columns * size)
    filled = max(1, int(rows * part)) if shard in (None, Shard(0)) else rows
    whole = plain(rows, filled, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_task, "PIECE", piece)
        for rank in range(size):
            expected = whole if shard is None else shard.part(whole, size, rank)
            assert torch.equal(share_of(whole, filled, shard, size, rank), expected)


def test_what_comes_after_the_own_share_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    for name in ("normal_", "uniform_"):
        original = getattr(torch.Tensor, name)

        def counting(self: torch.Tensor, *args: Any, of: str = name, call: Any = original, **named: Any) -> Any:
            counts[of] = counts.get(of, 0) + self.numel()
            return call(self, *args, **named)

        monkeypatch.setattr(torch.Tensor, name, counting)
    monkeypatch.setattr(language_task, "PIECE", 1024)
    rows, columns = 256, 64
    own = rows // 4 * columns
    for rank in range(4):
        counts.clear()
        share_of(torch.empty(rows, columns), rows, Shard(0), 4, rank)
        assert (counts["normal_"], counts.get("uniform_", 0)) == (own, rank * own)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stage_has_the_numbers_of_its_names_however_many_threads_draw_them(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    plan = engine_run("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3", "parallel.tensor=2").plan
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2 * threads)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    shares = [dict(stage_of(plan, 0, TensorGroup(2, rank)).parameters_by_name()) for rank in range(2)]
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn that nobody keeps
    for name, first in shares[0].items():
        if first.dim() == 1:
            assert (first == (1.0 if name.endswith("norm.weight") else 0.0)).all()
            continue
        shard = GptTask(plan).shard(name)
        found = first if shard is None else shard.whole([share[name] for share in shares])
        filled = plan.model.vocab_size if name.endswith("word") else len(found)
        source = torch.Generator().manual_seed(language_task._seed(plan.train.seed, name))
        std = 0.02 / 6**0.5 if "_out." in name else 0.02
        expected = torch.zeros_like(found)
        expected[:filled] = torch.empty(filled, found.shape[1]).normal_(0.0, std, generator=source)
        assert torch.equal(found, expected), name


def test_every_seed_and_every_matrix_have_numbers_of_their_own(engine_run: Callable[..., EngineRun]) -> None:
    """Also seeds that differ in their highest bit alone."""
    plan = engine_run("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3").plan
    drawn: dict[tuple[float, ...], tuple[int, str]] = {}
    for seed in (0, 1, 1234, 1234 + 2**16, 2**31, 2**32 - 1):
        one = replace(plan, train=replace(plan.train, seed=seed))
        for name, weight in stage_of(one, 0, TensorGroup(1, 0)).parameters_by_name():
            if weight.dim() > 1:
                numbers = tuple(torch.round(weight.detach()[0, :8] / weight.std(), decimals=3).tolist())
                assert drawn.setdefault(numbers, (seed, name)) == (seed, name)


def slow(rank: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a stage do something while it makes its weights."""
    make = Stage.initialise

    def later(self: Stage, threads: int) -> None:
        if self.last == (rank == 1):
            act()
        make(self, threads)

    monkeypatch.setattr(Stage, "initialise", later)


@pytest.mark.parametrize("rank", [0, 1])
def test_making_weights_may_take_longer_than_a_message(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    slow(rank, lambda: time.sleep(4), monkeypatch)
    run = engine_run(*TWO, "train.comm_timeout_s=2", "train.iterations=2")
    assert run.go() == 0, run.stderr()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_meanwhile_is_told_at_once(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    slow(rank, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    run = engine_run(*TWO, "train.comm_timeout_s=300")
    start = time.monotonic()
    assert ended(run.start()) == 1
    assert time.monotonic() - start < 150
    causes = [(error["rank"], error["type"]) for error in run.errors() if not error["symptom"]]
    assert causes == [(rank, "Killed")]
