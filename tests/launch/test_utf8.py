"""Names that are not UTF-8, and locales with another encoding: one message before anything starts, or it works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tdpp as tdpp_of_python
from conf.compose import compose
from conf.errors import ConfigError, TdppError
from conf.run_folder.rundir import RunDir
from conf.utf8 import AS_BYTES, require_utf8, shown
from launch.cli import main

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
"""Python's default encoding is ASCII, as on a login node with an old locale."""


def tdpp(*words: str | bytes, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "launch.cli", *words]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "TDPP_"))}
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=cwd, env={**inherited, **path, **environment}, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("data.prefix=d/\udcf6", r"data.prefix=d/\xf6: not UTF-8"),
        ("train.load=/a/\udcff/b", r"train.load=/a/\xff/b: not UTF-8"),
        ("+cluster.environment={A: '\udcff'}", r"\xff'}: not UTF-8"),
    ],
)
def test_a_word_that_is_not_utf_8_is_refused(word: str, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert name in str(error.value)


@pytest.mark.parametrize("word", ["plan=\udcff.yaml", "profile=\udcff", "export=a\udcff"])
def test_a_word_of_a_command_is_refused_before_its_work(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "model=small", word]) > 0
    assert "\\xff" in (said := capsys.readouterr().err)
    assert ": not UTF-8; write it in UTF-8" in said


def test_a_folder_of_runs_that_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDPP_RUNS_DIR", "gr\udcf6sse")
    with pytest.raises(ConfigError, match=r"runs_dir=gr\\xf6sse: not UTF-8, so no file of the run could name it"):
        require_utf8(compose(), Path("/"))


@pytest.mark.slow
def test_nothing_is_launched_in_a_working_folder_that_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"gr\xf6sse")
    folder.mkdir()
    done = tdpp("launch", cwd=folder)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert rb"gr\xf6sse is not UTF-8, so no file of the run could name it; rename it" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_run_that_was_moved_into_such_a_folder_has_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(_: object) -> int:
        raise UnicodeEncodeError("utf-8", "/runs/\udcf6", 6, 7, "surrogates not allowed")

    monkeypatch.setattr("launch.cli._run", encode)
    assert main(["report"]) == 1
    assert capsys.readouterr().err == "tdpp: error: /runs/\\xf6: not UTF-8, so no file could name it; rename it\n"


@pytest.mark.slow
def test_an_ascii_locale_changes_no_name(tmp_path: Path) -> None:
    prepared = "data prepare --source stdlib --tokenizer byte --output größe/d"
    assert tdpp(*prepared.split(), cwd=tmp_path, **ASCII).returncode == 0
    words = "launch model=tiny parallel.partition=4 parallel.data=1 parallel.pipeline=1 train.iterations=6"
    given = ["data.prefix='größe/d_text_document'", "name='模型'", "runs_dir='läufe'", "+cluster.environment.A='ü'"]
    done = tdpp(*words.split(), *given, cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr.decode()
    (run,) = RunDir.all(tmp_path / "läufe")
    assert run.name.startswith("模型/")
    assert "größe/d_text_document" in run.config.read_text(encoding="utf-8")
    for verb in ("status", "runs", "report"):
        done = tdpp(verb, cwd=tmp_path, **ASCII, TDPP_RUNS_DIR="läufe")
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()


def test_a_program_of_ones_own_is_told_to_use_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    with pytest.raises(TdppError, match=r"uses the encoding iso8859-1 .* start it with 'python -X utf8'"):
        tdpp_of_python.compose(["model=tiny"])


def test_a_byte_is_shown_as_one() -> None:
    assert shown("a\udcf6") == r"a\xf6"
    assert shown("a\ud800") == r"'a\ud800'"


@pytest.mark.parametrize("verb", ["report", "status", "logs", "runs --runs-dir", "data inspect", "nodes --runs-dir"])
def test_every_command_shows_the_bytes_of_a_path(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = "/no/folder\udcff"
    main([*verb.split(), f"--runs-dir={name}" if " " not in verb else name])
    said = "".join(capsys.readouterr())
    assert ("/no/folder\\xff" in said, "udcff" in said) == (True, False)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_stream_shows_bytes_and_half_characters(encoding: str) -> None:
    assert "a\udcf6\ud800".encode(encoding, AS_BYTES) == rb"a\xf6\ud800"
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("ascii", AS_BYTES)
