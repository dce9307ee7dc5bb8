"""Micro-batches whose size changes while the run goes on, and copies of the model that take them beside each other:
whoever takes which, one process trains the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.contract.adaptive.controller import Controller, Decision
from megatron_ext.contract.schedule.iteration import SampleDivision, dealt, firsts, several
from megatron_ext.engine import engine
from tests.megatron_ext.engine.test_adaptive_agrees import GROWING, batches, decisions
from tests.megatron_ext.engine.test_layouts_agree import assert_equal
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.images import make_images, plainly_trained
from tests.support.megatron_ext.pairs import PairLoss, write_pairs
from tests.support.megatron_ext.textbook import textbook, trained

DIVISIONS = [
    SampleDivision((2, 2), (2, 2)),
    SampleDivision((2, 1), (2, 4)),
    SampleDivision((1, 3), (4, 4)),
    SampleDivision((3, 1), (4, 6)),
    SampleDivision((2, 2), (2, 6)),
]
"""One after another: the same batch in unlike micro-batches, larger ones of one size, and unlike ones that are no
halves and doubles of each other."""
IN_STREAMS = [
    SampleDivision((2, 2), (2, 2)),
    SampleDivision((2, 1), (2, 4), (2, 1)),
    SampleDivision((5, 3), (2, 2), (3, 2)),
    SampleDivision((3, 1), (4, 6), (1, 2)),
    SampleDivision((4, 3), (2, 4), (3, 3)),
]
"""More and fewer copies, of which the last round leaves some without work."""
SIZED = [
    *(word for word in GROWING if not word.startswith("train.samples")),
    *("train.samples=136", "parallel.data=2", "parallel.micro_batch_size=2", "adapt.rebalance=true"),
    "adapt.micro_batch_sizes=[4,6]",
]
STREAMS = "adapt.streams=[2,3]"


def decide_in_turn(patch: pytest.MonkeyPatch, divisions: Sequence[SampleDivision]) -> None:
    """Has rank 0 of the runs to come, which are forked from this process, decide for the next one each time."""
    really = Controller.decide

    def decide(self: Controller, shares: tuple, *measured: object) -> Decision:
        found = really(self, shares, *measured)
        now = SampleDivision(shares, measured[-2], several(measured[-1]))
        after = dict(pairwise(divisions)).get(now, now)
        return found._replace(shares=after.shares, sizes=after.sizes, streams=after.copies, reason="in turn")

    patch.setattr(Controller, "decide", decide)


def divided(run: EngineRun) -> list[SampleDivision]:
    """How each iteration was, by what was decided."""
    made, found = decisions(run), []
    for iteration in range(1, len(run.metrics()) + 1):
        after = [one for one in made if one["iteration"] >= iteration]
        which = (after[0], "_before") if after else (made[-1], "")
        shares, sizes, streams = (which[0][key + which[1]] for key in ("shares", "micro_batch_sizes", "streams"))
        found.append(SampleDivision(tuple(shares), tuple(sizes), several(streams)))
    return found


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_in_turn(monkeypatch, DIVISIONS)
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass


@pytest.mark.usefixtures("sized")
def test_stages_with_micro_batches_of_changing_sizes_train_what_one_process_does(
    engine_run: Callable[..., EngineRun], corpus: Path
) -> None:
    """Also where the run goes on from a checkpoint before a change, and from one behind it."""
    own = [
        *(*SIZED, "parallel.pipeline=2", "parallel.partition=1-2", "parallel.schedule=zb_h1"),
        *("train.save_interval=1", "train.keep_checkpoints=99"),
    ]
    run = engine_run(*own)
    assert run.go() == 0, run.stderr()
    made, sizes = divided(run), batches(run)
    assert made == [*(division for division in DIVISIONS for _ in range(2)), SampleDivision((1, 1), (2, 2))]
    assert sizes == [division.samples for division in made]
    whole = engine_run(*SIZED, "parallel.data=1", name="whole").plan
    found: list[float] = []

    def look(first: int, gradient: Callable[[torch.Tensor], torch.Tensor]) -> None:
        division = made[len(look_at)]
        look_at.append(first)
        if len(look_at) % 2:
            return
        rows = first + torch.arange(division.samples)
        odd = torch.zeros(division.samples, dtype=torch.bool)
        begins = [*firsts(division), division.samples]
        for begin, end in list(pairwise(begins))[1::2]:
            odd[begin:end] = True
        a, c = gradient(rows[~odd]).double(), gradient(rows[odd]).double()
        found.append(float(a @ c) / float(a.norm() * c.norm()))

    look_at: list[int] = []
    oracle = textbook(whole, corpus, sizes, look)
    assert_equal(run, oracle)
    measured = [one["similarity"] for one in decisions(run) if one["similarity"] is not None]
    assert measured == pytest.approx(found, abs=1e-5)
    for iteration in (3, 4):  # the one before a change, whose decision comes later; and that of a decision
        (run.run.checkpoints / "latest").write_text(f"iter_{iteration:07d}\n")
        run.run.goal.unlink()
        assert run.go() == 0, run.stderr()
        assert divided(run) == made
        assert_equal(run, oracle)


def test_copies_of_the_model_that_come_and_go_train_what_one_process_does(
    engine_run: Callable[..., EngineRun], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run goes on from a checkpoint before a change, and from one behind it."""
    decide_in_turn(monkeypatch, IN_STREAMS)
    run = engine_run(*SIZED, STREAMS, "train.save_interval=1", "train.keep_checkpoints=99")
    assert run.go() == 0, run.stderr()
    made, sizes = divided(run), batches(run)
    assert {*IN_STREAMS} <= {*made}
    oracle = textbook(engine_run(*SIZED, "parallel.data=1", name="whole").plan, corpus, sizes)
    assert_equal(run, oracle)
    for iteration in (5, 6):
        (run.run.checkpoints / "latest").write_text(f"iter_{iteration:07d}\n")
        run.run.goal.unlink()
        assert run.go() == 0, run.stderr()
        assert divided(run) == made
        assert_equal(run, oracle)


