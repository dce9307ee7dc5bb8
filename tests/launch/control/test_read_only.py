"""A file system that becomes read-only under a run ends it: no process is left, and there is a verdict."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE_S
from tests.support.launch.live import ENVIRONMENT

SCRIPT = """
mount -o loop "$1/image" "$1/there" || exit 77
"$2" -m tests.support.launch.tdpp_stand_in launch train.iterations=100000 train.log_interval=1 \
    name=ro runs_dir="$1/there/runs" > "$1/out" 2>&1 &
launcher=$!
while ! grep -q "iteration  " "$1/out" && kill -0 $launcher; do sleep 0.2; done
mount -o remount,abort "$1/there" || exit 77
wait $launcher; echo "launch $?"
"$2" -m tests.support.launch.tdpp_stand_in status ro --runs-dir "$1/there/runs" > "$1/status" 2>&1; echo "status $?"
pgrep -f "$1/there/runs" > "$1/left"; umount "$1/there"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="needs root and mkfs.ext4")
def test_of_a_run_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "image").touch()
    os.truncate(tmp_path / "image", 200 << 20)
    subprocess.run(["mkfs.ext4", "-q", tmp_path / "image"], check=True)
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", SCRIPT, "-", str(tmp_path), sys.executable],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this machine mounts no image")
    codes = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("launch", "status")))
    assert codes["launch"] == codes["status"] != "0"
    for said in (tmp_path / "out", tmp_path / "status"):
        assert "Traceback" not in said.read_text()
        assert f"{tmp_path}/there/runs/ro/" in said.read_text()
        assert " has become read-only: " in said.read_text()
        assert "'tdpp launch resume=" in said.read_text()
    assert (tmp_path / "left").read_text() == ""
