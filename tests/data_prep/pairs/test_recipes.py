"""The commands of docs/data.md that make pairs from Debian's packages, on the packages themselves."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launch.commands.data import main
from tests.data_prep.pairs.test_pairs import all_texts, texts
from tests.support import ROOT

CORPORA = ROOT / "build" / "corpora"
PAGE = (ROOT / "docs" / "data.md").read_text()


def made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The manifest of what the page's command for `data/<name>` makes."""
    (command,) = re.findall(rf"^tdpp (data pairs .* --output data/{name})$", PAGE, re.MULTILINE)
    for pattern in re.findall(r"\S+\.deb", command):
        found = sorted(CORPORA.glob(pattern))
        if not found:
            assert not os.environ.get("CI"), f"'make corpora' has put no {pattern} into {CORPORA}"
            pytest.skip(f"there is no {pattern} in {CORPORA}; 'make corpora' downloads it")
        command = command.replace(pattern, shlex.join(map(str, found)))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    found_: dict[str, Any] = json.loads(Path("data", f"{name}.json").read_text())
    return found_


def counted(manifest: dict[str, Any]) -> int:
    return sum(split["pairs"] for split in manifest["splits"].values())


@pytest.mark.slow
@pytest.mark.thorough
def test_the_help_of_libreoffice_gives_some_36_thousand_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian updates the text from time to time."""
    manifest = made("help", tmp_path, monkeypatch)
    assert 34_000 < counted(manifest) < 40_000
    assert manifest["vocab_size"] == 8000
    for split in ("valid", "test"):
        assert 0.015 < manifest["splits"][split]["pairs"] / counted(manifest) < 0.03
    found = texts(Path("data/help"), "train") + texts(Path("data/help"), "test")
    assert all(3 <= len(side.split()) <= 50 for pair in found for side in pair)
    german, english = (sum(f" {word} " in pair[side] for pair in found) for side, word in ((0, "die"), (1, "the")))
    assert german > 8000 and english > 10000


def test_the_messages_of_gcc_give_some_15_thousand_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = made("gcc", tmp_path, monkeypatch)
    assert 14_000 < counted(manifest) < 17_000
    assert ("Überlauf in Konstanten-Ausdruck", "overflow in constant expression") in all_texts(Path("data/gcc"))
