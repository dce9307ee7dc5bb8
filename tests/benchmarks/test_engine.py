"""The benchmark of the engine compares like with like: every contender trains, and to the same losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contenders import Contender, Pipelining, Tdpp
from benchmarks.engine import CASES, TOLERANCE, Crew, Turn, make_case, megatron_core
from benchmarks.megatron_core import MegatronCore
from benchmarks.plain_pipelining import PlainPipelining

CASE = next(iter(CASES.values())).overrides.split()
ALONE = ["parallel.data=1", "parallel.pipeline=1", "parallel.partition=null"]
ITERATIONS = 4


def losses(kind: Callable[..., Contender], folder: Path, overrides: list[str]) -> np.ndarray:
    crew = Crew(kind, make_case(folder, [*CASE, *overrides]))
    found = crew.take(Turn(ITERATIONS, recording=True))[-1].losses
    crew.dismiss()
    return np.array(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of one process that holds the whole model."""
    return losses(Tdpp, tmp_path_factory.mktemp("alone") / "run", ALONE)


LLAMA = ["model=llama-tiny", "model.layers=8", "model.sequence_length=32", "model.vocab_size=512"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of ours."""
    return losses(Tdpp, tmp_path_factory.mktemp("llama") / "run", LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pipelining, PlainPipelining])
def test_a_contender_trains_the_same_llama(kind: Callable[..., Contender], llama: np.ndarray, tmp_path: Path) -> None:
    np.testing.assert_allclose(losses(kind, tmp_path / "theirs", LLAMA), llama, rtol=TOLERANCE)
    assert llama[-1] < llama[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        Tdpp,
        Pipelining,
        PlainPipelining,
        pytest.param(
            MegatronCore, marks=pytest.mark.skipif(not megatron_core(), reason="megatron-core is not installed")
        ),
    ],
)
def test_a_contender_trains_the_same_model(kind: Callable[..., Contender], alone: np.ndarray, tmp_path: Path) -> None:
    found = losses(kind, tmp_path / "run", [])
    np.testing.assert_allclose(found, alone, rtol=TOLERANCE)
    assert found[-1] < found[0]
