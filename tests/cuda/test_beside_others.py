"""A micro-batch launches no more kernels than a plain loop's, counted in the same run; memory is as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_counts import CASES, PLAIN, Counter, words_of
from tests.cuda.test_memory import assert_memory_as_predicted
from tests.cuda.test_stand_in import HEADER
from tests.support.cuda.machine import Counts
from tests.support.megatron_ext.engine_run import EngineRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HEADER.exists(), reason="Triton builds its launcher with Python's headers"),
]
MOST = {
    "GPT-2 124M": 1.05,
    "with hidden dropout": 1.3,
    "with hidden and attention dropout": 1.3,
    "Llama-1B, 4 layers": 1.0,
    "ViT-B/16": 1.1,
}
"""Times the kernels of the plain loop, whose weights and gradients are in bf16."""


def beside_a_plain_loop(name: str, folder: Path) -> tuple[EngineRun, Counts]:
    case, counter = CASES[name], Counter(folder)
    run = counter.run_of(case)
    (ours,), (plain,) = counter.ours(run, case.gpus), counter.other(run, PLAIN)
    for number in ("0", "1"):
        assert ours.by_micro_batch[number] <= MOST[name] * plain.by_micro_batch[number], (number, ours.kernels)
    assert sum(ours.waits.values()) <= 3
    assert [name for name in ours.kernels if "flash" in name], ours.kernels
    return run, ours


@pytest.mark.parametrize("name", [name for name in MOST if name != "ViT-B/16"])
def test_a_micro_batch_has_no_more_kernels_than_a_plain_loops(name: str, tmp_path: Path) -> None:
    run, ours = beside_a_plain_loop(name, tmp_path)
    assert_memory_as_predicted(words_of(CASES[name]), run)
    assert not [name for name in ours.kernels if "softmax" in name], "attention that holds its weights"
    assert [name for name in ours.kernels if name.startswith("triton_") and "logsumexp" in name], ours.kernels


def test_a_micro_batch_of_images_has_few_more_kernels_than_a_plain_loops(tmp_path: Path) -> None:
    beside_a_plain_loop("ViT-B/16", tmp_path)
