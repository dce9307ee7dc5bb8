"""Fixtures for runs of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.indexed_dataset import write_indexed
from tests.megatron_ext.engine_run import VOCAB, EngineRun, make_run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexed data of random walks, which a model can learn; some are shorter and some longer than a sequence."""
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    random = np.random.default_rng(0)
    walks = (random.integers(1, 4, size=n).cumsum() % VOCAB for n in random.integers(3, 90, size=60))
    write_indexed(prefix, (walk.astype(np.uint16) for walk in walks), np.dtype(np.uint16))
    return prefix


@pytest.fixture
def engine_run(tmp_path: Path, corpus: Path) -> Callable[..., EngineRun]:
    """Makes a run folder of the tiny model with some overrides."""

    def make(*overrides: str, name: str = "run") -> EngineRun:
        return make_run(tmp_path / name, corpus, *overrides)

    return make