def test_token_weights_count_in_micro_batches_of_any_size_and_in_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_in_turn(monkeypatch, IN_STREAMS)
    pairs = write_pairs(tmp_path, 61)
    model = [
        *("model.family=transformer", "model.position_embedding_type=sinusoidal", "model.layers=2"),
        *("model.decoder_layers=2", "model.decoder_sequence_length=20", "model.hidden_dropout=0.3"),
        *("model.attention_dropout=0.2", "parallel.partition=null", "parallel.pipeline=1", STREAMS),
    ]
    own = [word for word in SIZED if not word.startswith(("model.", "parallel.pipeline"))]
    run = make_run(tmp_path / "run", pairs, *own, *model)
    assert run.go() == 0, run.stderr()
    whole = make_run(tmp_path / "whole", pairs, *own, *model, "parallel.data=1", "parallel.pipeline=1").plan
    assert {*IN_STREAMS} <= {*divided(run)}
    assert_equal(run, trained(whole, PairLoss(whole), batches=batches(run)))


def test_a_batch_norm_sees_the_micro_batches_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_in_turn(monkeypatch, IN_STREAMS)
    own = [
        *("model=resnet-tiny", "model.width=4", "model.image_size=32", "train.lr=1e-3", "train.comm_timeout_s=120"),
        *("parallel.partition=null", "parallel.pipeline=1", "parallel.data=2", "parallel.micro_batch_size=2"),
        *("parallel.global_batch_size=8", "train.samples=136", "train.iterations=null", "train.log_interval=1"),
        *("adapt.rule=similarity", "adapt.upper=64", "adapt.every=2", "train.lr_warmup_iterations=0"),
        *("adapt.lower=4", "adapt.rebalance=true", "adapt.micro_batch_sizes=[4,6]", "train.adam_eps=1e-5", STREAMS),
    ]
    run = make_run(tmp_path / "run", make_images(tmp_path, 32), *own, base=())
    assert run.go() == 0, run.stderr()
    made = divided(run)
    assert {*IN_STREAMS} <= {*made}
    losses, state = plainly_trained(run.plan, made)
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-5)
    for name, tensor in run.state().items():
        if name.startswith("state/"):
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-5)


def test_samples_follow_each_other_as_micro_batches_are_dealt() -> None:
    division = SampleDivision((2, 1), (2, 4))
    assert dealt(division.shares) == (0, 1, 0)
    assert firsts(division) == (0, 2, 6)
    assert division.samples == 8
