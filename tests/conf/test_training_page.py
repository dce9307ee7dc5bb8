"""docs/training.md names every optimizer and policy, and its commands compose."""

from __future__ import annotations

import re
import shlex

import pytest

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.train_config import OPTIMIZERS, LrPolicy
from tests.support import ROOT

PAGE = (ROOT / "docs" / "training.md").read_text()
COMMANDS = re.findall(r"^tdpp launch (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("names", [OPTIMIZERS, tuple(LrPolicy)], ids=["optimizers", "policies"])
def test_each_has_a_row(names: tuple[str, ...]) -> None:
    rows = re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)
    assert set(names) <= set(rows)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_compose(command: str) -> None:
    experiment = compose(shlex.split(command))
    assert experiment.train.eval_interval is not None or experiment.train.epochs is not None
    if experiment.train.epochs is None:
        assert make_plan(experiment, "docs/run").train.iterations == experiment.train.iterations


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 2
