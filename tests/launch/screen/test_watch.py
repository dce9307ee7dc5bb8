"""`--watch`: a new block only when something has changed, a terminal drawn anew, the verdict's exit code at the end."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

from launch import cli
from launch.commands.status_display import compact
from launch.control.follow import follow
from launch.control.stop import stop
from launch.judge.evidence import OF_GPUS, OF_NODE, Evidence
from launch.screen import View, watch
from tests.support import PATIENCE_S
from tests.support.launch.live import ENVIRONMENT, FOREVER, TDPP, TWO_NODES, start, tdpp, wait_until_running
from tests.support.launch.run_folders import OK, Case


def view(text: str, key: object, over: bool = False, exit_code: int = 0) -> View:
    return View(plain=text, key=key, over=over, exit_code=exit_code)


def test_only_changes_are_printed_and_the_last_exit_code_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter(
        [
            view("1 s ago", key=1),
            view("3 s ago", key=1),
            view("1 s ago, iteration 2", key=2),
            view("failed", key=3, over=True, exit_code=7),
        ]
    )
    assert watch(lambda: next(looks), 0.001) == 7
    assert capsys.readouterr().out == "1 s ago\n1 s ago, iteration 2\nfailed\n"


def test_what_is_over_is_looked_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([view("done", key=1, over=True)])
    assert watch(lambda: next(looks), 3600) == 0
    assert capsys.readouterr().out == "done\n"


def test_a_run_is_watched_to_its_end_by_other_programs(runs: Path) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)
    watcher = tdpp("status", "--watch=0.05", str(run.path), cwd=runs)
    assert watcher.stdout is not None
    first = watcher.stdout.readline()
    stop(run)
    out, err = watcher.communicate(timeout=PATIENCE_S)
    assert (watcher.returncode, err) == (3, "")
    assert first.startswith(f"{run.name}: running, ")
    blocks = (first + out).split(f"{run.name}: ")[1:]
    assert blocks[-1].startswith("stopped, ended on request")
    assert len(set(blocks)) == len(blocks), "nothing is printed twice"


def test_as_json_every_change_is_a_line(runs: Path) -> None:
    run = start(runs)
    watcher = tdpp("status", "--watch=0.05", "--json", str(run.path), cwd=runs)
    out, _ = watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 0
    assert all(line.startswith('{"run": ') for line in out.splitlines())
    assert '"state": "succeeded"' in out.splitlines()[-1]


@pytest.mark.parametrize("command", [["status"], ["runs"]], ids=" ".join)
def test_ctrl_c_ends_a_watch_quietly_and_not_the_run(runs: Path, command: list[str]) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)
    watcher = tdpp(*command, "--watch", "--runs-dir", str(runs), cwd=runs)
    assert watcher.stdout is not None
    assert watcher.stdout.readline()
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=PATIENCE_S)
    assert (watcher.returncode, err) == (130, "")
    assert run.read_json(run.node_state("local-0"))["state"] == "running"
    stop(run)


def on_a_terminal(*arguments: str, cwd: Path, columns: int = 100) -> tuple[int, str]:
    """`tdpp` with a terminal: its exit code, and what it wrote there."""
    main, terminal = pty.openpty()
    environment = ENVIRONMENT | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    process = subprocess.Popen([*TDPP, *arguments], cwd=cwd, env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    written = b""
    try:
        while part := os.read(main, 65536):
            written += part
    except OSError:  # so Linux tells that nobody has the other end any more
        pass
    os.close(main)
    return process.wait(PATIENCE_S), written.decode()


def test_a_terminal_is_drawn_anew_in_colour_and_keeps_the_last_look(runs: Path) -> None:
    run = start(runs, *TWO_NODES)
    code, written = on_a_terminal("status", "--watch=0.05", str(run.path), cwd=runs)
    follow(run)
    assert code == 0
    other_screen, after = written.rsplit("\x1b[?1049l", 1)
    assert "\x1b[?1049h" in other_screen
    assert "\x1b[1;32msucceeded" in after
    assert "2 nodes" in after
    assert "exited with 0 (local-0, local-1)" in after


def test_runs_are_listed_in_colour_on_a_terminal_whatever_their_names(tmp_path: Path) -> None:
    run = start(tmp_path / "runs", "name='[red]x'")
    follow(run)
    code, written = on_a_terminal("runs", cwd=tmp_path)
    assert code == 0
    assert "[red]x/" in written
    assert "\x1b[1;32msucceeded" in written


@pytest.mark.parametrize("columns", [80, 200], ids=["narrow", "wide"])
def test_no_cell_of_a_run_is_cut_on_any_terminal(tmp_path: Path, columns: int) -> None:
    Case([OK, OK], last=50).make(tmp_path / "runs" / "a_name_of_some_length" / "20260101-000000-a")
    code, written = on_a_terminal("runs", cwd=tmp_path, columns=columns)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
    (at,) = [number for number, line in enumerate(lines) if "a_name_of_some_length/20260101-000000-a" in line]
    assert code == 0
    told = " ".join(" ".join(lines[at : at + 4]).split())
    assert "succeeded 50/50" in told
    assert ("kind local, age" in told) == (columns == 80)
    assert re.search(r"tp1 dp2 pp2, 1-3, batch 2/16, local\*2,?( hosts)? -$", told)


def test_nodes_of_which_the_same_is_said_share_a_line() -> None:
    nodes = [("running", "a-0"), ("not started", "a-1"), ("running", "a-2")]
    facts = [Evidence(OF_NODE, text, name) for text, name in nodes]
    others = [Evidence("later", "b: c"), Evidence("later", "b: c"), Evidence("", "no label")]
    assert list(compact([Evidence("plan", "p"), *facts, *others])) == [
        ("plan", "p"),
        ("2 nodes", "running (a-0, a-2)"),
        ("node a-1", "not started"),
        ("later", "b: c"),
        ("", "no label"),
    ]


def test_of_many_nodes_some_are_named() -> None:
    (line,) = compact([Evidence(OF_NODE, "running", f"a-{number}") for number in range(128)])
    assert line == ("128 nodes", "running (a-0, a-1, a-2, a-3, a-4, a-5 and 122 others)")


def test_of_the_gpus_of_many_nodes_some_lines_are_shown() -> None:
    facts = [Evidence(OF_GPUS, "4 of 4 busy", f"a-{number}") for number in range(128)]
    shown = list(compact([*facts, Evidence("later", "rank 3 failed")]))
    assert shown[:2] == [("GPUs of a-0", "4 of 4 busy"), ("GPUs of a-1", "4 of 4 busy")]
    assert shown[6:] == [("GPUs", "122 other nodes: tdpp logs --gpu --tail 9"), ("later", "rank 3 failed")]


def test_the_word_after_watch_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Case().make(tmp_path / "tiny" / "4711")
    assert cli.main(["status", "--watch", "4711", "--runs-dir", str(tmp_path)]) != 2
    assert capsys.readouterr().out.startswith("tiny/4711: lost")
    assert run.path.name == "4711"


@pytest.mark.parametrize("word", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_that_are_none_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["status", f"--watch={word}"])
    assert "must be a number above 0" in capsys.readouterr().err
