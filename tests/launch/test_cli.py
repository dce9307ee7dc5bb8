"""The console command: quick help, true exit codes, one message for what a user can mend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch import cli
from tests.support.launch.live import ENVIRONMENT


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["--version"]], ids=" ".join)
def test_help_imports_none_of_the_heavy_packages(argv: list[str]) -> None:
    code = f"""
import sys
from launch.cli import main
assert main({argv!r}) == 0
print(sorted({{"hydra", "omegaconf", "torch", "submitit", "numpy", "rich"}} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in ("launch", "doctor", "status", "logs", "stop", "runs", "report", "data"):
        assert sum(line.startswith(f"  {command} ") for line in lines) == 1


@pytest.mark.parametrize(("word", "told"), [("lanch", "did you mean launch, "), ("xyzzy", "the nearest are ")])
def test_an_unknown_command_names_the_nearest(word: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tdpp: error: unknown command {word!r}; {told}")


def fails_with(error: BaseException) -> SimpleNamespace:
    def main(argv: list[str]) -> int:
        raise error

    return SimpleNamespace(main=main)


def test_an_error_of_ours_is_one_line_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TdppError("key=1 is wrong")
    error.exit_code = 9
    monkeypatch.setitem(sys.modules, "launch.commands.runs", fails_with(error))
    assert cli.main(["runs"]) == 9
    assert capsys.readouterr() == ("", "tdpp: error: key=1 is wrong\n")


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "launch.commands.runs", fails_with(KeyboardInterrupt()))
    assert cli.main(["runs"]) == 130


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "launch.commands.runs", fails_with(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["runs"])


def test_a_reader_that_closes_early_is_no_fault(tmp_path: Path) -> None:
    code = "from launch.cli import main; import sys; sys.exit(main())"
    command = f"{sys.executable} -c '{code}' --help; echo $? >{tmp_path}/code"
    told = subprocess.run(f"({command}) 2>{tmp_path}/err | :", shell=True, env=ENVIRONMENT, check=False)
    assert told.returncode == 0
    assert (tmp_path / "err").read_text() == ""
    assert (tmp_path / "code").read_text() in ("141\n", "0\n")  # 0 if the reader was still there


@pytest.mark.parametrize(
    "command",
    [
        *(["--help"], ["runs"], ["launch", "--help"], ["search", "--help"], ["status", "--help"], ["data", "--help"]),
        *(["launch", "--info"], ["launch", "--cfg", "hydra"], ["launch", "dry_run=true"], ["completion", "bash"]),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_that_finds_no_room_is_one_message(command: list[str], unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", *command],
            cwd=tmp_path,
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "tdpp: error: standard output: No space left on device; free some space there\n",
    )


def test_a_name_that_no_encoding_has_is_printed_all_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = "from launch.cli import main; import sys; sys.argv[0] = 'tdpp'; sys.exit(main())"
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii:strict"}
    told = subprocess.run(
        [sys.executable, "-c", command, "launch", "dry_run=true", "name='ü'"],
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert told.returncode == 1  # there are no data
    assert "run \\xfc/<time>-<hash>" in capfd.readouterr().out


def ended(argv: list[str]) -> int | str | None:
    """The exit code, also where argparse ends it."""
    try:
        return cli.main(argv)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    "argv",
    [
        ["data", "check", "x" * 5000],
        ["data", "prepare", "--source", "x" * 5000, "--output", "a"],
        ["search", f"csv={'x' * 5000}"],
        ["launch", f"resume={'x' * 5000}"],
        ["status", "--csv=\x1b]52;c;eA==\x07"],
        ["data", "check", "x", f"--vocab-size=-{'9' * 5000}"],
    ],
    ids=lambda argv: " ".join(argv)[:30].encode("unicode_escape").decode(),
)
def test_what_is_too_long_or_no_text_is_one_readable_message(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = ended(argv)
    told = capsys.readouterr()
    assert (code, told.out) in ((1, ""), (2, ""))
    assert 0 < len(told.err) < 2000
    assert told.err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["status", "runs_dir=nope"], "tdpp: error: runs_dir=nope: not a run; write --runs-dir nope"),
        (["config", "traim"], "did you mean train, "),
        (["config", "trian.lr"], "did you mean train.lr, "),
        (["launch", "resume="], "resume= is empty; give a run's folder, its name, its job id, 'latest', or a sweep's"),
        (["report", "--output", "page.html"], "'page.html' is the name of a file; give a folder"),
        (["data", "merge", "a", "b", "--output", "d/"], "'d/' is a folder; add a name for the data, such as d/data"),
        (["data", "prepare", "--source", "stdlib", "--output", "d/"], "'d/' is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_told_with_what_was_meant(
    argv: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = ended(argv)
    assert code in (1, 2)
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_itself_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(TdppError, match="no runs in"):
        RunDir.find(Path("runs"), "loop")
