"""Fixtures for runs of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def engine_run(tmp_path: Path, corpus: Path, request: pytest.FixtureRequest) -> Callable[..., EngineRun]:
    """Makes a run folder of the tiny model with some overrides, for the engine that the tests are asked for."""
    engine = request.config.getoption("--engine")

    def make(*overrides: str, name: str = "run") -> EngineRun:
        return make_run(tmp_path / name, corpus, f"engine={engine}", *overrides)

    return make
