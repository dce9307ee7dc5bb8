"""Epochs and samples become iterations before anything starts: exactly, whatever the data, and after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import TdppError
from conf.schema.experiment import Experiment
from data_prep.training import known_order
from launch.commands.launching.preflight import preflight, samples_in_split, with_length
from launch.control.planning.plan import make_plan
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import task_of
from tests.support.megatron_ext.engine_run import TINY, EngineRun, make_corpus, make_run
from tests.support.megatron_ext.images import write_images
from tests.support.megatron_ext.pairs import write_pairs

SINGLE = ("parallel=single", "parallel.global_batch_size=8", "parallel.micro_batch_size=2", "train.iterations=null")
GPT = [word for word in TINY if not word.startswith("train.iterations")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def images(folder: Path) -> Path:
    random = np.random.default_rng(0)
    pixels = {"train": 37, "valid": 5, "test": 5}
    return write_images(
        folder / "images",
        {split: random.integers(0, 255, (count, 8, 8, 1), np.uint8) for split, count in pixels.items()},
        {split: np.arange(count) % 10 for split, count in pixels.items()},
    )


OWN = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 21
    def __getitem__(self, k): return torch.full((4,), float(k)), k % 2
def data(split, seed): return Data()
def loss(outputs, targets): return torch.nn.functional.cross_entropy(outputs, targets)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
"""


@pytest.fixture
def experiments(tmp_path: Path, corpus: Path) -> dict[str, tuple[list[str], int]]:
    """By kind of data, overrides and the samples of an epoch."""
    (tmp_path / "own.py").write_text(OWN)
    tokens = ["model.layers=2", "model.decoder_layers=2", "model.vocab_size=40"]
    return {
        "gpt": ([*GPT, f"data.prefix={corpus}", "data.split='100,0,0'"], -1),
        "pairs": (["model=transformer-tiny", *tokens, f"data.prefix={write_pairs(tmp_path, 40)}"], 40),
        "images": (["model=vit-tiny", f"data.prefix={images(tmp_path)}"], 37),
        "module": (["model=module", f"model.code={tmp_path}/own.py:net"], 21),
    }


@pytest.mark.parametrize("kind", ["gpt", "pairs", "images", "module"])
def test_an_epoch_is_what_the_task_of_the_ranks_says(
    experiments: dict[str, tuple[list[str], int]], kind: str, tmp_path: Path
) -> None:
    words, known = experiments[kind]
    experiment = compose([*words, *SINGLE, "train.lr_warmup_iterations=1", "train.epochs=3"])
    found = with_length(experiment)
    plan = make_plan(found, "a/b")
    epoch = task_of(Plan.of(plan.as_json(), tmp_path)).epoch("train")
    assert epoch == samples_in_split(experiment, "train")
    assert epoch is not None
    assert known in (-1, epoch)
    assert (found.train.samples, found.train.iterations) == (3 * epoch, 3 * epoch // 8)
    assert (plan.train.epochs, plan.train.samples, plan.train.iterations) == (3, 3 * epoch, 3 * epoch // 8)
    assert plan.train.lr_decay_iterations == 3 * epoch // 8
    preflight(experiment)
    order = task_of(Plan.of(plan.as_json(), tmp_path)).samples("train", 3 * epoch).order
    assert known_order(found, 3 * epoch).items() <= order.items()


def test_what_is_known_of_the_order_of_a_blend_is_part_of_it(corpus: Path, tmp_path: Path) -> None:
    blend = f"data.blend=[{{prefix:{make_corpus(tmp_path)},weight:0.3}}]"
    experiment = compose([*TINY, f"data.prefix={corpus}", "parallel=single", blend])
    order = task_of(Plan.of(make_plan(experiment, "a/b").as_json(), tmp_path)).samples("train", 500).order
    assert {key: value for key, value in order.items() if key not in ("corpora", "0.share", "1.share")} == known_order(
        experiment, 500
    )


def test_samples_need_no_data_and_iterations_stay_as_they_are() -> None:
    found = with_length(compose([*SINGLE, "train.samples=83", "data.prefix=nowhere"]))
    assert (found.train.iterations, found.train.samples, found.train.epochs) == (10, 83, None)
    experiment = compose(["train.iterations=9"])
    assert with_length(experiment) is experiment


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.epochs=1", "parallel.global_batch_size=4096", "parallel.micro_batch_size=1"],
            "too few for one global batch",
        ),
        (["train.samples=7"], r"train.samples=7: that is 7 samples: too few for one global batch of 8"),
        (["train.epochs=2", "train.lr_warmup_iterations=100000"], r"less than train.iterations=\d+"),
    ],
    ids=["an epoch", "samples", "warm-up"],
)
def test_a_length_without_an_iteration_is_one_message(corpus: Path, words: list[str], message: str) -> None:
    given = {word.partition("=")[0]: word for word in (*GPT, f"data.prefix={corpus}", *SINGLE, *words)}
    with pytest.raises(TdppError, match=message.replace("batch of 8", "batch of parallel.global_batch_size=8")):
        with_length(compose(list(given.values())))


@pytest.mark.parametrize("length", ["train.epochs=4", "train.iterations=20"])
def test_intervals_in_epochs_are_the_nearest_iterations(tmp_path: Path, length: str) -> None:
    """An epoch of 37 images in batches of 8."""
    asked = ("train.save_interval=1epoch", "train.eval_interval=0.5epochs", "train.log_interval=0.001epoch")
    words = ["model=vit-tiny", f"data.prefix={images(tmp_path)}", *SINGLE, length, *asked]
    train = with_length(compose([*words, "model.image_size=8", "model.patch_size=2"])).train
    assert (train.save_interval, train.eval_interval, train.log_interval) == (5, 2, 1)
    assert not train.in_epochs


