"""A run on a machine that others use, and ranks that print without end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launch.commands.report import main as report
from launch.control.executors import local
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support.launch import live
from tests.support.launch.live import done, wait_for


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"master_port={port} is not available on this machine \(Address already in"
        ):
            local.check_port(port)
        ended = done("launch", "train.iterations=6", f"executor.master_port={port}", cwd=tmp_path)
    assert ended.returncode == 1
    assert f"executor.master_port={port} is not available on this machine" in ended.stderr
    assert "choose another port, or null for a free one" in ended.stderr
    assert not [*tmp_path.glob("runs/*")]


@pytest.mark.slow
def test_ranks_that_print_100_mb_neither_end_nor_reach_the_terminal_or_the_page(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = live.start(runs, *live.TWO_NODES, "+cluster.environment.PRINTS_MB=100")
    wait_for(lambda: judge(run).state is State.succeeded)
    assert run.node_out("local-0").stat().st_size > 99_000_000
    assert run.node_err("local-1").stat().st_size > 99_000_000
    assert "script" not in str(judge(run))
    assert report([str(run.path)]) == 0
    for page in run.report.glob("*.html"):
        assert "alert('loud')" not in page.read_text()
        assert page.stat().st_size < 4_000_000
    assert "\x1b[2J" not in "".join(capsys.readouterr())
