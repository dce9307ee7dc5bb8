"""Answers of a process with torch are kept, until what decides them changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conf import torch_answers


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests for which a process was started, in a project of one file and with an empty cache."""
    requests: list[str] = []

    def run(module: str, words: object = (), given: str = "") -> subprocess.CompletedProcess[str]:
        requests.append(given)
        said = '{"error": "no such model"}' if "wrong" in given else f'noise\n{{"number": {len(requests)}}}\n'
        return subprocess.CompletedProcess([], 0, "" if "silent" in given else said, "a line\nno module named so\n")

    file = tmp_path / "megatron_ext" / "families" / "huggingface" / "blocks.py"
    file.parent.mkdir(parents=True)
    file.write_text("first = 1\n")
    monkeypatch.setattr(torch_answers, "PROJECT", tmp_path)
    monkeypatch.setattr(torch_answers, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch_answers._answer.cache_clear()
    return requests


def ask(**request: int) -> dict[str, object]:
    torch_answers._answer.cache_clear()  # as a command that starts anew
    return torch_answers.answer("some.module", request, "digest")


def test_an_answer_is_kept_for_the_same_request(asked: list[str]) -> None:
    assert ask(size=1) == ask(size=1) == {"number": 1}
    assert ask(size=2) == {"number": 2}
    assert len(asked) == 2


def test_a_change_of_any_code_of_the_ranks_asks_again(asked: list[str], tmp_path: Path) -> None:
    ask(size=1)
    (tmp_path / "megatron_ext" / "families" / "huggingface" / "blocks.py").write_text("first = 2\n")
    assert ask(size=1) == {"number": 2}


def test_an_error_is_not_kept(asked: list[str]) -> None:
    assert ask(wrong=1) == ask(wrong=1) == {"error": "no such model"}
    assert len(asked) == 2


def test_a_process_that_answers_nothing_has_failed_with_its_last_line(asked: list[str]) -> None:
    assert ask(silent=1) == {"failed": "python -m some.module exited with 0: no module named so"}
