"""A batch that changes while the run goes on: every layout trains what one process does that changes likewise."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.contract.adaptive.config import lr_factor
from megatron_ext.contract.plan import Plan
from megatron_ext.engine import engine
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT, assert_equal
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.images import make_images
from tests.support.megatron_ext.pairs import PairLoss, write_pairs
from tests.support.megatron_ext.textbook import textbook, trained

SAMPLES = 120
GROWING = [
    *("train.iterations=null", f"train.samples={SAMPLES}", "parallel.global_batch_size=8", *DROPOUT),
    *("parallel.pipeline=1", "adapt.rule=similarity", "adapt.target=0.99", "adapt.upper=64", "adapt.every=2"),
    *("adapt.rate=0.5", "adapt.lower=4", "train.checkpoint=true", "train.eval_interval=null"),
]
"""The batch grows after every second iteration, for no halves are so alike; 160 samples are no multiple of what it is
then, and the last one shrinks."""
SHARES = ["parallel.shares=3-1"]
LAYOUTS = {
    "one process": ["parallel.data=1", "parallel.micro_batch_size=2"],
    "two replicas": ["parallel.data=2", "parallel.micro_batch_size=1"],
    "shares 3-1": ["parallel.data=2", "parallel.micro_batch_size=2", "parallel.shares=3-1"],
    "three replicas": ["parallel.data=3", "parallel.micro_batch_size=2", "parallel.shares=2-1-1"],
    "streams": ["parallel.data=2", "parallel.micro_batch_size=1", "parallel.shares=6-2", "parallel.streams=3-1"],
    "sharded": ["parallel.data=2", "parallel.micro_batch_size=2", "parallel.sharded_optimizer=true"],
    "two stages": ["parallel.data=2", "parallel.micro_batch_size=2", "parallel.pipeline=2", "parallel.partition=1-2"],
    "gpipe": ["parallel.data=1", "parallel.micro_batch_size=1", "parallel.pipeline=2", "parallel.schedule=gpipe"],
    "zb_h1": [
        *("parallel.data=2", "parallel.micro_batch_size=2", "parallel.pipeline=2", "parallel.schedule=zb_h1"),
        "parallel.shares=1-3",
    ],
    "tensor": [
        *("parallel.data=2", "parallel.micro_batch_size=2", "parallel.tensor=2", "parallel.sequence_parallel=true"),
        *("parallel.pipeline=2", "parallel.recompute=full"),
    ],
}


def decisions(run: EngineRun) -> list[dict]:
    return [json.loads(line) for line in run.run.decisions.read_text().splitlines()]


def batches(run: EngineRun) -> list[int]:
    return [line["global_batch_size"] for line in run.metrics()]


def halves_in_one_process(plan: Plan, sizes: list[int], found: list[tuple[float, float]]) -> Callable[..., None]:
    """Takes the similarity of the halves and the noise scale of each measured batch, from two gradients of means."""
    step = iter(range(1, len(sizes) + 1))

    def look(first: int, gradient: Callable[[Tensor], Tensor]) -> None:
        iteration = next(step)
        if iteration % 2:
            return
        rows = torch.arange(first, first + sizes[iteration - 1]).view(-1, plan.micro_batch_size)
        a, c = gradient(rows[::2].flatten()).double(), gradient(rows[1::2].flatten()).double()
        even, odd = rows[::2].numel(), rows[1::2].numel()
        signal = float(a @ c)
        noise = (float(a @ a + c @ c) / 2 - signal) * 2 / (1 / even + 1 / odd)
        found.append((signal / float(a.norm() * c.norm()), noise / signal if signal > 0 else np.inf))

    return look


@pytest.mark.parametrize(
    "layout", cases.drawn(LAYOUTS, 1, always=["shares 3-1", "three replicas", "streams", "sharded", "zb_h1", "tensor"])
)
def test_a_batch_that_grows_trains_what_one_process_does(
    engine_run: Callable[..., EngineRun], corpus: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass
    run = engine_run(*GROWING, *LAYOUTS[layout])
    assert run.go() == 0, run.stderr()
    sizes = batches(run)
    assert sizes[0] == sizes[1] == 8
    assert sorted(set(sizes[:-1])) == list(dict.fromkeys(sizes[:-1])), "it has grown"
    assert len(set(sizes)) > 3
    assert SAMPLES - 4 < sum(sizes) <= SAMPLES
    assert run.metrics()[-1]["consumed_samples"] == sum(sizes)
    assert run.metrics()[-2]["learning_rate"] > lr_factor(run.plan.adapt, sizes[-2], 8) * run.plan.train.min_lr
    found: list[tuple[float, float]] = []
    whole = engine_run(*GROWING, "parallel.data=1", "parallel.micro_batch_size=2", name="whole").plan
    oracle = textbook(whole, corpus, sizes, halves_in_one_process(run.plan, sizes, found))
    assert_equal(run, oracle)
    measured = [one for one in decisions(run) if one["similarity"] is not None]
    assert len(measured) == len(sizes) // 2
    for one, (similarity, scale) in zip(measured, found, strict=True):
        assert one["similarity"] == pytest.approx(similarity, abs=1e-5)
        assert (one["noise_scale"] or np.inf) == pytest.approx(scale, rel=2e-3)


def test_a_run_goes_on_amid_its_changes(engine_run: Callable[..., EngineRun]) -> None:
    saving = [
        "train.save_interval=1",
        "train.keep_checkpoints=99",
        "adapt.rule=noise",
        "adapt.rate=0.1",
        "adapt.smoothing=2",
    ]
    own = [*GROWING, *LAYOUTS["shares 3-1"], *saving]
    run = engine_run(*own)
    assert run.go() == 0, run.stderr()
    losses, found, kept, state = run.losses(), batches(run), decisions(run), run.state()
    change = next(n for n, (a, b) in enumerate(pairwise(found), 1) if a != b)
    for iteration in (change, change + 1):  # a decision's own checkpoint, and one between two
        (run.run.checkpoints / "latest").write_text(f"iter_{iteration:07d}\n")
        run.run.goal.unlink()
        assert run.go() == 0, run.stderr()
        assert batches(run) == found
        np.testing.assert_allclose(run.losses(), losses, rtol=1e-6)
        assert [[one["iteration"], one["shares"], one["reason"]] for one in decisions(run)] == [
            [one["iteration"], one["shares"], one["reason"]] for one in kept
        ]
        for name, tensor in run.state().items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_with_its_batch_on_other_replicas(engine_run: Callable[..., EngineRun], corpus: Path) -> None:
    run = engine_run(*GROWING, *LAYOUTS["shares 3-1"], "train.save_interval=1", "train.keep_checkpoints=99")
    assert run.go() == 0, run.stderr()
    (run.run.checkpoints / "latest").write_text("iter_0000005\n")
    run.run.goal.unlink()
    then = run.replan(*GROWING, *LAYOUTS["three replicas"], "parallel.micro_batch_size=1", "parallel.shares=3-3-2")
    assert then.go() == 0, then.stderr()
    sizes = batches(then)
    assert sizes[5] == sizes[4] > sizes[0], "an odd iteration: nothing was decided after it"
    whole = engine_run(*GROWING, "parallel.data=1", "parallel.micro_batch_size=2", name="whole").plan
    assert_equal(then, textbook(whole, corpus, sizes))


def test_a_new_run_goes_on_with_the_batch_of_another_and_its_own_shares(
    engine_run: Callable[..., EngineRun], corpus: Path
) -> None:
    saving = ["train.save_interval=1", "train.keep_checkpoints=99"]
    run = engine_run(*GROWING, *LAYOUTS["shares 3-1"], *saving, name="old")
    assert run.go() == 0, run.stderr()
    load = f"train.load={run.run.checkpoints}/iter_0000005"
    own = ["parallel.data=2", "parallel.micro_batch_size=2", "parallel.shares=1-3"]
    then = engine_run(*GROWING, *own, load, name="new")
    assert then.go() == 0, then.stderr()
    sizes = batches(run)
    assert batches(then) == sizes[5:] and sizes[5] > sizes[0]
    assert decisions(then)[0]["shares_before"] == decisions(run)[2]["shares_before"][::-1]
    np.testing.assert_allclose(then.losses(), run.losses()[5:], rtol=1e-5)
    bounded = engine_run(*GROWING, *own, load, "adapt.upper=12", name="bounded")
    assert bounded.go() == 0, bounded.stderr()
    assert batches(bounded)[0] == 12 < sizes[5], "within its own bounds"
    still = [*GROWING[:3], "parallel.pipeline=1", "train.eval_interval=null", "adapt.rebalance=true"]
    fixed = engine_run(*still, *own, load, name="fixed")
    assert fixed.go() == 0, fixed.stderr()
    begun = sum(sizes[:5])
    consumed = [one["consumed_samples"] for one in fixed.metrics()]
    assert consumed == list(range(begun + 8, SAMPLES + 1, 8)), "a batch that does not adapt is the plan's"


@pytest.mark.slow
def test_token_weights_count_in_the_halves(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path, 61)
    model = [
        *("model.family=transformer", "model.position_embedding_type=sinusoidal", "model.layers=2"),
        *("model.decoder_layers=2", "model.decoder_sequence_length=20", "model.hidden_dropout=0.3"),
    ]
    own = [*GROWING[:3], *GROWING[-10:], "model.attention_dropout=0.2", *model, "parallel.partition=null"]
    run = make_run(tmp_path / "run", pairs, *own, "parallel.data=2", "parallel.micro_batch_size=2", *SHARES)
    assert run.go() == 0, run.stderr()
    sizes = batches(run)
    found: list[tuple[float, float]] = []
    whole = make_run(tmp_path / "whole", pairs, *own, "parallel.data=1", "parallel.micro_batch_size=2").plan
    assert_equal(
        run, trained(whole, PairLoss(whole), batches=sizes, look=halves_in_one_process(run.plan, sizes, found))
    )
    measured = [one for one in decisions(run) if one["similarity"] is not None]
    assert [one["similarity"] for one in measured] == pytest.approx([one for one, _ in found], abs=1e-5)


def test_batch_norm_has_the_statistics_of_one_process(tmp_path: Path) -> None:
    images = make_images(tmp_path, 32)
    own = [
        *("model=resnet-tiny", "model.width=4", "model.image_size=32", "train.lr=1e-3", "train.comm_timeout_s=120"),
        *("parallel.partition=null", "parallel.pipeline=1", "parallel.micro_batch_size=4", "train.adam_eps=1e-5"),
        *("parallel.global_batch_size=16", "train.samples=120", "train.iterations=null", "train.log_interval=1"),
        *(
            "adapt.rule=similarity",
            "adapt.target=0.99",
            "adapt.upper=64",
            "adapt.every=1",
            "train.lr_warmup_iterations=0",
        ),
    ]
    one = make_run(tmp_path / "one", images, *own, "parallel.data=1", base=())
    two = make_run(tmp_path / "two", images, *own, "parallel.data=2", *SHARES, base=())
    assert one.go() == 0, one.stderr()
    assert two.go() == 0, two.stderr()
    assert batches(one) == batches(two) == [16, 24, 32, 40]
    np.testing.assert_allclose(one.losses(), two.losses(), rtol=1e-5)
    for name, tensor in one.weights().items():
        torch.testing.assert_close(two.weights()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_loss_scale_does_not_count_in_what_is_measured(engine_run: Callable[..., EngineRun]) -> None:
    own = [*GROWING, *LAYOUTS["two replicas"], "train.samples=32", "adapt.upper=8", "adapt.lower=8"]
    plain = engine_run(*own, name="plain")
    scaled = engine_run(*own, "train.precision=fp16", "train.loss_scaler=logmax", name="scaled")
    for run in (plain, scaled):
        assert run.go() == 0, run.stderr()
    assert scaled.metrics()[-1]["loss_scale"] > 2
    for a, b in zip(decisions(plain), decisions(scaled), strict=True):
        assert b["similarity"] == pytest.approx(a["similarity"], abs=0.02)
        assert b["noise_scale"] == pytest.approx(a["noise_scale"], rel=0.1)


def test_goodput_and_shares_follow_the_times_of_a_run(engine_run: Callable[..., EngineRun]) -> None:
    own = [word for word in GROWING if not word.startswith(("adapt.rate", "adapt.target", "adapt.rule"))]
    run = engine_run(*own, *LAYOUTS["shares 3-1"], "adapt.rule=goodput", "adapt.smoothing=1", "adapt.rebalance=true")
    assert run.go() == 0, run.stderr()
    timed = [one for one in decisions(run) if one["iteration_ms"] is not None]
    assert len(timed) >= 2
    for one in timed:
        assert len(one["micro_batch_ms"]) == 2
        work = [n * ms for n, ms in zip(one["shares_before"], one["micro_batch_ms"], strict=True)]
        assert 0 < max(work) < one["iteration_ms"]
    assert sum(batches(run)) == run.metrics()[-1]["consumed_samples"] <= SAMPLES
