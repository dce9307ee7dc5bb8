"""A run that is interrupted and resumed, under whatever layout, trains as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.worker import SAVED
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Position, Split
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.log import keep_lines
from megatron_ext.engine.results import StepResult
from megatron_ext.parallel import interruption
from tests.support import cases
from tests.support.megatron_ext.checkpoints import resave
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run

ITERATIONS = 9
WHOLE = (
    f"train.iterations={ITERATIONS}",
    "train.save_interval=2",
    "parallel.data=2",
    "parallel.pipeline=2",
    "parallel.partition=1-2",
    "parallel.micro_batch_size=2",
)
LAYOUTS = {
    "same": (),
    "partition": ("parallel.partition=3-0",),
    "one-rank": ("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3"),
    "data": ("parallel.data=4", "parallel.micro_batch_size=1"),
    "tensor": ("parallel.data=1", "parallel.tensor=2"),
    "pipeline": ("parallel.data=1", "parallel.pipeline=4", "parallel.partition=0-1-2-0"),
    "chunks": ("parallel.data=1", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-1-0-1"),
    "sharded-optimizer": ("parallel.sharded_optimizer=true",),
    "micro-batch": ("parallel.micro_batch_size=1",),
    "all-at-once": (
        "parallel.tensor=2",
        "parallel.data=2",
        "parallel.pipeline=1",
        "parallel.partition=3",
        "parallel.sharded_optimizer=true",
        "parallel.sequence_parallel=true",
    ),
}
PAIRS = [
    ("same", "same"),
    ("all-at-once", "chunks"),
    ("partition", "one-rank"),
    ("tensor", "data"),
    ("pipeline", "micro-batch"),
    ("sharded-optimizer", "all-at-once"),
]
"""Each layout saves or goes on from what another one has saved; a checkpoint does not know of its layout."""


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    run = make_run(tmp_path_factory.mktemp("uninterrupted") / "run", corpus, *WHOLE)
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Has one rank of the following runs die, as if its node lost power, when it begins an iteration."""

    def arm(rank: int, fatal: int) -> None:
        step = Engine.step

        def until(self: Engine, iteration: int) -> StepResult:
            if iteration == fatal and self._place.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, iteration)

        monkeypatch.setattr(Engine, "step", until)

    yield arm
    monkeypatch.undo()


def assert_same(found: EngineRun, expected: EngineRun, tolerance: float) -> None:
    assert [line["iteration"] for line in found.metrics()] == list(range(1, expected.plan.train.iterations + 1))
    assert [line["consumed_samples"] for line in found.metrics()] == [
        line["consumed_samples"] for line in expected.metrics()
    ]
    np.testing.assert_allclose(found.losses(), expected.losses(), rtol=0, atol=tolerance)
    state = expected.state()
    assert found.state().keys() == state.keys()
    for name, tensor in found.state().items():
        torch.testing.assert_close(
            tensor, state[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*pair, marks=[pytest.mark.fast] * (pair in PAIRS[:2]))
        for pair in cases.drawn(product(LAYOUTS, LAYOUTS), 0, always=PAIRS)
    ],
    ids=lambda layout: layout,
)
def test_killed_at_a_random_iteration_and_resumed_under_another_layout_it_trains_the_same(
    engine_run: Callable[..., EngineRun],
    uninterrupted: EngineRun,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: Callable[[int, int], None],
    before: str,
    after: str,
) -> None:
    where = random.Random(f"{before} {after}")
    run = engine_run(*WHOLE, *LAYOUTS[before])
    killed_at(where.randrange(run.plan.world_size), where.randint(3, ITERATIONS))
    assert run.go() == 1
    assert [error["type"] for error in run.errors() if not error["symptom"]] == ["Killed"]
    assert 2 <= Checkpoint.at(run.run.path).meta.iteration < ITERATIONS
    monkeypatch.undo()
    resumed = run.replan(*WHOLE, *LAYOUTS[after])
    assert resumed.go() == 0, resumed.stderr()
    assert not [error for error in resumed.errors() if error["rank"] < resumed.plan.world_size]
    assert_same(resumed, uninterrupted, 0.0 if before == after == "same" else 1e-5)


