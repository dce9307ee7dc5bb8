"""Images that other processes prepare are those that the rank itself would prepare, and no process outlives it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.contract.errors import DataError, EngineError
from megatron_ext.data import ahead
from megatron_ext.data.ahead import Ahead, helpers_of
from megatron_ext.data.samples import Samples, Split
from megatron_ext.data.vision.images import ImageSamples
from megatron_ext.engine import engine
from megatron_ext.timeline.progress import process_state
from reports.facts.statistics import statistics
from reports.path.change import Cause
from reports.path.why import Why, explain
from reports.readers import record
from reports.readers.events import read_run
from tests.megatron_ext.data.vision.test_images import ALL, MODEL, SIZE
from tests.megatron_ext.engine.test_images_agree import AUGMENT, BASE
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.images import make_images

CPU = torch.device("cpu")
MINUTES = 120.0


@pytest.fixture(autouse=True)
def small_micro_batches_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SMALLEST", 1)


@pytest.fixture
def helped() -> Iterator[Callable[[int], Ahead]]:
    made: list[Ahead] = []

    def make(helpers: int) -> Ahead:
        made.append(Ahead(helpers, CPU))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return make_images(tmp_path, SIZE, channels=3, count=24)


def samples(prefix: Path, split: str = "train", length: int = 10**6) -> ImageSamples:
    return ImageSamples(prefix, Split(length, 1, name=split), MODEL, ALL)


def rows(first: int, micro_batches: int, size: int) -> np.ndarray:
    return first + np.arange(micro_batches * size).reshape(micro_batches, size)


def following(first: int, size: int) -> Iterator[np.ndarray]:
    return (first + number * size + np.arange(size) for number in count())


def assert_same(found: Iterator[dict[str, torch.Tensor]], of: Samples, numbers: np.ndarray) -> None:
    for held, each in zip(found, numbers, strict=True):
        expected = of.batch(each)
        assert held.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(held[name].numpy(), array)


def pids(of: Ahead) -> list[int]:
    return [helper._pid for helper in of._helpers]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + MINUTES
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("helpers", [1, 3])
def test_micro_batches_are_the_same_whoever_prepares_them_and_whatever_was_announced(
    prefix: Path, helped: Callable[[int], Ahead], helpers: int
) -> None:
    """In steady state; after a change of the batch's size, and of the micro-batch's; for a replica that takes every
    other one; and with an evaluation in between."""
    prepares, train, valid = helped(helpers), samples(prefix), samples(prefix, "valid", 20)
    for first in (0, 12, 24):
        numbers = rows(first, 3, 4)
        assert_same(prepares.take(train, numbers, following(first + 12, 4)), train, numbers)
    assert len(pids(prepares)) == helpers
    assert_same(prepares.take(valid, rows(0, 2, 4), following(8, 4)), valid, rows(0, 2, 4))
    for first, micro_batches, size in ((36, 5, 4), (1000, 2, 6), (1012, 2, 6), (1024, 4, 2)):
        numbers = rows(first, micro_batches, size)
        assert_same(prepares.take(train, numbers, following(first + micro_batches * size, size)), train, numbers)
    numbers = rows(2000, 6, 4)[::2]
    assert_same(prepares.take(train, numbers, iter(rows(2024, 6, 4)[::2])), train, numbers)


def test_the_next_micro_batches_are_prepared_meanwhile_and_only_those_that_exist(
    prefix: Path, helped: Callable[[int], Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepares, train = helped(2), samples(prefix, length=32)
    list(prepares.take(train, rows(0, 2, 4), following(8, 4)))
    until(lambda: len(prepares._held) == 3 and all(future.done() for future in prepares._held.values()))
    monkeypatch.setattr(ImageSamples, "batch", lambda *_: pytest.fail("the rank prepares what was announced"))
    found = list(prepares.take(train, rows(8, 2, 4), following(16, 4)))
    assert [held["number"].tolist() for held in found] == rows(8, 2, 4).tolist()
    list(prepares.take(train, rows(16, 3, 4), following(28, 4)))
    assert [np.frombuffer(key[1], np.int64).tolist() for key in prepares._held] == [[28, 29, 30, 31]]


def test_what_is_prepared_ahead_is_bounded_in_number_and_bytes(
    prefix: Path, helped: Callable[[int], Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = samples(prefix)
    size = ahead._bytes_of(train.batch(np.arange(4)))
    for limit, most, helpers in ((2**31, 5, 3), (4 * size, 4, 3), (2 * size, 2, 2), (1, 2, 1)):
        monkeypatch.setattr(ahead, "LIMIT", limit)
        prepares = helped(3)
        for first in range(0, 80, 20):
            assert_same(prepares.take(train, rows(first, 5, 4), following(first + 20, 4)), train, rows(first, 5, 4))
            assert len(prepares._held) <= most
        assert len(pids(prepares)) == helpers


class Faulty(Samples):
    """Micro-batches with sample 8 fail as they are told to."""

    source = "somewhere"

    def __init__(self, fails: Callable[[], object]) -> None:
        super().__init__(100)
        self._fails = fails

    def sample(self, number: int) -> dict[str, np.ndarray]:
        if number == 8:
            self._fails()
        return {"images": np.zeros(32)}


def unusable() -> None:
    raise DataError("image 8 of somewhere: cannot be used")


def unexpected() -> None:
    raise KeyError("what nobody expects")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fails", "kind", "message"),
    [
        (unusable, DataError, "^image 8 of somewhere: cannot be used$"),
        (unexpected, KeyError, "what nobody expects"),
        (killed, EngineError, "^somewhere: the process that prepared samples 8 to 11 was killed by SIGKILL: by"),
    ],
    ids=["unusable", "unexpected", "killed"],
)
def test_a_sample_that_fails_is_reported_when_it_is_taken_as_if_the_rank_had_prepared_it(
    helped: Callable[[int], Ahead], fails: Callable[[], object], kind: type[Exception], message: str
) -> None:
    prepares, faulty = helped(1), Faulty(fails)
    list(prepares.take(faulty, rows(0, 2, 4), following(8, 4)))
    with pytest.raises(kind, match=message):
        list(prepares.take(faulty, rows(8, 2, 4), following(16, 4)))


def test_a_file_that_becomes_shorter_is_named(helped: Callable[[int], Ahead], tmp_path: Path) -> None:
    large = make_images(tmp_path, 64, channels=3, count=64)
    train = ImageSamples(large, Split(64, 1), replace(MODEL, image_size=64))
    prepares = helped(1)
    list(prepares.take(train, rows(0, 1, 4), ()))
    os.truncate(f"{large}-train.images.npy", 4096)
    with pytest.raises(EngineError, match=r"train\.images\.npy: .* was killed by SIGBUS; the file is shorter"):
        list(prepares.take(train, rows(4, 10, 4), ()))


def test_no_helper_outlives_its_rank_nor_holds_its_files(prefix: Path, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    rank = os.fork()
    if rank == 0:
        os.close(reads)
        prepares = Ahead(2, CPU)
        list(prepares.take(samples(prefix), rows(0, 2, 4), following(8, 4)))
        os.write(writes, " ".join(map(str, pids(prepares))).encode() + b"\n")
        time.sleep(MINUTES)
        os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as said:
        helpers = [int(pid) for pid in said.readline().split()]
        assert len(helpers) == 2
        for pid in helpers:
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                os.kill(pid, signum)
        assert all(process_state(pid) in "SRD" for pid in helpers)
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        assert said.read() == "", "the pipe closes with the rank"
    until(lambda: all(process_state(pid) in "?ZX" for pid in helpers))


@pytest.mark.parametrize(
    ("cores", "ranks", "device", "expected"),
    [(2, 2, "cpu", 0), (2, 1, "cpu", 1), (1, 8, "cuda", 1), (64, 8, "cuda", 7), (256, 4, "cuda", 16), (2, 8, "cpu", 0)],
)
def test_a_rank_has_its_share_of_the_spare_cores(
    cores: int, ranks: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Of:
        node = 0
        nodes = (type("Node", (), {"ranks": range(ranks)}),)

    plan: Any = Of()
    plan.device = device
    monkeypatch.setattr(ahead, "usable_cores", lambda: cores)
    assert helpers_of(plan, plan) == expected


LAYOUTS = {
    "single": "parallel.micro_batch_size=2",
    "data-pipeline": "parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 parallel.micro_batch_size=2 "
    "parallel.shares=2-1",
    "pipedream": "parallel.pipeline=2 parallel.partition=1-2 parallel.schedule=pipedream parallel.micro_batch_size=2",
}


def trained(folder: Path, images: Path, helpers: int, words: str) -> EngineRun:
    one = ("model=vit-tiny", "model.hidden=32", "model.layers=3", *AUGMENT, "train.eval_interval=2")
    run = make_run(folder, images, *one, *words.split(), base=("parallel=single", *BASE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "helpers_of", lambda *_: helpers)
        assert run.go() == 0, run.stderr()
    return run


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_is_the_same_with_and_without_helpers(tmp_path: Path, layout: str) -> None:
    images = make_images(tmp_path, 8)
    alone, helped = (trained(tmp_path / f"run-{helpers}", images, helpers, layout) for helpers in (0, 2))
    assert alone.losses().tolist() == helped.losses().tolist()
    for name, weight in alone.weights().items():
        torch.testing.assert_close(helped.weights()[name], weight, rtol=0, atol=0)


def test_a_run_that_is_told_to_save_and_end_leaves_no_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the signal reaches every process, as Slurm sends it."""
    images = make_images(tmp_path, 8)
    words = ("model=vit-tiny", "parallel.micro_batch_size=2", "train.iterations=100000", "train.lr_decay_iterations=9")
    run = make_run(tmp_path / "run", images, *words, base=("parallel=single", *BASE))
    monkeypatch.setattr(engine, "helpers_of", lambda *_: 2)
    worker = run.start()
    until(lambda: run.run.metrics.exists() and run.run.metrics.read_text().count("\n") > 3)
    (rank,) = children(worker)
    helpers = children(rank)
    assert len(helpers) == 2
    for pid in (*helpers, worker):
        os.kill(pid, signal.SIGUSR2)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 75
    until(lambda: all(process_state(pid) in "?ZX" for pid in helpers))


@pytest.mark.slow
def test_the_page_of_a_run_that_waits_for_its_helpers_says_that_data_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = ImageSamples.batch

    def late(self: ImageSamples, numbers: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(0.4)  # several times what a busy machine adds
        return prepared(self, numbers)

    monkeypatch.setattr(ImageSamples, "batch", late)
    words = "parallel.micro_batch_size=2 parallel.global_batch_size=4 train.iterations=12 train.eval_interval=null"
    run = trained(tmp_path / "run", make_images(tmp_path, 8), 1, words)
    known = record.read(run.run)
    timeline = read_run({0: run.run.rank_events(0)})
    why = explain(timeline, known.plan, statistics(timeline, known.plan.ranks, known))
    assert isinstance(why, Why)
    assert why.cause is not None
    assert why.cause.cause == Cause.DATA


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
