"""What a page of docs/ says: its code, its commands, and what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT


def blocks_of_page(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def printed(command: str, folder: Path) -> str:
    """What a command of a page prints, run in `folder`; it must succeed."""
    program, *words = command.split()
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "launch.cli"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def logged_losses(text: str) -> dict[int, float]:
    """By iteration."""
    return {int(step): float(loss) for step, loss in re.findall(r"iteration +(\d+)/\d+  loss (\S+)", text)}
