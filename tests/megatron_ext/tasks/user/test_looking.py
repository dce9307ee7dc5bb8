"""The tests' shortcut to ask torch says what a process of its own says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.blocks_of_module import LOOK
from tests.support.looking import FRESH, forked
from tests.support.megatron_ext.users_files import imported, users_file

CODE = f"{imported('UNet')}\n\nprint('imported')\n"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("UNet", '{"blocks": '), ("Nothing", '{"error": ')])
def test_both_ways_say_the_same(tmp_path: Path, name: str, said: str) -> None:
    words = [f"{users_file(tmp_path, 'UNet', CODE)}:{name}", "--json", "--micro-batch-size=2", "--capture"]
    fresh, found = FRESH(LOOK, words), forked(LOOK, words)
    assert (found.returncode, found.stdout) == (fresh.returncode, fresh.stdout)
    assert found.stdout.startswith(said)
    assert "imported" in found.stderr and "imported" in fresh.stderr


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [("'no such model'", 1, "no such model\n"), ("3", 3, ""), ("None", 0, ""), ("", 0, "")],
    ids=["text", "number", "none", "nothing"],
)
def test_a_module_that_exits_says_in_the_shortcut_what_it_says_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, code: int, said: str
) -> None:
    (tmp_path / "ends_here.py").write_text(f"import sys\n\nsys.exit({ends})\n")
    monkeypatch.chdir(tmp_path)
    alone = subprocess.run([sys.executable, "-m", "ends_here"], capture_output=True, text=True)
    found = forked("ends_here")
    assert (found.returncode, found.stderr) == (alone.returncode, alone.stderr) == (code, said)
