"""What `make test` does to the machine before it runs a test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
WANTED = {
    "browser": "chromium",
    "slurm": "slurm-wlm slurmdbd munge mariadb-server iproute2",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH on which nothing is installed yet; what apt-get is asked for goes to stderr, too."""
    for name, script in (("id", "echo ${FAKE_UID}"), ("apt-get", 'echo "apt-get $*" >&2')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def make(target: str, path: Path, uid: int) -> list[str]:
    """The lines on stderr, in their order."""
    assert MAKE is not None
    command = [MAKE, "--no-print-directory", "-C", str(ROOT), target]
    environment = {"PATH": str(path), "FAKE_UID": str(uid)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize(("target", "packages"), WANTED.items(), ids=WANTED)
def test_root_reads_which_packages_are_installed_before_they_are(target: str, packages: str, path: Path) -> None:
    said, update, install = make(target, path, uid=0)
    assert said.startswith(f"installing Debian's packages {packages}, for the ")
    assert update.startswith("apt-get update")
    assert install.startswith("apt-get install") and install.endswith(f" {packages}")


@pytest.mark.parametrize(("target", "packages"), WANTED.items(), ids=WANTED)
def test_others_read_what_to_install_for_the_tests_that_are_skipped(target: str, packages: str, path: Path) -> None:
    (said,) = make(target, path, uid=1000)
    assert said.endswith(f"are skipped; to run them, install Debian's packages {packages}")
