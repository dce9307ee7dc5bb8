"""Every command that launches a run, on any page, is a configuration that launches."""

from __future__ import annotations

import re
import shlex
from html import unescape
from pathlib import Path

import pytest

from conf import compose
from launch import cli
from tests.support.reports.synthetic import Shape, make_run

LAUNCHED = ("experiment=demo", "model.layers=9", "parallel.pipeline=3", "parallel.data=1", "parallel.partition=3-3-3")
"""What the run of `SHAPE` was launched with."""
SHAPE = Shape(pipeline=3, micro_batches=8, iterations=12, layers=9, slow={1: 1.9}, overrides=LAUNCHED)


def commands(page: str) -> list[str]:
    """Those that are shown, and those behind a button."""
    shown = re.findall(r'<pre class="command">(.*?)</pre><button', page, re.DOTALL)
    behind = re.findall(r'class="copy"[^>]* value="([^"]*)"', page)
    return [unescape(line) for text in (*shown, *behind) for line in text.splitlines()]


@pytest.mark.slow
def test_every_launch_that_a_run_page_offers_composes(tmp_path: Path) -> None:
    run = tmp_path / "tiny/20260101-000000-aaaa"
    make_run(run, SHAPE)
    assert cli.main(["report", str(run), "--runs-dir", str(tmp_path)]) in (0, None)
    words = [shlex.split(one) for one in commands((run / "report/index.html").read_text())]
    launches = [one[2:] for one in words if one[:2] == ["tdpp", "launch"]]
    gains = [
        one for one in launches if any(word.startswith(("parallel.partition=", "parallel.shares=")) for word in one)
    ]
    assert len({*map(tuple, gains)}) > 1, "a gain has a command of its own"
    for one in launches:
        assert compose.compose(one)
