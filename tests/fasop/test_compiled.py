"""Compiled loops are all there, or numpy does what each of them does."""

from __future__ import annotations

import importlib
import sys
import tomllib

import pytest

import fasop
from tests.support import ROOT

EXTENSIONS = [
    one["name"] for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
]


@pytest.mark.parametrize("missing", [None, *EXTENSIONS])
def test_no_compiled_loop_is_taken_where_one_is_missing(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasop, "compiled", None, raising=False)
    monkeypatch.delitem(sys.modules, "fasop.compiled", raising=False)
    if missing is not None:
        monkeypatch.setitem(sys.modules, missing, None)
    compiled = importlib.import_module("fasop.compiled")
    for name in EXTENSIONS:
        loops = getattr(compiled, name.rpartition(".")[2])
        assert loops is (None if missing else sys.modules[name]), f"{name}: pip install -e . builds it"
