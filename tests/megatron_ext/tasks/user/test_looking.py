"""The tests' shortcut to look at a user's module says what a process of its own says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.looking import FRESH, forked
from tests.support.megatron_ext.users_files import imported, users_file


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["", imported("UNet") + "\n\nprint('imported')\nUNet.forward = None\n"], ids=["sound", "wrong"]
)
def test_both_ways_say_the_same(tmp_path: Path, code: str) -> None:
    words = [f"{users_file(tmp_path, 'UNet', code)}:UNet", "--json", "--micro-batch-size=2", "--capture"]
    fresh, found = FRESH(words), forked(words)
    assert (found.returncode, found.stdout) == (fresh.returncode, fresh.stdout) == (bool(code), fresh.stdout)
    assert ("imported" in found.stderr) == ("imported" in fresh.stderr) == bool(code)
    assert '{"error": ' in found.stdout if code else '{"blocks": ' in found.stdout
