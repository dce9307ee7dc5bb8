"""A task of a user's own, the one of the page about it, trains under every layout as in one plain process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from conf.run_folder.rundir import RunDir
from megatron_ext import blocks
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.tasks.task import LOGGED
from tests.support import ROOT
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pages import blocks_of_page, logged_losses, printed

PAGE = ROOT / "docs" / "your-task.md"
LAYOUTS = {
    "one": ("parallel.pipeline=1",),
    "pp3-zb": ("parallel.pipeline=3", "parallel.schedule=zb_h1"),
    "pp2-dp2": ("parallel.pipeline=2", "parallel.data=2", "parallel.recompute=full"),
}


def code() -> str:
    (found,) = blocks_of_page(PAGE, "python")
    return found


def own_run(folder: Path, *overrides: str, dropout: float = 0.0) -> EngineRun:
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / "my.py"
    file.write_text(code().replace("Dropout(0.1)", f"Dropout({dropout})"))
    words = [
        *(
            "model=module",
            f"model.code={file}:Backwards",
            "train.iterations=4",
            "train.log_interval=1",
            "train.lr=1e-2",
        ),
        *(
            "train.min_lr=1e-5",
            "train.lr_decay_iterations=4",
            "train.lr_warmup_iterations=1",
            "train.comm_timeout_s=120",
        ),
        *("train.clip_grad=0.5", "train.seed=7"),
        *("parallel=single", "parallel.global_batch_size=8", "parallel.micro_batch_size=2"),
    ]
    return make_run(folder, Path("none"), *words, *overrides, base=())


@cache
def users_module() -> ModuleType:
    found = ModuleType("plain_my")
    exec(code().replace("Dropout(0.1)", "Dropout(0.0)"), vars(found))
    return found


def plain(run: EngineRun) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, accuracies and final weights of a loop over whole batches, without blocks' wires and micro-batches."""
    mine, train = users_module(), run.plan.train
    task = mine.Backwards(run.plan)
    parts = {name: getattr(mine, kind)(None) for name, kind in [("embedding", "Embed"), ("head", "Head")]}
    for number in range(2):
        parts |= {f"encoder.{number}": mine.Encoder(None), f"decoder.{number}": mine.Decoder(None)}
    named = {f"{part}.{name}": one for part, made in parts.items() for name, one in made.named_parameters()}
    for name, parameter in named.items():
        task.initialise(name, parameter.detach(), None)
    parts["head"].words.weight = parts["embedding"].table.weight
    del named["head.words.weight"]
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in named.values() if one.dim() > 1]},
            {"params": [one for one in named.values() if one.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
    samples = task.samples("train", 8 * train.iterations)
    losses, accuracies = [], []
    for step in range(train.iterations):
        batch = samples.batch(np.arange(step * 8, step * 8 + 8))
        source, target = torch.from_numpy(batch["source"]), torch.from_numpy(batch["target"])
        embedded = parts["embedding"](source)
        memory = parts["encoder.1"](parts["encoder.0"](embedded))
        logits = parts["head"](parts["decoder.1"](parts["decoder.0"](embedded, memory), memory))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        losses.append(loss.item())
        accuracies.append((logits.argmax(-1) == target)[target > 0].float().mean().item())
    return losses, accuracies, named


def logged(run: EngineRun, key: str) -> list[float]:
    return [line[key] for line in run.metrics()]


@pytest.mark.parametrize("layout", ["pp3-zb", "pp2-dp2"])
def test_an_own_task_trains_as_in_one_plain_process(tmp_path: Path, layout: str) -> None:
    run = own_run(tmp_path / "run", *LAYOUTS[layout])
    assert run.go() == 0, run.stderr()
    losses, accuracies, weights = plain(run)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-5)
    np.testing.assert_allclose(logged(run, "accuracy"), accuracies, rtol=1e-5)
    found = run.weights()
    assert len(found) == len(weights)
    for key, tensor in found.items():
        name = re.sub(r"-0*(\d+)\.", r".\1.", key)  # a file is called decoder-00001
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
def test_an_own_task_goes_on_under_another_layout_with_the_same_dropout(tmp_path: Path) -> None:
    whole = own_run(tmp_path / "whole", *LAYOUTS["one"], dropout=0.2)
    begun = own_run(tmp_path / "begun", *LAYOUTS["pp3-zb"], "train.iterations=2", dropout=0.2)
    assert whole.go() == 0, whole.stderr()
    assert begun.go() == 0, begun.stderr()
    rest = own_run(tmp_path / "rest", *LAYOUTS["pp2-dp2"], f"train.load={begun.run.path}", dropout=0.2)
    assert rest.go() == 0, rest.stderr()
    np.testing.assert_allclose([*begun.losses(), *rest.losses()], whole.losses(), rtol=1e-5)
    assert abs(whole.losses() - plain(whole)[0]).max() > 1e-3, "dropout drops nothing"
    for name, tensor in rest.weights().items():
        torch.testing.assert_close(tensor, whole.weights()[name], rtol=1e-5, atol=1e-5)


SAID = '"decoder.0", "decoder", ("embedded", "memory"), ("decoded.0",)'
MORE = "self.words = nn.Linear(WIDTH, WORDS, bias=False)"
TABLE = "self.table = nn.Embedding(WORDS, WIDTH)"
TIED = 'self.tied = {"head.words.weight": "embedding.table.weight"}'
FORWARD = "return self.words(self.norm(x))"
FAULTS = {
    "a wire that nobody gives": (
        SAID,
        SAID.replace("memory", "nothing"),
        r"block decoder\.0 takes nothing, which no bl",
    ),
    "two givers": (
        '("encoded.0",), ("memory",)',
        '("encoded.0",), ("embedded",)',
        r"encoder\.1 gives embedded, but so d",
    ),
    "a cycle": (
        SAID,
        SAID.replace("memory", "decoded.1"),
        r"the blocks decoder\.\d -> decoder\.\d -> decoder\.\d take what each other gives: a cycle",
    ),
    "no gradient": (
        MORE,
        f"{MORE}\n        self.spare = nn.Linear(2, 2)",
        r"parameters head\.spare\.weight, head\.spare",
    ),
    "a shape that changes": (
        FORWARD,
        "return self.words(self.norm(x))[:, : 3 + int(x.sum() > 0)]",
        r"block head gives lo",
    ),
    "another number format": (
        FORWARD,
        f"{FORWARD}.double()",
        r"head gives logits of shape \[2, 8, 20\] \(torch\.float64",
    ),
    "a wire whose gradient is lost": (
        "Wire(name, hidden) for",
        "Wire(name, hidden, gradient=name != 'memory') for",
        r"encoder\.1 gives memory with a gradient, which would be lost",
    ),
    "code that raises": (
        FORWARD,
        "return self.word(x)",
        r"block head fails: \S+my\.py, line \d+, in forward: return self\.w",
    ),
    "a change in place": (
        FORWARD,
        "return self.words(self.norm(x.add_(1)))",
        r"block head changes decoded\.1 in place",
    ),
    "tied to nothing": (TIED, TIED.replace("table.", "tables."), r"no block has a parameter embedding\.tables\.weight"),
    "tied to a later one": (
        TIED,
        'self.tied = {"embedding.table.weight": "head.words.weight"}',
        r"embedding\.table\.weight is tied to head\.words\.weight, which is in a later block",
    ),
    "tied to another shape": (
        TIED,
        'self.tied = {"head.words.weight": "encoder.0.cell.weight_hh_l0"}',
        r"head\.words\.weight \[20, 32\] is tied to encoder\.0\.cell\.weight_hh_l0 \[48, 16\]",
    ),
    "one that is not said to be tied": (
        TIED,
        "both = Embed(None)\n        head = Head(None)\n        head.words.weight = both.table.weight\n        "
        "self.blocks[0] = self.blocks[0]._replace(make=lambda tensor: both)\n        "
        "self.blocks[-1] = self.blocks[-1]._replace(make=lambda tensor: head)",
        r"head\.words\.weight and embedding\.table\.weight are one parameter",
    ),
    "tied but unequal at the start": (
        "self.tied.get(name, name).encode()",
        "name.encode()",
        r"initialise\(\) fills head\.words\.weight with other numbers than embedding\.table\.weight",
    ),
    "weights that depend on the layout": (
        "torch.randn(parameter.shape, generator=source)",
        "torch.randn(parameter.shape)",
        r"the initial embedding\.table\.weight depends on what was drawn before",
    ),
    "a loss of several numbers": (
        'reduction="sum"',
        'reduction="none"',
        r"loss\(left, micro, tensor\) returns a tensor of",
    ),
    "no such input": ('Micro({"source":', 'Micro({"sauce":', r"micro\(sample\) gives no input source"),
    "a metric of a name that is taken": (
        'return {"accuracy"',
        'return {"loss"',
        r"names a metric 'loss'; its name must",
    ),
    "samples without order": (
        'order = {"sentences": 1}',
        "",
        r"must return a megatron_ext\.data\.samples\.Samples, with",
    ),
    "a sample that fails": ("[::-1]", "[::-1][0:0]", r"batch\(\) of samples\('train', 4\) fails: \S+my\.py, line \d+"),
    "a method that is missing": ("def micro(", "def micros(", r"Backwards\(\) fails: .*abstract method '?micro"),
    "an attribute that is missing": (
        'self.outputs = ("logits",)',
        "pass",
        r"outputs of Backwards must be a tuple or list of str, but is None",
    ),
    "inputs that are no row": (
        '("source",)\n',
        '"source"\n',
        r"inputs of Backwards must be a tuple or list of str, but",
    ),
    "takes that are no row": (
        '("decoded.1",), ("logits",)',
        '"decoded.1", ("logits",)',
        r"takes of block head must be a",
    ),
    "sizes that fail": ("def sizes(self, micro_batch_size)", "def sizes(self)", r"sizes\(2\) fails: .*positional arg"),
    "no micro-batch": ("(target > 0).sum())", "(target > 0).sum())[:]", r"micro\(sample\) returns a tuple, but"),
    "a part with a name of the engine's": (
        MORE,
        f"{MORE}\n        self.first = nn.ReLU()",
        r"block head has an attribute fir",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_an_own_task_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    file = tmp_path / "my.py"
    assert before in code()
    file.write_text(code().replace(before, after))
    assert blocks.main([f"{file}:Backwards", "--micro-batch-size=2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: model.code={file}:Backwards: ")
    assert re.search(message, line), line


@pytest.mark.slow
def test_the_page_about_a_task_shows_what_its_code_and_commands_give(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(code())
    look, launch = blocks_of_page(PAGE, "bash")
    shown, logged = blocks_of_page(PAGE, "text")
    assert printed(look.strip(), tmp_path) == shown
    found, expected = logged_losses(printed(launch.strip(), tmp_path)), logged_losses(logged)
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-3)
    (run,) = RunDir.all(tmp_path / "runs")
    plan = run.read_plan()
    assert [plan.named(stage) for stage in range(3)] == [
        "embedding + encoder.0",
        "encoder.1 + decoder.0",
        "decoder.1 + head",
    ]


def test_a_log_line_has_no_name_that_a_metric_may_have(tmp_path: Path) -> None:
    run = own_run(tmp_path / "run", "train.iterations=1")
    assert run.go() == 0, run.stderr()
    (line,) = run.metrics()
    assert line.keys() - {"accuracy"} <= set(LOGGED)
