"""Replicas that keep parts of unlike size of weights, gradients and optimizer train as one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from tests.megatron_ext.engine.optimizer.test_optimizers_agree import assert_equal
from tests.megatron_ext.engine.test_zero_agrees import (
    CASES,
    GATHERED_CASES,
    STAGES,
    TWO,
    Found,
    of_reference,
    reference,
    small_buckets,
)
from tests.support.megatron_ext.engine_run import EngineRun
from tests.support.megatron_ext.pretended_gpus import pretended_gpus

__all__ = ["reference", "small_buckets"]
PARTS = (3, 10, 1, 5)
"""Of a 24 GiB and an 80 GiB GPU, and of others."""
THREE = ["parallel.data=3", "parallel.pipeline=1", "parallel.micro_batch_size=2", "parallel.global_batch_size=24"]


def with_shards(run: EngineRun) -> EngineRun:
    """The same run, whose replicas keep unlike parts, other ones in each stage."""
    content, replicas = run.plan.as_json(), run.plan.layout.replicas
    shards = [[*PARTS[:count]][:: 1 if stage % 2 else -1] for stage, count in enumerate(replicas)]
    run.run.write_json(run.run.plan, {**content, "shards": shards})
    return EngineRun(run.run, Plan.read(run.run.plan))


MORE = {"three": THREE, "lamb": GATHERED_CASES["lamb"], "offloaded-both": GATHERED_CASES["offloaded-both"]}
QUICK = ("replicas", "four", "stages", "tensor", "three", "lamb", "zb_h1", "offloaded", "interleaved")
LAYOUTS = [
    pytest.param(
        words,
        zero,
        id=f"{name}-{zero}",
        marks=() if name in QUICK and (zero == 3 or name == "stages") else pytest.mark.slow,
    )
    for zero, cases in ((1, CASES | MORE), (2, CASES | MORE), (3, GATHERED_CASES))
    for name, words in cases.items()
]


@pytest.mark.parametrize(("words", "zero"), LAYOUTS)
def test_every_layout_equals_the_textbook(
    words: list[str], zero: int, reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = with_shards(engine_run(*words, f"parallel.zero={zero}"))
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*of_reference(words)), 1e-5, 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_run_goes_on_with_other_parts_and_without(
    zero: int, reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    options = ["train.lr_decay_iterations=4"]
    half = with_shards(engine_run(*STAGES, *options, f"parallel.zero={zero}", "train.iterations=2", name="half"))
    assert half.go() == 0, half.stderr()
    for name, words in {"plain": TWO, "equal": [*TWO, f"parallel.zero={zero}"]}.items():
        run = half.replan(*words, *options)
        assert run.go() == 0, (name, run.stderr())
        assert_equal(run, *reference(), 1e-5, 1e-5)
    again = with_shards(half.replan(*THREE[:2], *TWO[2:], "parallel.data=4", *options, f"parallel.zero={zero}"))
    assert again.go() == 0, again.stderr()
    assert_equal(again, *reference(), 1e-5, 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_pretended_gpus_train_the_same(zero: int, engine_run: Callable[..., EngineRun]) -> None:
    words = ["cluster.gpus.cpu.name=GPU", *STAGES, f"parallel.zero={zero}"]
    equal, unequal = engine_run(*words, name="equal"), with_shards(engine_run(*words, name="unequal"))
    for run in (equal, unequal):
        assert run.go(pretended_gpus()) == 0, run.stderr()
    np.testing.assert_allclose(unequal.losses(), equal.losses(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("zero", [1, 3])
def test_sums_in_16_bits_round_as_those_of_equal_parts(zero: int, engine_run: Callable[..., EngineRun]) -> None:
    words = [*STAGES, f"parallel.zero={zero}", "parallel.reduce_dtype=bf16", "train.clip_grad=0.0"]
    equal, unequal = engine_run(*words, name="equal"), with_shards(engine_run(*words, name="unequal"))
    for run in (equal, unequal):
        assert run.go() == 0, run.stderr()
    assert unequal.losses().tolist() == equal.losses().tolist()


def test_replicas_keep_their_parts_and_send_as_many_bytes_as_with_equal_ones(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep = FlatWeights.keep

    def noted(self: FlatWeights, bucket: int, own: torch.Tensor) -> None:
        keep(self, bucket, own)
        (tmp_path / str(len(self.grad))).touch()

    monkeypatch.setattr(FlatWeights, "keep", noted)
    untied = "model.untie_embeddings_and_output_weights=true"
    equal = engine_run(*TWO, untied, "parallel.zero=2", name="equal")
    unequal = with_shards(engine_run(*TWO, untied, "parallel.zero=2", name="unequal"))
    sent = []
    for run in (equal, unequal):
        for file in tmp_path.glob("[0-9]*"):
            file.unlink()
        assert run.go() == 0, run.stderr()
        files = sorted((run.run.path / "traffic").iterdir())
        sent.append([sum(json.loads(file.read_text())["bytes"].values()) for file in files])
    small, large = sorted(int(file.name) for file in tmp_path.glob("[0-9]*"))
    whole = parameter_count(unequal.plan.model)
    assert (small / whole, large / whole) == (pytest.approx(3 / 13, rel=0.01), pytest.approx(10 / 13, rel=0.01))
    assert sent[1] == pytest.approx(sent[0], rel=0.01), "but for zeros between buckets"


@pytest.mark.parametrize(
    ("shards", "told"),
    [
        ([[1, 2], [1]], "a list for each stage, with a number for each of its replicas"),
        ([[1, 2]], "a list for each stage"),
        ([[1, 0], [1, 1]], "shards"),
    ],
    ids=["replicas", "stages", "nothing"],
)
def test_a_plan_has_a_part_for_each_replica(
    shards: list[list[int]], told: str, engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*STAGES, "parallel.zero=2")
    run.run.write_json(run.run.plan, {**run.plan.as_json(), "shards": shards})
    with pytest.raises(EngineError, match=told):
        Plan.read(run.run.plan)
