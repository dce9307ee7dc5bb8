"""What a rank says of its waits for samples: how long they are, a line a minute, and nothing where it reads none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.engine.batches import BatchLoader
from megatron_ext.timeline import usage
from megatron_ext.timeline.usage import SampleWaits
from tests.megatron_ext.conftest import EngineRun


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_the_mean_of_a_minute(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "waits" / "rank-00000.jsonl"
    waits = SampleWaits(path, 10, lambda: now[0])
    for iteration in range(11, 31):
        now[0] += 6.1
        waits.note(iteration, 0.25 * (iteration - 10) + (5.0 if iteration > 20 else 0.0))
    assert [(line["iteration"], line["wait_ms"]) for line in lines(path)] == [(20, 250.0), (30, 750.0)]


def test_ranks_that_read_samples_say_how_long_they_wait(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three stages, of which the middle one reads none."""
    monkeypatch.setattr(usage, "WAITS_EVERY_S", 0.0)
    held = BatchLoader._held

    def slow(self: BatchLoader, *words: object) -> object:
        time.sleep(0.03)
        return held(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchLoader, "_held", slow)
    words = ("parallel.pipeline=3", "parallel.data=1", "train.iterations=3")
    run = engine_run(*words)
    assert run.go() == 0, run.stderr()
    for rank in (0, 2):
        found = lines(run.plan.files.rank_waits(rank))
        assert [line["iteration"] for line in found] == [1, 2, 3]
        assert all(30 <= line["wait_ms"] < 3000 for line in found)
    assert not run.plan.files.rank_waits(1).exists()