@pytest.fixture
def asked_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Has one rank of the following runs be asked to save and end while it is busy with an iteration."""

    def arm(rank: int, when: int) -> None:
        step = Engine.step

        def until(self: Engine, iteration: int) -> StepResult:
            if iteration == when and self._place.rank == rank:
                os.kill(os.getpid(), interruption.SIGNAL)
            return step(self, iteration)

        monkeypatch.setattr(Engine, "step", until)

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize("layout", ["same", "sharded-optimizer", "all-at-once"])
def test_asked_to_end_all_ranks_save_after_the_same_iteration_and_later_go_on(
    engine_run: Callable[..., EngineRun],
    uninterrupted: EngineRun,
    monkeypatch: pytest.MonkeyPatch,
    asked_at: Callable[[int, int], None],
    layout: str,
) -> None:
    """Only one rank is asked; nothing is due to be saved at that iteration. Shares add up the norm in their order."""
    run = engine_run(*WHOLE, *LAYOUTS[layout], "train.save_interval=null", "train.save_async=true")
    asked_at(1, 4)
    assert run.go() == SAVED, run.stderr()
    assert not run.errors()
    states = json.loads(run.run.node_ranks("local-0").read_text())
    assert [state["exit_code"] for state in states] == [SAVED] * len(states)
    assert Checkpoint.at(run.run.path).meta.iteration == 5
    monkeypatch.undo()
    assert run.go() == 0, run.stderr()
    assert_same(run, uninterrupted, 0.0 if layout == "same" else 1e-5)


def test_asked_during_the_last_iteration_a_run_just_ends(
    engine_run: Callable[..., EngineRun], asked_at: Callable[[int, int], None]
) -> None:
    run = engine_run(*WHOLE)
    asked_at(0, ITERATIONS)
    assert run.go() == 0, run.stderr()
    assert Checkpoint.at(run.run.path).meta.iteration == ITERATIONS


def test_fp16_goes_on_with_its_loss_scale(
    engine_run: Callable[..., EngineRun],
    monkeypatch: pytest.MonkeyPatch,
    killed_at: Callable[[int, int], None],
) -> None:
    """Overflows halve the scale at first; killed among them, and again when the weights begin to move, it is the same
    to the last bit; after a third time another layout goes on, with other roundings."""
    options = ("train.precision=fp16", "train.iterations=24", "train.save_interval=3", *LAYOUTS["sharded-optimizer"])
    whole, run = (engine_run(*WHOLE, *options, name=name) for name in ("whole", "interrupted"))
    assert whole.go() == 0, whole.stderr()
    for fatal in (4, 20, 22):
        killed_at(1, fatal)
        assert run.go() == 1
        monkeypatch.undo()
    expected, found = whole.metrics(), run.metrics()
    scales = [line["loss_scale"] for line in expected]
    assert scales[0] > scales[-1]
    assert expected[19]["learning_rate"] > 0
    assert [line["loss"] for line in found[:21]] == [line["loss"] for line in expected[:21]]
    other = run.replan(*WHOLE, *options, *LAYOUTS["all-at-once"])
    assert other.go() == 0, other.stderr()
    assert [line["loss_scale"] for line in other.metrics()] == scales
    assert_same(other, whole, 1e-3)


def test_a_run_that_ended_well_has_nothing_left_to_do(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run()
    assert run.go() == 0, run.stderr()
    metrics, state = run.metrics(), run.state()
    assert run.go() == 0, run.stderr()
    assert run.metrics() == metrics
    assert all(torch.equal(tensor, state[name]) for name, tensor in run.state().items())


def test_events_of_every_start_are_kept(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run()
    for _ in range(3):
        assert run.go() == 0, run.stderr()
    expected = ["rank-00000.1.bin", "rank-00000.2.bin", "rank-00000.bin"]
    assert sorted(path.name for path in run.run.events.glob("rank-00000*")) == expected
    trained = len((run.run.events / "rank-00000.1.bin").read_bytes())
    assert trained > len((run.run.events / "rank-00000.2.bin").read_bytes())


@pytest.mark.parametrize("named", ["run", "checkpoints", "iteration"])
def test_another_run_goes_on_from_a_checkpoint_at_the_exact_sample_whatever_its_batch_size(
    engine_run: Callable[..., EngineRun], named: str
) -> None:
    first = engine_run("train.save_interval=2", "train.keep_checkpoints=9", name="first")
    assert first.go() == 0, first.stderr()
    load, start = {
        "run": (first.run.path, 4),
        "checkpoints": (first.run.checkpoints, 4),
        "iteration": (first.run.checkpoints / "iter_0000002", 2),
    }[named]
    next_ = engine_run(f"train.load={load}", "train.iterations=6", "parallel.global_batch_size=4", name="next")
    assert next_.go() == 0, next_.stderr()
    consumed = [(line["iteration"], line["consumed_samples"]) for line in next_.metrics()]
    assert consumed == [(n, 8 * start + 4 * (n - start)) for n in range(start + 1, 7)]
    assert Checkpoint.at(next_.run.path).meta.consumed_samples == consumed[-1][1]
    assert next_.replan("parallel.global_batch_size=4", "train.iterations=7").go() == 0  # its own, not train.load


@given(start=st.integers(0, 6), samples=st.integers(0, 40), batch=st.sampled_from((2, 4, 8)))
def test_batches_after_a_start_are_the_samples_that_were_not_consumed(
    corpus: Path, start: int, samples: int, batch: int
) -> None:
    position, every = Position(start, samples), GptSamples(corpus, Split(80, 1), 24, VOCAB)
    for iteration in (start + 1, start + 2):
        first = position.consumed(iteration - 1, batch)
        wanted = [every.tokens(sample) for sample in range(first, first + batch)]
        found = every.batch(position.share(iteration, np.arange(batch // 2), batch, 2))["tokens"].reshape(batch, -1)
        np.testing.assert_array_equal(found, wanted)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def resaved(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """The part is as it might be if it had been saved so."""

    def rewrite(path: Path) -> None:
        resave(path.parent, lambda part, tensors: change(tensors) if part == path.stem else tensors)

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "stage", "message"),
    [
        (Path.unlink, 0, "layer-00002.safetensors: cannot be read: .*No such file"),
        (
            flip,
            1,
            "layer-00002.safetensors: damaged: expected the CRC-32 [0-9a-f]{8} after the header, found [0-9a-f]{8}",
        ),
        (
            resaved(lambda tensors: {k: v for k, v in tensors.items() if k != "adam_v/mlp_in.bias"}),
            1,
            r"layer-00002.safetensors: expected a tensor adam_v/mlp_in.bias of shape \[128\] in fp32, found none",
        ),
        (
            resaved(lambda tensors: {**tensors, "weights/qkv.weight": torch.zeros(96, 31)}),
            1,
            r"expected a tensor weights/qkv.weight of shape \[96, 32\] in fp32, found \[96, 31\] of torch.float32",
        ),
    ],
    ids=["missing", "bit-flipped", "without-a-tensor", "other-shape"],
)
def test_a_damaged_part_is_named_by_the_ranks_that_need_it_or_before_by_rank_0(
    engine_run: Callable[..., EngineRun], uninterrupted: EngineRun, tmp_path: Path, spoil, stage: int, message: str
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(Checkpoint.at(uninterrupted.run.path).folder, folder)
    spoil(folder / "layer-00002.safetensors")
    run = engine_run(
        *WHOLE, *LAYOUTS["tensor"], f"train.load={folder}", "train.iterations=12", "train.comm_timeout_s=5"
    )
    assert run.go() == 1
    causes = [error for error in run.errors() if not error["symptom"]]
    assert {error["stage"] for error in causes} == {stage}
    assert all(re.search(message, error["message"]) for error in causes)
    assert "Traceback" not in run.stderr()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.layers=4",), "a checkpoint of another model: expected layers=4; found layers=3"),
        (("model.hidden=16", "model.heads=2"), "expected hidden=16, heads=2; found hidden=32, heads=4"),
        (("model.vocab_size=70",), "expected vocab_size=70; found vocab_size=61"),
        ((f"train.iterations={ITERATIONS}",), "nothing is left to train; use more iterations"),
        (
            ("train.iterations=100",),
            "cannot continue at its sample 72, because the samples come in another order: expected epochs=1",
        ),
        (("train.seed=7",), "come in another order: expected seed=1234; found seed=7"),
        (("train.load=/nowhere",), "train.load=/nowhere: no checkpoint found; give a run folder"),
    ],
    ids=["layers", "hidden", "vocabulary", "at-its-end", "more-epochs", "seed", "nothing-there"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_what_was_expected_and_found(
    engine_run: Callable[..., EngineRun], uninterrupted: EngineRun, overrides: tuple[str, ...], message: str
) -> None:
    run = engine_run(
        "parallel.data=1",
        "parallel.pipeline=1",
        f"train.load={uninterrupted.run.path}",
        "train.iterations=12",
        *overrides,
    )
    assert run.go() == 1
    assert [message in error["message"] for error in run.errors() if not error["symptom"]] == [True]
    assert "Traceback" not in run.stderr()
    assert not run.run.metrics.exists()


def described(**changes: object) -> str:
    """meta.json."""
    content = {"version": 2, "iteration": 4, "consumed_samples": 16, "updates": 4, "scaler": None, "order": None}
    return json.dumps(content | {"model": {"layers": 4}} | changes)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"../iter_0000004", b"/", b"iter_\0", b"x" * 5000],
    ids=["bytes", "path", "root", "zero", "long"],
)
def test_what_names_no_checkpoint_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(EngineError, match=rf"^{tmp_path}/latest: (names|cannot be read as the name of a checkpoint)"):
        Checkpoint.at(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "meta.json: cannot be read as a checkpoint's description"),
        ("{", "meta.json: cannot be read as a checkpoint's description"),
        ('{"version": 1}', "expected a checkpoint of version 3, found version 1"),
        ("[]", "expected a checkpoint of version 3, found version None"),
        ('{"version": 2, "iteration": 4}', "damaged: expected the keys of version 2"),
        ("[" * 10**5, "cannot be read as a checkpoint's description: too deep"),
        (described(iteration="4"), 'damaged: expected the keys of version 2: iteration="4" must be a whole number'),
        (described(updates=-1), "damaged: updates=-1 must be at least 0"),
        (described(model=[4]), r"damaged: .*: model=\[4\] must be a JSON object"),
        (described(model={"layers": 1.5}), r"damaged: .*: model.layers=1.5 must be a whole number"),
        (described(scaler={"scale": 1}), "damaged: .*: scaler.good is missing"),
    ],
    ids=[
        *(
            "missing",
            "cut",
            "other-version",
            "no-object",
            "without-keys",
            "deep",
            "text",
            "negative",
            "list",
            "fraction",
        ),
        "scaler",
    ],
)
def test_a_damaged_description_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    (tmp_path / "latest").write_text("iter_0000004\n")
    (tmp_path / "iter_0000004").mkdir()
    if content is not None:
        (tmp_path / "iter_0000004" / "meta.json").write_text(content)
    with pytest.raises(EngineError, match=message):
        Checkpoint.at(tmp_path)


def test_metrics_of_iterations_that_are_trained_anew_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 2}\n{"iteration": 4}\n{"iteration": 6}\n{"itera')
    keep_lines(path, 4)
    assert path.read_text() == '{"iteration": 2}\n{"iteration": 4}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_start_goes_on_after_lines_that_a_failed_node_has_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"iteration": 2}\n\xff{"iter\n\0\0\0{"iteration": 3}\n[1]\n'
    path.write_bytes(damaged + b'\0\0{"iteration": 6}\n\0\0\0')
    keep_lines(path, 4)
    assert path.read_bytes() == damaged
