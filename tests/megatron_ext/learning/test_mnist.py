"""A pipeline without a flush learns MNIST's digits as well as data parallelism does, after as many epochs."""

from __future__ import annotations

import resource
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.inference.held_out import measure
from megatron_ext.learning.learn import learn
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run

TRAINING = (
    *("experiment=vit_digits", "model=vgg-tiny", "model.image_size=28", "model.width=8", "model.hidden_dropout=0.2"),
    *("model.label_smoothing=0", "data.augment.mixup=0", "train.iterations=500", "train.lr=2e-3"),
    *("train.lr_warmup_iterations=40", "train.log_interval=1", "parallel.micro_batch_size=12"),
)
"""Six epochs of 4,000 images; the commands of docs/learning-rehearsal.md."""
PLANS = {
    "data": ("parallel.data=4",),
    "3-1": ("parallel.schedule=pipedream", "parallel.pipeline=2", "parallel.replicas=3-1", "parallel.partition=4-2"),
}
POINT = 0.01
CPU_SECONDS = 120
ALIKE = 15
"""Iterations, before roundings grow."""


def accuracy(run: EngineRun) -> float:
    """Over the 1,000 images that it has not seen."""
    found = [measure(run.plan, Checkpoint.at(run.run.path), split) for split in ("valid", "test")]
    assert sum(one.samples for one in found) == 1000
    return sum(one.metrics["top-1"] * one.samples for one in found) / 1000


@pytest.mark.slow
@pytest.mark.skipif(not cases.thorough, reason="two minutes; that ranks learn what is rehearsed, other tests show too")
def test_3_1_is_within_a_point_of_data_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained by four ranks each; and what the ranks without a flush learn is what a rehearsal of it learns."""
    monkeypatch.chdir(tmp_path)
    assert main(["data", "images", "--source", "mnist", "--output", "data/mnist"]) == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reached = {}
    for name, plan in PLANS.items():
        run = make_run(tmp_path / name, Path("data/mnist"), *plan, base=TRAINING)
        assert run.plan.world_size == 4
        assert run.go() == 0, run.stderr()
        reached[name] = accuracy(run)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{reached} in {taken:.0f} CPU s")
    assert reached["data"] > 0.9
    assert abs(reached["3-1"] - reached["data"]) <= POINT
    assert taken < CPU_SECONDS
    rehearsed = [one.loss for one in islice(learn(run.plan), ALIKE)]
    np.testing.assert_allclose(run.losses()[:ALIKE], rehearsed, rtol=1e-5)
