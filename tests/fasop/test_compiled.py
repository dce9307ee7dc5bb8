"""Compiled loops are all there, or numpy does what each of them does."""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from pathlib import Path

import pytest

import fasop
from fasop.compiled import build_age
from fasop.compiled.build_age import COPIED, outdated
from launch.commands.search import main
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


@pytest.mark.parametrize(("later", "told"), [(COPIED - 1, False), (COPIED + 1, True), (-COPIED - 1, False)])
def test_compiled_loops_are_outdated_where_a_source_was_changed_after_they_were_built(
    later: int, told: bool, tmp_path: Path
) -> None:
    """As after an update of a checkout: the functions may take other arguments now, in places of the same types."""
    loops = Path(sys.modules[EXTENSIONS[0]].__file__ or "").name
    for name, seconds in ((loops, 1000), ("a.pyx", 1000), ("b.pxd", 1000 + later)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    assert outdated(tmp_path) is told
    (tmp_path / loops).unlink()
    assert not outdated(tmp_path)


def test_no_outdated_loop_is_taken_and_the_search_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_age, "outdated", lambda: True)
    monkeypatch.setattr(fasop, "compiled", None, raising=False)
    monkeypatch.delitem(sys.modules, "fasop.compiled")
    compiled = importlib.import_module("fasop.compiled")
    assert {getattr(compiled, name.rpartition(".")[2]) for name in EXTENSIONS} == {None}
    assert main(["experiment=demo", "top=1"]) == 0
    assert "install it again" in capsys.readouterr().err
