"""The experiments of PipeDream's paper: each has the figures of the public driver configuration, and its plan fits."""

from __future__ import annotations

import math

import pytest

from conf.schema.experiment import ExecutorKind, Experiment
from conf.schema.train import LrPolicy, Optimizer
from megatron_ext.contract.schedule.streams import PIPEDREAM
from tests.support import ROOT, composing

FOLDER = ROOT / "conf" / "experiment" / "pipedream"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
WITHOUT_DRIVER = {"awd_lm_4": (80, 320), "s2vt_4": (80, 320)}
"""By setting, of models that the public repository has no files of: batch sizes of a worker and of an iteration."""
PAPER = [name for name in NAMES if not name.startswith(("digits", *WITHOUT_DRIVER))]
DRIVER = {
    # by the public driver_configs/*.yml: batch size of a worker, learning rate, weight decay, epochs
    "vgg16_4": (64, 0.01, 0.0005, 60),
    "vgg16_16": (64, 0.04, 0.0005, 60),
    "alexnet_4": (256, 0.01, 0.0005, 60),
    "alexnet_16": (256, 0.01, 0.0005, 60),
    "resnet50_4": (128, 0.01, 0.0005, 60),
    "resnet50_16": (128, 0.01, 0.0005, 60),
    "gnmt8_4": (64, 0.0003, 0, 10),
    "gnmt8_16": (64, 0.0003, 0, 10),
    "gnmt16_4": (64, 0.0003, 0, 10),
    "gnmt16_16": (64, 0.0003, 0, 10),
}


def experiment(name: str) -> Experiment:
    return composing.experiment(f"experiment=pipedream/{name}")


def test_every_model_of_the_paper_has_both_plans_on_4_and_on_16_workers() -> None:
    assert sorted(f"{setting}_{kind}" for setting in DRIVER for kind in ("dp", "pipedream")) == PAPER


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_and_has_its_own_name(name: str) -> None:
    assert experiment(name).name == name


@pytest.mark.parametrize("name", PAPER)
def test_an_experiment_has_the_figures_of_the_public_driver(name: str) -> None:
    setting, _, kind = name.rpartition("_")
    found = experiment(name)
    train, parallel, workers = found.train, found.parallel, int(setting.rpartition("_")[2])
    batch, *figures = DRIVER[setting]
    assert (parallel.micro_batch_size, [train.lr, train.weight_decay, train.epochs]) == (batch, figures)
    assert parallel.global_batch_size == batch * workers
    assert (train.lr_policy, train.lr_power, train.min_lr) == (LrPolicy.polynomial, 2, 0)
    assert train.optimizer is (Optimizer.adam if "gnmt" in name else Optimizer.sgd)
    assert found.executor.kind is ExecutorKind.hosts
    assert sum(found.ranks_per_node()) == workers
    assert found.price_per_hour() == pytest.approx(12.24 * workers / 4)
    assert (str(parallel.schedule) == PIPEDREAM) == (kind == "pipedream")
    assert parallel.data == workers or kind == "pipedream"


@pytest.mark.parametrize("setting", WITHOUT_DRIVER)
@pytest.mark.parametrize("kind", ["dp", "pipedream"])
def test_models_without_a_public_driver_have_both_plans_on_4_workers(setting: str, kind: str) -> None:
    found = experiment(f"{setting}_{kind}")
    parallel = found.parallel
    assert (parallel.micro_batch_size, parallel.global_batch_size) == WITHOUT_DRIVER[setting]
    assert sum(found.ranks_per_node()) == 4
    assert (str(parallel.schedule) == PIPEDREAM) == (kind == "pipedream")


@pytest.mark.parametrize("setting", [*DRIVER, *WITHOUT_DRIVER, "digits"])
def test_both_plans_of_a_setting_train_alike(setting: str) -> None:
    """Equal samples in an iteration, with the same learning rates: what differs is the plan."""
    one, other = experiment(f"{setting}_dp"), experiment(f"{setting}_pipedream")
    assert (one.train, one.model, one.data, one.cluster) == (other.train, other.model, other.data, other.cluster)
    assert one.parallel.global_batch_size == other.parallel.global_batch_size
    assert one.parallel.world_size == other.parallel.world_size


@pytest.mark.parametrize("name", [name for name in PAPER if "gnmt" not in name])
def test_images_are_evaluated_once_an_epoch(name: str) -> None:
    found = experiment(name)
    assert found.train.eval_interval == math.floor(1_281_167 / found.parallel.global_batch_size)
