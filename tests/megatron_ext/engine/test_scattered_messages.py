"""Messages of which each rank of a tensor group sends a part: every schedule equals one process, with fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.engine.executor.messages import Content, Message
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT, ONE, Layout, assert_equal
from tests.megatron_ext.engine.test_traffic import sent
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

Engine = Callable[..., EngineRun]
SCATTER = "parallel.scatter_messages=true"
LAYOUTS = [
    Layout(2, 1, 2, "1-2", 1, schedule="gpipe"),
    Layout(2, 1, 3, "0-3-0", 1),
    Layout(2, 2, 2, "1-2", 2, sharded_optimizer=True),
    Layout(2, 1, 2, "1-1-1-0", 2, schedule="interleaved", chunks=2),
    Layout(2, 1, 2, "2-1", 2, schedule="zb_h1"),
    Layout(2, 1, 2, "2-1", 2, schedule="model_parallel"),
    Layout(4, 1, 2, "2-1", 2, recompute="full"),
    Layout(2, 1, 2, "1-2", 2, replicas="2-1"),
]


@pytest.fixture(scope="module")
def with_dropout(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    return textbook(make_run(tmp_path_factory.mktemp("dropout") / "run", corpus, *ONE, *DROPOUT).plan, corpus)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_weights_equal_the_single_process(
    engine_run: Engine, with_dropout: tuple[np.ndarray, dict[str, torch.Tensor]], layout: Layout
) -> None:
    """With dropout, and with replicas that differ by stage."""
    words = [f"parallel.{key}={value}" for key, value in layout._asdict().items()]
    run = engine_run(*DROPOUT, SCATTER, *words)
    assert run.plan.scattered_cuts == [*range(layout.pipeline - (layout.chunks == 1))]
    assert run.go() == 0, run.stderr()
    assert_equal(run, with_dropout)


def test_each_rank_sends_its_part_and_the_group_gathers_it(engine_run: Engine) -> None:
    """What crosses the cut is half with two ranks; they hand each other as much."""
    words = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.data=1")
    whole, parts = sent(engine_run(*words)), sent(engine_run(*words, SCATTER, name="scattered"))
    assert whole[0]["activations"] == 2 * parts[0]["activations"] > 0
    assert whole[2]["gradients"] == 2 * parts[2]["gradients"] > 0
    for rank, received in ((0, "gradients"), (2, "activations")):
        sender = 2 - rank
        assert parts[rank]["tensor"] - whole[rank]["tensor"] == parts[sender][received]


@pytest.mark.parametrize("words", [["parallel.compress=int8"], ["train.precision=bf16"]], ids=str)
def test_scattered_messages_change_no_number(engine_run: Engine, words: list[str]) -> None:
    """Compressed ones are scattered as they are sent."""
    sizes = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.data=1", *words)
    whole, parts = engine_run(*sizes), engine_run(*sizes, SCATTER, name="scattered")
    for run in (whole, parts):
        assert run.go() == 0, run.stderr()
    assert whole.losses().tolist() == parts.losses().tolist()


@pytest.mark.parametrize("numel", [1, 5, 8])
def test_parts_together_are_the_whole(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"x": torch.arange(float(numel)), "y": torch.arange(3.0)}
    contents = [Content(name, tuple(tensor.shape), tensor.dtype, True) for name, tensor in whole.items()]
    groups = [Message(contents, torch.device("cpu"), TensorGroup(4, rank), True) for rank in range(4)]
    packed = [group.pack(whole) for group in groups]
    assert all(part.shape == like.shape for part, like in zip(packed[3], groups[3].likes, strict=True))

    def gathered(own: torch.Tensor, parts: torch.Tensor, *_: object) -> None:
        for rank in range(4):
            parts[rank] = packed[rank][0]

    monkeypatch.setattr("megatron_ext.engine.executor.messages.all_gather", gathered)
    found = groups[1].unpack(packed[1])
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["parallel.tensor=1", "parallel.pipeline=2"], "no tensor group sends a message"),
        (["parallel.tensor=2", "parallel.pipeline=1"], "no tensor group sends a message"),
        (["parallel.tensor=2-1", "parallel.pipeline=2"], "needs one parallel.tensor for all stages"),
        (["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence_parallel=true"], "sends its part alone"),
        (["parallel.tensor=2", "parallel.pipeline=2", "engine=megatron_core"], "megatron_core, which sends whole"),
        (["parallel.scatter_messages=maybe"], "must be one of false, true, auto"),
    ],
    ids=str,
)
def test_what_cannot_be_scattered_is_refused(words: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        compose(["experiment=demo", SCATTER, *words])
