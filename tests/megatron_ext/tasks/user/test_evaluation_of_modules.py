"""A user's module is evaluated on samples that its micro-batches do not divide, or refused before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_ext.engine_run import EngineRun, make_run

FOLDED = """
import torch
from torch import nn
from torch.nn import functional as F

class Fold(nn.Module):
    def forward(self, x):
        return x.reshape({shape})

net = nn.Sequential(Fold(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

def loss(outputs, targets):
    return F.mse_loss(outputs.reshape(targets.shape), targets)

class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        source = torch.Generator().manual_seed(count)
        self.x, self.y = torch.randn(count, 5, 6, generator=source), torch.randn(count, 5, generator=source)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, number):
        return self.x[number], self.y[number]

def data(split, seed):
    return Data({{"train": 16, "valid": 11, "test": 4}}[split])
"""
"""Behind the first block a batch of B samples is [5 B, 6]; the last 3 of 11 samples are none of 4."""


def folded(folder: Path, shape: str, *overrides: str) -> EngineRun:
    folder.mkdir(parents=True)
    file = folder / "folded.py"
    file.write_text(FOLDED.format(shape=shape), encoding="utf-8")
    words = [
        *("model=module", f"model.code={file}:net", "parallel=single", "parallel.global_batch_size=8"),
        *("parallel.micro_batch_size=4", "train.iterations=2", "train.log_interval=1", "train.eval_interval=1"),
        *("train.lr_warmup_iterations=1", "train.comm_timeout_s=120"),
    ]
    return make_run(folder / "run", Path("none"), *words, *overrides, base=())


def test_a_batch_inside_another_dimension_is_evaluated_whatever_is_left_of_the_split(tmp_path: Path) -> None:
    stages = ("parallel.pipeline=2", "parallel.partition=2-2")
    found = []
    for name, more in (("one", ()), ("two", stages)):
        run = folded(tmp_path / name, "-1, 6", *more)
        assert run.go() == 0, run.stderr()
        found.append([line["valid_loss"] for line in run.metrics() if "valid_loss" in line])
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_module_of_one_batch_size_alone_is_refused_before_it_trains(tmp_path: Path) -> None:
    run = folded(tmp_path / "fixed", "20, 6")
    assert run.go() != 0
    assert not run.run.metrics.exists()
    message = run.errors()[0]["message"]
    assert "the last micro-batch of a split has only 3 of 4 samples, and this model cannot take it" in message
    assert "train.eval_iterations" in message
