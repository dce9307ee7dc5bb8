"""Every layout trains the same model: losses, weights and Adam's moments equal a plain single-process loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations, cycle, product
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from megatron_ext.contract.schedule.iteration import as_json
from megatron_ext.contract.schedule.schedules import NAMES
from megatron_ext.engine import engine
from megatron_ext.engine.gradients import flat
from megatron_ext.parallel import cross_entropy
from tests.megatron_ext.engine.executor.test_executor_soak import random_schedule
from tests.support import cases
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

LAYERS = 3
BATCH = 8
MOST_RANKS = cases.fewer(4, 8)
DROPOUT = ["model.hidden_dropout=0.3", "model.attention_dropout=0.2"]


def partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to lay `layers` out over `stages`, stages without layers included."""
    if stages == 1:
        return [(layers,)]
    return [(first, *rest) for first in range(layers + 1) for rest in partitions(layers - first, stages - 1)]


class Layout(NamedTuple):
    tensor: int | str
    data: int
    pipeline: int
    partition: str
    micro_batch_size: int
    sequence_parallel: bool = False
    recompute: str = "none"
    sharded_optimizer: bool = False
    schedule: str = "one_f_one_b"
    chunks: int = 1
    replicas: str = "null"
    streams: str = "null"

    def __str__(self) -> str:
        options = "-sequence" * self.sequence_parallel + "-sharded" * self.sharded_optimizer
        if self.recompute != "none":
            options += f"-recompute-{self.recompute}"
        if self.schedule != "one_f_one_b":
            options += f"-{self.schedule}"
        if self.replicas != "null":
            options += f"-replicas-{self.replicas}"
        if self.streams != "null":
            options += f"-streams-{self.streams}"
        return f"t{self.tensor}-d{self.data}-p{self.pipeline}-{self.partition}-micro{self.micro_batch_size}{options}"


def options(layout: Layout) -> set[object]:
    """What must occur: each option with a value, stages without layers at each end and between, and all at once."""
    empty = [layers == "0" for layers in layout.partition.split("-")]
    tensor = max(map(int, str(layout.tensor).split("-")))
    named = layout._replace(partition="", micro_batch_size=0, chunks=0, replicas=layout.replicas != "null")._asdict()
    sizes = (tensor > 1, layout.data > 1, layout.pipeline > 1)
    return {
        *named.items(),
        ("empty", empty[0], any(empty[1:-1]), empty[-1]),
        ("unlike", "-" in str(layout.tensor)),
        sizes,
    }


GRID = [
    *(
        Layout(1, data, stages, "-".join(map(str, partition)), micro)
        for stages in (1, 2, 3)
        for partition, (data, micro) in zip(
            partitions(LAYERS, stages), cycle([(1, 4), (2, 4), (1, 1), (2, 1)]), strict=False
        )
    ),
    Layout(1, 1, 1, "3", 8),
    Layout(1, 4, 1, "3", 2),
    Layout(1, 1, 4, "0-2-0-1", 1),
    Layout(1, 2, 4, "0-1-2-0", 2),
    Layout(1, 4, 2, "1-2", 1),
    *(Layout(tensor, 1, 1, "3", 4, sequence) for tensor, sequence in product((2, 4), (False, True))),
    *(Layout(2, 2, 2, partition, 2, sequence) for partition, sequence in product(("1-2", "0-3"), (False, True))),
    Layout(2, 1, 3, "0-3-0", 1, True),
    Layout(4, 1, 2, "2-1", 2, True),
    Layout(1, 4, 1, "3", 2, sharded_optimizer=True),
    Layout(1, 2, 3, "0-3-0", 1, sharded_optimizer=True),
    Layout(2, 2, 2, "1-2", 2, True, "full", True),
    Layout(1, 2, 2, "2-1", 2, recompute="full:1"),
    Layout(2, 1, 2, "0-3", 2, True, "full:2", schedule="zb_h1"),
    Layout(1, 1, 2, "1-0-0-2", 2, recompute="full:1", schedule="interleaved", chunks=2),
    *(Layout(1, 2, 2, "1-2", 1, schedule=schedule) for schedule in ("gpipe", "zb_h1")),
    Layout(2, 2, 2, "2-1", 1, True, "full", True, schedule="zb_h1"),
    Layout(1, 2, 2, "0-2-0-0-1-0", 1, schedule="interleaved", chunks=3),
    Layout(1, 1, 3, "1-0-0-1-1-0", 1, schedule="interleaved", chunks=2),
    Layout(1, 1, 4, "0-0-1-0-1-0-1-0", 8, schedule="interleaved", chunks=2),
    Layout(2, 2, 2, "1-0-1-1", 1, True, "selective", True, schedule="interleaved", chunks=2),
]


def legal_layouts(random: Random) -> Iterator[Layout]:
    """Every way to combine the options on few ranks, each with some partition."""
    sizes, options = product((1, 2, 4), (1, 2, 4), (1, 2, 3, 4), (1, 2, 4, 8)), ("none", "selective", "full")
    for tensor, data, stages, micro in sizes:
        if tensor * data * stages > MOST_RANKS or BATCH % (data * micro):
            continue
        for recompute, schedule in product(options, NAMES):
            if schedule == "interleaved" and stages == 1:
                continue
            for sequence, sharded in product({False, tensor > 1}, {False, data > 1}):
                chunks = random.randint(2, 3) if schedule == "interleaved" else 1
                partition = "-".join(map(str, random.choice(partitions(LAYERS, stages * chunks))))
                yield Layout(tensor, data, stages, partition, micro, sequence, recompute, sharded, schedule, chunks)


