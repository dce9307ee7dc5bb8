"""Tab completes the words of tdpp, in shells that really run."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launch import cli
from launch.commands import COMMANDS
from launch.commands.completion import OF_WORDS, SCRIPTS
from tests.support.launch.live import ENVIRONMENT

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
ENOUGH_S = 300.0
DATA = ("prepare", "chats", "pairs", "images", "videos", "inspect", "check", "merge", "split")


class Terminal:
    """A shell that somebody types into, whose `tdpp` is this one."""

    def __init__(self, shell: str, folder: Path, install: str) -> None:
        self.shell = shell
        program = folder / "bin" / "tdpp"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m launch.cli "$@"\n')
        program.chmod(0o755)
        self.terminal, theirs = pty.openpty()
        given = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb", "PS1": "$ "}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *START[shell]], cwd=folder, env={**ENVIRONMENT, **given, "XDG_DATA_HOME": str(folder)},
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self.type(f"{'bindkey -e; ' * (shell == 'zsh')}{install}; echo re''ady\n")
        self.wait_for(r"ready\r?\n")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        until = time.monotonic() + ENOUGH_S
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < until, self.shown
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.shown += os.read(self.terminal, 10000).decode(errors="replace")
        return found

    def completed(self, line: str) -> list[str]:
        """The words behind `tdpp` once Tab was pressed at the end of a line, and `_` typed after that."""
        self.shown = ""
        self.type(f"tdpp {line}\t_\x01printf '<%s>' \x05 ; echo e''nd\n")
        return re.findall(r"<([^<>]*)>", self.wait_for(r"((?:<[^<>]*>)+)end")[1])[1:]

    def end(self) -> None:
        os.close(self.terminal)
        self.process.kill()
        self.process.wait()


def run_of(folder: Path) -> str:
    """A run, as far as its name goes."""
    path = folder / "runs/mine/20260101-120000-0123abcd"
    path.mkdir(parents=True)
    for name in ("config.yaml", "plan.json"):
        (path / name).touch()
    return f"mine/{path.name}"


@pytest.mark.slow
@pytest.mark.parametrize("shell", START)
def test_tab_completes_in_a_shell_that_runs(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        no_shell = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        no_shell(f"no {shell} on this machine; 'make shells' installs it")
    install = "tdpp completion fish | source" if shell == "fish" else f'eval "$(tdpp completion {shell})"'
    run = run_of(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stdlib.bin").touch()
    terminal = Terminal(shell, tmp_path, install)
    try:
        assert terminal.completed("laun") == ["launch", "_"]
        assert terminal.completed("launch train.itera") == ["launch", "train.iterations=_"]
        assert terminal.completed("launch model=ti") == ["launch", "model=tiny", "_"]
        assert terminal.completed("launch cluster=a10x8 cluster.groups.g") == [
            *("launch", "cluster=a10x8", "cluster.groups.gpu2._")
        ]
        assert terminal.completed("search parallel.schedule=gpipe,inter") == [
            *("search", "parallel.schedule=gpipe,interleaved", "_")
        ]
        assert terminal.completed("init model --seq") == ["init", "model", "--sequence-length", "_"]
        assert terminal.completed("data inspect --family=b") == ["data", "inspect", "--family=bert", "_"]
        assert terminal.completed(f"status {run[:8]}") == ["status", run, "_"]
        assert terminal.completed("launch data.prefix=data/std") == ["launch", "data.prefix=data/stdlib.bin", "_"]
    finally:
        terminal.end()


def offered(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["completion", "--line", line]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tdpp d", ["doctor", "data"]),
        ("tdpp completion ", ["bash", "zsh", "fish"]),
        ("tdpp launch mod", ["model=", "model."]),
        ("tdpp launch -m model=tiny,sm", ["model=tiny,small"]),
        ("tdpp launch --config-dir=own model=min", ["model=mine"]),
        (
            "tdpp launch +cluster.groups.local.gp",
            ["+cluster.groups.local.gpus_per_node=", "+cluster.groups.local.gpu="],
        ),
        ("tdpp launch cluster=a100x1_a10x7 cluster.groups.", ["cluster.groups.hgx.", "cluster.groups.gpu2."]),
        ("tdpp launch modle=x train.it", ["train.iterations="]),
        ("tdpp launch dry_run=", ["dry_run=true", "dry_run=false"]),
        ("tdpp launch executor.kind=s", ["executor.kind=slurm"]),
        ("tdpp launch train.load=", []),
        ("tdpp launch res", ["resume="]),
        ("tdpp launch repr", ["reproduce="]),
        ("tdpp launch resume=m", ["resume=mine", "resume=mine/20260101-120000-0123abcd"]),
        ("tdpp stop --runs-dir=elsewhere ", []),
        ("tdpp search pl", ["plan="]),
        ("tdpp profile tens", ["tensor_sizes="]),
        ("tdpp data p", ["prepare", "pairs"]),
        ("tdpp data prepare --outp", ["--output"]),
        ("tdpp data inspect --family ", ["gpt", "bert", "t5"]),
        ("tdpp data inspect --family=b", ["--family=bert"]),
        ("tdpp report --wa", ["--watch", "--wandb"]),
        ("tdpp report mine --runs-d", ["--runs-dir"]),
        ("tdpp status --watch m", ["mine", "mine/20260101-120000-0123abcd"]),
        ("tdpp checkpoint c", ["convert"]),
        ("tdpp checkpoint convert m", ["mine", "mine/20260101-120000-0123abcd"]),
        ("tdpp checkpoint convert mine --to=", ["--to=huggingface", "--to=megatron", "--to=tdpp"]),
        ("tdpp init ", ["model"]),
        ("tdpp init --ho", ["--hosts"]),
        ("tdpp init model --se", ["--sequence-length"]),
        ("tdpp simulate --j", ["--json"]),
        ("tdpp simulate noise=m", ["noise=mine", "noise=mine/20260101-120000-0123abcd"]),
        ("tdpp rehearse ", ["learning"]),
        ("tdpp rehearse learning se", ["seeds="]),
        ("tdpp doctor --wait", ["--wait-min"]),
        ("tdpp doctor experiment=bert-mi", []),
        ("tdpp search iid", ["iidp="]),
        ("tdpp launch --mul", ["--multirun"]),
        ("tdpp launch sweep_m", ["sweep_metric="]),
        ("tdpp config train.lr_po", ["train.lr_policy", "train.lr_power"]),
        ("tdpp data pairs --sou", ["--source", "--source-lang"]),
        ("tdpp xyzzy a", []),
        ('tdpp launch model="ti', []),
        ("", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_word_becomes_what_the_command_takes(
    line: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path)
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").touch()
    assert offered(line, capsys) == found


OPTION = re.compile(r"(?<![^\s\[(|])--?[a-z][\w-]*")
HELPED = [(command,) for command in COMMANDS] + [
    ("init", "model"),
    ("checkpoint", "convert"),
    *(("data", name) for name in DATA),
]


@pytest.mark.parametrize("words", HELPED, ids=" ".join)
def test_no_option_and_no_word_of_a_help_is_missing(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        cli.main([*words, "--help"])
    shown = capsys.readouterr().out
    usage, lines = shown.partition("\n\n")[0], [line for line in shown.splitlines() if line.startswith("  ")]
    options = {*OPTION.findall(usage)} | {name for line in lines for name in OPTION.findall(line.partition("   ")[0])}
    line = " ".join(("tdpp", *words))
    assert options <= {*offered(f"{line} -", capsys), "-h", "-m"}
    if words[0] in OF_WORDS:
        own = {name for line in lines if (name := re.match(r"  ([a-z_0-9]+)=", line))}
        behind = " learning" if words[0] == "rehearse" else ""
        assert {f"{name[1]}=" for name in own} <= {*offered(f"{line}{behind} ", capsys)}


@pytest.mark.parametrize("word", ["--shell", "-f"])
def test_an_option_that_no_command_has_is_not_offered(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offered(f"tdpp clean {word}", capsys) == []


def test_all_that_tdpp_data_does_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["data", "--help"])
    shown = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert offered("tdpp data ", capsys) == shown == [*DATA]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_hydras_own_option_gives_the_same(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    ours = capsys.readouterr().out
    assert cli.main(["launch", "--shell-completion", f"install={shell}"]) == 0
    assert capsys.readouterr().out == ours
    assert cli.main(["launch", "-sc", f"query={shell}"]) == 1
    assert "'tdpp completion SHELL', where SHELL is bash, zsh, fish" in capsys.readouterr().err
