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


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_no_compiled_loop_is_taken_where_one_does_not_suit_another(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Cython says where a checkout was not installed again, and functions or classes have changed."""

    class Stale:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == EXTENSIONS[0]:
                raise error(f"C function {name}.one has wrong signature")

    monkeypatch.setattr(fasop, "compiled", None, raising=False)
    for name in ("fasop.compiled", EXTENSIONS[0]):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Stale, *sys.meta_path])
    compiled = importlib.import_module("fasop.compiled")
    assert {getattr(compiled, name.rpartition(".")[2]) for name in EXTENSIONS} == {None}
