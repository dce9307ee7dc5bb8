"""Steps of several copies of the model on one rank: how many have room is found by trying, and all parts are timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.engine.executor.executor import Executor
from megatron_ext.measuring.steps import PARTS, Copies
from tests.megatron_ext.measuring.test_room import CPU, GPT, planned

SIZE = 4


def test_copies_are_timed_as_far_as_memory_has_room_for_their_gradients(tmp_path: Path) -> None:
    plan = planned(tmp_path, GPT)
    plenty = Copies(plan, CPU, 1 << 40)
    (one, three) = plenty.measured(SIZE, [1, 3], 0.05)
    assert (one["streams"], three["streams"]) == (1, 3)
    for found in (one, three):
        assert all(found[part] >= 0 for part in PARTS)
        assert found["forward"] > 0 < found["backward"]
    numel = plenty._flat.weight.numel()
    plenty.close()
    micro = plenty._task.example(SIZE, torch.Generator())
    needed = []
    for count in (1, 2):
        plenty._memory = 0
        with pytest.raises(MemoryError) as raised:
            plenty._require_room(micro, count)
        needed.append(int(str(raised.value).split()[3]))
    activations = needed[1] - needed[0] - 4 * numel
    assert needed[0] == 16 * numel + activations
    assert activations > 0
    few = Copies(plan, CPU, needed[1])
    assert [found["streams"] for found in few.measured(SIZE, [1, 2, 3], 0.01)] == [1, 2]
    assert few.measured(1000, [1, 2], 0.01) == []
    few.close()


def test_a_copy_without_memory_ends_the_trial_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU says it: in the middle of a pass, in any thread."""
    copies, run = Copies(planned(tmp_path, GPT), CPU, None), Executor.run

    def as_a_gpu(self, actions, micros, factor):
        if self._chunks[0].stage is not copies._stage:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return run(self, actions, micros, factor)

    monkeypatch.setattr(Executor, "run", as_a_gpu)
    assert [found["streams"] for found in copies.measured(SIZE, [1, 2], 0.01)] == [1]
    monkeypatch.undo()
    assert [found["streams"] for found in copies.measured(SIZE, [1, 2], 0.01)] == [1, 2]
    copies.close()