def met(layout: Layout) -> set[tuple[object, object]]:
    """All pairs of options that meet in a layout."""
    options = layout._replace(partition="", chunks=0, micro_batch_size=BATCH // layout.data // layout.micro_batch_size)
    return set(combinations(options._asdict().items(), 2))


def all_pairs() -> list[Layout]:
    """Few layouts in which every option meets every other one that it can meet at all."""
    random = Random(0)
    every = {layout: met(layout) for layout in legal_layouts(random)}
    missing = set().union(*every.values())
    chosen = []
    while missing:
        chosen.append(max(every, key=lambda layout: len(every[layout] & missing)))
        missing -= every[chosen[-1]]
    return chosen


def first(number: int, layouts: list[Layout]) -> list[ParameterSet]:
    """All of them, and `make test-fast` tries the first."""
    return [pytest.param(layout, marks=[pytest.mark.fast] * (at < number)) for at, layout in enumerate(layouts)]


ONE = ["parallel.data=1", "parallel.pipeline=1", "parallel.partition=null", "parallel.micro_batch_size=8"]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Losses and, as a checkpoint has it, final state of a textbook loop: one module, torch's AdamW and clipping."""
    return textbook(make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *ONE).plan, corpus)


@pytest.fixture(scope="module")
def with_dropout(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """The same with dropout."""
    return textbook(make_run(tmp_path_factory.mktemp("dropout") / "run", corpus, *ONE, *DROPOUT).plan, corpus)


@pytest.mark.parametrize("layout", cases.covering(GRID, options), ids=str)
def test_losses_and_weights_equal_the_single_process(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    layout: Layout,
) -> None:
    run = engine_run(*(f"parallel.{key}={value}" for key, value in layout._asdict().items()))
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)


@pytest.mark.parametrize("layout", first(12, all_pairs()), ids=str)
def test_every_two_options_agree_with_dropout_and_gradients_summed_in_buckets_during_the_backward_pass(
    engine_run: Callable[..., EngineRun],
    with_dropout: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # the ranks are forked from this process
    run = engine_run(*DROPOUT, *(f"parallel.{key}={value}" for key, value in layout._asdict().items()))
    assert run.go() == 0, run.stderr()
    assert_equal(run, with_dropout)


@pytest.mark.parametrize("layout", [Layout(1, 1, 2, "1-2", 2), Layout(2, 1, 2, "1-2", 2)], ids=str)
def test_a_loss_of_many_logits_taken_some_at_a_time_is_the_same(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
) -> None:
    monkeypatch.setattr(cross_entropy, "PART", 200)
    test_losses_and_weights_equal_the_single_process(engine_run, reference, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 2, 2, "1-2", 1),
        Layout(2, 1, 2, "1-2", 2, True, "full"),
        Layout(1, 1, 1, "3", 4, recompute="selective"),
    ],
    ids=str,
)
def test_gradients_that_their_matrix_product_adds_as_on_a_gpu_are_the_same(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
) -> None:
    monkeypatch.setattr(flat, "fuses", lambda dtype, device: True)
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)
    test_losses_and_weights_equal_the_single_process(engine_run, reference, layout)


@pytest.mark.parametrize(
    "layout",
    [Layout(1, 2, 2, "1-2", 1), Layout(2, 1, 2, "1-2", 2, True, "full"), Layout(1, 1, 3, "1-1-1", 2, schedule="zb_h1")],
    ids=str,
)
def test_gradients_of_large_weights_that_a_cpu_adds_in_place_are_the_same(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
) -> None:
    monkeypatch.setattr(flat, "LARGE", 1)
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)
    test_losses_and_weights_equal_the_single_process(engine_run, reference, layout)


def test_a_schedule_from_a_file_trains_the_same_model(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
) -> None:
    text = json.dumps(as_json(random_schedule(Random(5), 2, 2, 4), 2, 4))
    own = ("parallel.schedule_file=mine.json", "parallel.chunks=2", "parallel.partition=1-0-2-0")
    run = engine_run("parallel.pipeline=2", "parallel.data=1", "parallel.micro_batch_size=2", *own)
    run.run.schedule.write_text(text)
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)
    run = engine_run("parallel.pipeline=2", "parallel.data=1", "parallel.micro_batch_size=1", *own, name="other")
    run.run.schedule.write_text(text)
    assert run.go() == 1
    assert "schedule.json: micro_batches=4, but the plan has 8" in run.stderr()


def assert_equal(run: EngineRun, reference: tuple[np.ndarray, dict[str, torch.Tensor]]) -> None:
    losses, state = reference
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-5)
    found = run.state()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        tolerance = 1e-5 if name.startswith("weights/") else 1e-3 * tensor.abs().max().item()
        expected = tensor[:VOCAB] if name.endswith("embedding.word") else tensor  # its padding is never used
        torch.testing.assert_close(
            found[name], expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
