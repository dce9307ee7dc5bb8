"""The commands that docs/models.md and docs/videos.md show for models of LSTMs run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launch.cli import main
from tests.support import ROOT

SHORTER = {"train.iterations=400": "train.iterations=6", "stdlib": "texts"}
"""What would take too long, and what stands for it."""


def commands(page: str, model: str) -> list[list[str]]:
    """Of the block that trains this model."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    (block,) = [block for block in blocks if f"model={model} " in block]
    lines = [shlex.split(line)[1:] for line in block.splitlines()]
    return [[SHORTER.get(word, word) for word in line] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "model"), [("videos.md", "s2vt-tiny"), ("models.md", "awd-lm-tiny")])
def test_the_commands_of_the_page_run(
    page: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.py").write_text(f"def number_{number}():\n    return {number}\n" * 40)
    monkeypatch.chdir(tmp_path)
    prepare, launch, evaluate = commands(page, model)
    assert main(prepare) == 0
    assert main(launch) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(evaluate) == 0
    assert "perplexity" in capsys.readouterr().out
