"""What a run printed gives no orders to the terminal of who reads it."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch import cli
from launch.control.follow import follow
from tests.support.launch.live import start

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
"""Puts words into the clipboard of many a terminal."""
ORDERS = f"RuntimeError: {CLIPBOARD}\x1b[2J\x9b31m\r\x08 end"


@pytest.fixture(scope="module")
def malicious(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that failed, with orders wherever a rank can write words."""
    run = start(tmp_path_factory.mktemp("visible") / "runs")
    follow(run)
    for path in (run.node_out("local-0"), run.node_err("local-0")):
        with path.open("a") as file:
            file.write(ORDERS + "\n")
    state = run.read_json(run.node_state("local-0")) | {"exit_code": 1, "reason": ORDERS}
    run.write_json(run.node_state("local-0"), state)
    error = {
        **{"rank": 1, "stage": 0, "dp": 1, "tp": 0, "node": "local-0", "start": state["start"], "unix": 1.0},
        **{"type": "RuntimeError", "message": ORDERS, "traceback": ORDERS, "symptom": False},
    }
    run.rank_error(1).write_text(json.dumps(error))
    return run


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("command", [["status"], ["logs"], ["logs", "--err"], ["stop", "--yes"]], ids=" ".join)
def test_orders_to_the_terminal_are_made_visible(
    malicious: RunDir,
    command: list[str],
    terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    cli.main([*command, str(malicious.path)])
    said = "".join(capsys.readouterr())
    for order in ("\x1b]52", "\x07", "\x1b[2J", "\x9b", "\r", "\x08"):
        assert order not in said
    if command[0] != "stop":
        assert r"\x1b]52;c;cm0gLXJmIH4=\x07" in said.replace("\n", "")


def test_raw_logs_are_as_they_were_written(malicious: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "--raw", str(malicious.path)]) == 0
    assert CLIPBOARD in capsys.readouterr().out


@given(st.text())
def test_only_tabs_and_line_ends_stay(text: str) -> None:
    shown = visible(text)
    assert all(character.isprintable() or character in "\t\n" or ord(character) > 0x9F for character in shown)
    assert shown == text or any(ord(character) < 0xA0 for character in text)
