"""The largest micro-batch with room for it: searched as it should be, and tried with the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.measuring.room import MOST, Room, largest

CPU = torch.device("cpu")
GPT = ("model.hidden=32", "model.heads=2", "model.layers=2", "model.sequence_length=16", "model.vocab_size=101")
IMAGES = ("model=vit-tiny",)


@given(st.integers(0, 3000), st.integers(1, 64))
def test_the_largest_is_found_with_few_trials(limit: int, step: int) -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest(fits, step) == limit // step * step
    assert len(tried) <= 2 * max(1, limit // step).bit_length() + 2
    assert all(batch % step == 0 for batch in tried)


def test_nobody_looks_for_ever() -> None:
    assert MOST // 2 < largest(lambda _: True, 3) <= MOST


def planned(folder: Path, words: tuple[str, ...]) -> Plan:
    words = (*words, "parallel=single", "parallel.global_batch_size=2", "parallel.micro_batch_size=2")
    return make_plan(compose([*words, f"runs_dir={folder}"]), "room")


@pytest.mark.slow
@pytest.mark.parametrize("words", [GPT, IMAGES], ids=["gpt", "vit"])
def test_more_memory_has_room_for_more(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The memory beyond weights, gradients and optimizer is the micro-batches': twice of it, twice as many."""
    plan = planned(tmp_path, words)
    room = Room(plan, CPU, 1 << 40)
    assert room.fits(4)
    numel = sum(size for _, size in room.gradients())
    found = [largest(Room(plan, CPU, 16 * numel + extra).fits, 1) for extra in (4 << 20, 8 << 20)]
    assert found[0] > 2
    assert found[1] == pytest.approx(2 * found[0], rel=0.1, abs=1)
    assert not Room(plan, CPU, 16 * numel).fits(1)


def test_gradients_arrive_from_the_last_block_to_the_first(tmp_path: Path) -> None:
    room = Room(planned(tmp_path, GPT), CPU, 1 << 40)
    assert room.fits(2)
    names = [name for name, _ in room.gradients()]
    first, last = (next(n for n, name in enumerate(names) if f"layers.{layer}." in name) for layer in (0, 1))
    assert last < first
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("of", [torch.cuda.OutOfMemoryError, RuntimeError, MemoryError])
def test_a_gpu_without_memory_is_a_size_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type[Exception]
) -> None:
    room = Room(planned(tmp_path, GPT), CPU, None)
    inner = room._pass

    def as_a_gpu(micro: object) -> None:
        (tokens,) = list(micro.inputs.values())[:1]  # type: ignore[attr-defined]
        if tokens.shape[0] > 11:
            raise of("CUDA out of memory. Tried to allocate 2.00 GiB")
        inner(micro)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "_pass", as_a_gpu)
    assert largest(room.fits, 2) == 10


def test_an_error_without_words_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python itself raises it where an object has no room."""

    def full(*_: object) -> None:
        raise MemoryError

    room = Room(planned(tmp_path, GPT), CPU, None)
    monkeypatch.setattr(room, "_pass", full)
    assert not room.fits(2)
    assert room.short_of == "MemoryError"


def test_other_errors_are_none_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("illegal address")

    room = Room(planned(tmp_path, GPT), CPU, None)
    monkeypatch.setattr(room, "_pass", broken)
    with pytest.raises(RuntimeError, match="illegal address"):
        room.fits(2)