def test_an_interval_in_epochs_of_a_batch_that_changes_is_one_message(corpus: Path) -> None:
    words = ["train.samples=80", "train.save_interval=1epoch", "adapt.rule=noise", "adapt.upper=64"]
    with pytest.raises(TdppError, match=r"^train.save_interval=1epoch: with adapt.rule=noise the batch changes, so an"):
        with_length(compose([*GPT, *SINGLE, f"data.prefix={corpus}", *words]))


def test_a_blend_has_no_epoch(corpus: Path, tmp_path: Path) -> None:
    blend = f"data.blend=[{{prefix:{make_corpus(tmp_path)}}}]"
    with pytest.raises(TdppError, match=r"train.epochs=2: the 2 corpora of data.blend end at different times.*give tr"):
        with_length(compose([*GPT, f"data.prefix={corpus}", *SINGLE, blend, "train.epochs=2"]))


def test_a_module_in_a_container_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = [*SINGLE, "model=module", f"model.code={tmp_path}/own.py:net", "model.layers=2", "train.epochs=2"]
    experiment = compose(words)
    inside = replace(experiment, container=replace(compose(["container=apptainer", "container.image=i"]).container))
    with pytest.raises(TdppError, match=r"can be counted only where its ranks run; give train.samples or train.it"):
        with_length(inside)


def settled(corpus: Path, *words: str) -> Experiment:
    given = {word.partition("=")[0]: word for word in (*GPT, f"data.prefix={corpus}", *SINGLE, *words)}
    return with_length(compose(list(given.values())))


def run_of(folder: Path, corpus: Path, experiment: Experiment) -> EngineRun:
    made = make_run(folder, corpus, base=TINY)
    made.run.write_json(made.run.plan, make_plan(experiment, f"test/{folder.name}").as_json())
    return EngineRun(made.run, Plan.read(made.run.plan))


@pytest.mark.slow
def test_a_training_of_epochs_goes_on_with_another_global_batch_and_layout(tmp_path: Path, corpus: Path) -> None:
    """The samples are the same, in the same order, up to the end: also where no batch divides an epoch, or so
    large a part of the last one is left out that Megatron would shuffle what is needed of it apart."""
    words = ("train.epochs=2", "data.split='100,0,0'")
    first = run_of(
        tmp_path / "first", corpus, settled(corpus, *words, "train.save_interval=5", "train.keep_checkpoints=9")
    )
    assert first.go() == 0, first.stderr()
    samples = first.plan.train.samples or 0
    assert samples % 12
    load = f"train.load={first.run.checkpoints}/iter_0000005"
    for number, other in enumerate(
        (("parallel.global_batch_size=12",), ("parallel.global_batch_size=64",), ("parallel.pipeline=2",))
    ):
        if "pipeline" in other[0]:
            other = (*other, "cluster.groups.local.gpus_per_node=2")
        experiment = settled(corpus, *words, *other, load, "train.keep_checkpoints=9")
        size = experiment.parallel.global_batch_size
        assert experiment.train.last_iteration == 5 + (samples - 40) // size
        second = run_of(tmp_path / f"second-{number}", corpus, experiment)
        assert second.go() == 0, second.stderr()
        last = second.metrics()[-1]
        assert last["consumed_samples"] == 40 + (samples - 40) // size * size <= samples
        meta = Checkpoint.at(second.run.path).meta
        assert meta.order == Checkpoint.at(first.run.path).meta.order
        if size == 8:
            np.testing.assert_allclose(second.losses(), first.losses()[5:], rtol=1e-5)
    with pytest.raises(TdppError, match=r"train.epochs=2: .* has seen \d+ of them: too few for one global batch"):
        settled(corpus, *words, f"train.load={first.run.path}")


def test_the_checkpoint_that_was_counted_from_is_the_one_that_is_loaded(tmp_path: Path, corpus: Path) -> None:
    """A run that still trains saves newer ones before the ranks of the next look."""
    first = make_run(tmp_path / "first", corpus, "parallel=single", "train.save_interval=2", "train.keep_checkpoints=9")
    assert first.go() == 0, first.stderr()
    (first.run.checkpoints / "latest").write_text("iter_0000002\n")
    experiment = settled(corpus, "train.samples=40", f"train.load={first.run.path}")
    (first.run.checkpoints / "latest").write_text("iter_0000004\n")
    assert experiment.train.load == str(first.run.checkpoints / "iter_0000002")
    assert experiment.train.iterations == 2 + (40 - 16) // 8


def test_a_checkpoint_whose_samples_would_come_in_another_order_is_refused_before_the_start(
    tmp_path: Path, corpus: Path
) -> None:
    """Ranks refuse it, too, but only once their nodes were waited for."""
    first = make_run(tmp_path / "first", corpus, "parallel=single")
    assert first.go() == 0, first.stderr()
    words = [word for word in TINY if not word.startswith("train.iterations")]

    def launched(*more: str) -> None:
        preflight(compose([*words, "parallel=single", f"data.prefix={corpus}", f"train.load={first.run.path}", *more]))

    launched("train.iterations=5", "parallel.global_batch_size=4")
    refused = rf"^train.load={first.run.path}: .*/iter_0000004: cannot continue at its sample 32, because .* order: "
    for more, order in {
        "train.iterations=500": r"expected epochs=1, .*; found epochs=3\d, ",
        "train.samples=4000": r"expected epochs=1, .*; found epochs=3\d, ",
        "train.seed=7": "expected seed=1234; found seed=7. Keep the data, data.split, train.seed",
        "data.split='50,50,0'": r"expected documents=\d+, tokens=",
    }.items():
        with pytest.raises(TdppError, match=refused + order):
            launched(*([] if "samples" in more or "iterations" in more else ["train.iterations=6"]), more)
