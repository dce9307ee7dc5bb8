"""What is wrong with a user's file is one message with its line, before anything is started; and the page about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext import blocks
from megatron_ext.contract.errors import EngineError
from megatron_ext.families.module.code import digest, load
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.support import ROOT
from tests.support.megatron_ext.pages import blocks_of_page, logged_losses, printed

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
    def forward(self, x):
        {body}

class InPlace(nn.Module):
    def forward(self, x):
        return x.add_(1)

class Pick(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0.5]

class Skip(Net):
    def __init__(self):
        super().__init__()
        self.change = InPlace()
    def forward(self, x):
        x = self.a(x)
        y = self.change(x)
        return self.b(y) + x

shapes = nn.Sequential(nn.Identity(), Pick(), nn.Linear(4, 4))
number = 5

def loss(outputs, targets):
    return {loss}

def data(split, seed):
    source = torch.Generator().manual_seed(seed)
    return [({sample}, 0) for _ in range(16)]

class NoFunction(Net):
    forward = 5
"""
SOUND = {
    "body": "return self.b(self.relu(self.a(x)))",
    "loss": "outputs.square().mean()",
    "sample": "torch.randn(4, generator=source)",
}
FAULTS = {
    "a branch on numbers": (
        {"body": "return self.b(self.a(x)) if x.sum() > 0 else x"},
        "Net",
        r"cannot be captured: \S+my\.py, line 11, in forward: .*\(\) > 0",
    ),
    "a number for another block": (
        {"body": "n = self.a(x).sum().item(); return self.b(x) * n"},
        "Net",
        r"block \w+ .*line 11.* gives a number that follows from",
    ),
    "a parameter without gradient": (
        {"body": "return self.a(x)"},
        "Net",
        r"does not depend on the parameters b\.weight, b\.bias",
    ),
    "a block that raises": (
        {"sample": "torch.randn(3, generator=source)"},
        "Net",
        r"block a \(\S+my\.py, line 11\) fails: .*shapes cannot be multiplied",
    ),
    "a loss that raises": (
        {"loss": "outputs.nothing"},
        "Net",
        r"fails: \S+my\.py, line \d+, in loss: return outputs\.nothing: AttributeError",
    ),
    "a loss of several numbers": (
        {"loss": "outputs"},
        "Net",
        r"returns a tensor of shape \[4, 4\], but must return one number",
    ),
    "no such name": ({}, "Nett", r"has no Nett; did you mean Net\?"),
    "something else": ({}, "number", r"number must be a torch\.nn\.Module"),
    "a forward that is no function": ({}, "NoFunction", r"NoFunction\.forward is of type int; write def forward"),
    "a changed skip": ({}, "Skip", r"block change .* changes a in place, but block b takes it afterwards"),
    "another shape": ({}, "shapes", r"block 1 gives after_1 of shape \[\d, 4\].* for one micro-batch and \[\d, 4\]"),
    "samples of several shapes": (
        {"sample": "torch.randn(4 + _ % 2, generator=source)"},
        "Net",
        r"inputs of sample \d+ is \[\d\] of float32, but of sample 0",
    ),
    "a syntax error": ({"body": "return ("}, "Net", r"importing the file fails: \S+my\.py, line \d+: SyntaxError"),
}


@pytest.mark.parametrize(("changes", "name", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_users_file_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], name: str, message: str
) -> None:
    file = tmp_path / "my.py"
    text = FILE
    for key, value in {**SOUND, **changes}.items():
        text = text.replace("{" + key + "}", value)
    file.write_text(text)
    capture = [] if name == "shapes" else ["--capture"]
    assert blocks.main([f"{file}:{name}", "--micro-batch-size=4", *capture]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line


def test_a_model_that_the_file_makes_while_it_is_imported_has_the_same_weights_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(
        FILE.replace("{body}", SOUND["body"]).replace("{loss}", SOUND["loss"]).replace("{sample}", SOUND["sample"])
    )
    found = []
    for before in (1, 2):
        torch.manual_seed(before)
        task = task_of(blocks.plan_of(f"{file}:shapes"))
        found.append(task.blocks[2].make(TensorGroup()).module.get_parameter("2.weight"))
    assert torch.equal(*found)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert blocks.main([f"{tmp_path}/none.py:Net"]) == 1
    assert f"model.code={tmp_path}/none.py: cannot be read: No such file" in capsys.readouterr().err


def test_a_file_that_changed_since_the_launch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    file.write_text("Net = 1\n")
    before = digest(file)
    assert load(f"{file}:Net", before).name == "Net"
    file.write_text("Net = 2\n")
    with pytest.raises(EngineError, match="has changed since the run was launched"):
        load(f"{file}:Net", before)


@pytest.mark.slow
def test_the_page_about_your_model_shows_what_its_code_and_commands_give(tmp_path: Path) -> None:
    page = ROOT / "docs" / "your-model.md"
    (code,) = blocks_of_page(page, "python")
    (tmp_path / "my.py").write_text(code)
    look, launch, profile, search, launch_plan = (text.strip() for text in blocks_of_page(page, "bash"))
    shown, logged, measured, searched = blocks_of_page(page, "text")
    assert printed(look, tmp_path) == shown
    found, expected = logged_losses(printed(launch, tmp_path)), logged_losses(logged)
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-3)
    profile = profile.replace("seconds=2", "seconds=0.05")  # what is compared are no times
    assert columns(printed(profile, tmp_path), "kind", 3) == columns(measured, "kind", 3)
    assert headings(printed(search, tmp_path)) == headings(searched)
    assert logged_losses(printed(launch_plan, tmp_path))[40] == pytest.approx(found[40], rel=1e-3)


def columns(text: str, first: str, count: int) -> list[list[str]]:
    """The first columns of the table whose heading begins so."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    return [line.split()[:count] for line in lines[begin : begin + 7]]


def headings(text: str) -> list[list[str]]:
    """Of all tables; what is below them depends on times."""
    return [line.split() for line in text.splitlines() if line.split()[:1] in (["tensor"], ["stage"])]


@pytest.mark.parametrize("code", ["null", "my.py", "my.py:", "my:Net"])
def test_a_code_that_names_nothing_is_one_message(code: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.code=.* must be FILE\.py:NAME, a Python file and the name of what"):
        compose(["model=module", f"model.code='{code}'" if code != "null" else "model.code=null"])
