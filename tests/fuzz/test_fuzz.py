"""Random inputs end in a right answer or in a message. `python -m tests.fuzz` tries thousands of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS, trials
from tests.fuzz.trial import GOOD, Outcome, attempt
from tests.support import cases

COUNT = {"overrides": 8}
"""Of each kind, as many as take some 2 s of CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_inputs_end_in_a_message_or_a_right_answer(kind: str) -> None:
    tried = list(trials(kind, 0, COUNT.get(kind, cases.fewer(14, 400))))
    assert [(seed, trial) for seed, trial in tried if trial.outcome not in GOOD] == []


def of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: object, *argv: str) -> Outcome:
    """What is made of a `tdpp` that does this."""
    monkeypatch.setattr("tests.fuzz.trial.main", command)
    monkeypatch.setattr("tests.fuzz.trial.CPU_S", 1)
    (work := tmp_path / "work").mkdir()
    return attempt(argv, work).outcome


def hang(argv: object) -> int:
    while True:
        pass


def fail(argv: object) -> int:
    raise ValueError("a fault of ours")


def memory(argv: object) -> int:
    return len(bytearray(2**40))


def silent(argv: object) -> int:
    return 1


def control(argv: object) -> int:
    raise SystemExit(print("\x1b]52;c;eA==\x07", file=__import__("sys").stderr) or 2)


def write(argv: object) -> int:
    return Path("new").mkdir() or 0


@pytest.mark.parametrize(
    ("command", "argv", "outcome"),
    [
        (hang, [], Outcome.hang),
        (fail, [], Outcome.traceback),
        (memory, [], Outcome.traceback),
        (silent, [], Outcome.silent),
        (control, [], Outcome.control),
        (write, ["dry_run=true"], Outcome.wrote),
        (write, [], Outcome.success),
    ],
    ids=["hang", "exception", "memory", "silent", "control", "dry run", "run"],
)
def test_every_fault_of_a_command_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: object, argv: list[str], outcome: Outcome
) -> None:
    assert of(monkeypatch, tmp_path, command, *argv) is outcome
