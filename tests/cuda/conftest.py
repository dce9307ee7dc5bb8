"""Tests on GPUs that compute nothing; `make test-cuda` runs them, and installs the torch that they need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("CUDA_VENV"):
        for item in items:
            if FOLDER in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="make test-cuda runs it"))
