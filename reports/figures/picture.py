"""A still picture of a page, taken by a Chromium or Chrome of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from reports.errors import ReportError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, HEIGHT = 1440, 1600
LIMIT_S = 120


def browser() -> str:
    """The command of the browser.

    Raises:
        ReportError: there is none.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise ReportError(
            f"--png needs Chromium or Chrome, but none of {', '.join(BROWSERS)} is in PATH; install "
            f"one, or leave --png out"
        )
    return found


def take(command: str, page: Path) -> bytes:
    """The picture as PNG, as the page is when its scripts have drawn it.

    Raises:
        ReportError: the browser made none.
    """
    with tempfile.TemporaryDirectory() as profile:
        picture = Path(profile, "picture.png")
        arguments = [
            command,
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses to run as root otherwise
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            "--virtual-time-budget=20000",
            f"--screenshot={picture}",
            page.absolute().as_uri(),
        ]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ReportError(f"{command} did not finish a picture of {page} within {LIMIT_S} s") from error
        if done.returncode or not picture.exists():
            said = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ReportError(f"{command} made no picture of {page} (exit code {done.returncode}): {said[0]}")
        return picture.read_bytes()
