"""Optimizer, learning rate, length and data of a driver's file. What the file does not say is as PipeDream's programs
have it."""

from __future__ import annotations

import re
from pathlib import Path

from conf.pipedream.driver import Kind, Policy
from conf.pipedream.reading import Reading
from conf.schema.train import LENGTHS

WARMUP_EPOCHS, STEP_EPOCHS, DECAY = 5, 30, 0.97
BUCKETING = 80
SYNTHETIC_IMAGES = 1_000_000
"""Of an epoch."""


def add(reading: Reading) -> None:
    """The words of the groups train, data and container."""
    _training(reading)
    _data(reading)


def _training(reading: Reading) -> None:
    driver, words = reading.driver, reading.words
    if driver.kind is Kind.images:
        words |= {"train.optimizer": "sgd", "train.momentum": 0.9}
    else:
        words |= {"train.optimizer": "adam", "train.adam_beta1": 0.9, "train.adam_beta2": 0.999}
    words |= {"train.weight_decay": driver.weight_decay, "train.clip_grad": 0.0}
    words["train.log_interval"] = driver.print_frequency
    if not any(reading.has(f"train.{key}") for key in LENGTHS):
        words |= {"train.iterations": None, "train.epochs": driver.epochs}
    words |= {"train.lr": driver.learning_rate, "train.lr_warmup_iterations": 0, "train.min_lr": 0.0}
    _policy(reading)
    each = "an epoch has as many iterations as samples divided by parallel.global_batch_size"
    if driver.lr_warmup and not reading.has("train.lr_warmup_iterations"):
        reading.refused.append(
            f"lr_warmup=True: the warm-up lasts {WARMUP_EPOCHS} epochs; give train.lr_warmup_iterations=… ({each})"
        )
    for key in () if driver.synthetic_data else ("save_interval", "eval_interval"):
        if not reading.has(f"train.{key}"):
            words[f"train.{key}"] = "1epoch"
    words["train.keep_checkpoints"] = driver.epochs
    if driver.verbose_frequency:
        reading.notes.append("verbose_frequency has no effect: a run records every pass, and tdpp report shows them")
    if driver.macrobatch and "parallel.update_every" in words:
        reading.notes.append(
            "macrobatch: stages update after two rounds; parallel.semantics=two with an update_every of at least the "
            "first stage's depth keeps two versions at most"
        )


def _policy(reading: Reading) -> None:
    driver, words = reading.driver, reading.words
    if reading.has("train.lr_policy"):
        return
    if driver.learning_rate_policy is Policy.polynomial:
        words |= {"train.lr_policy": "polynomial", "train.lr_power": 2.0}
    elif driver.learning_rate_policy is Policy.exponential_decay:
        words |= {"train.lr_policy": "linear", "train.min_lr": DECAY * reading.number("train.lr", driver.learning_rate)}
    elif driver.epochs <= STEP_EPOCHS:
        words["train.lr_policy"] = "constant"
    else:
        words |= {"train.lr_policy": "step", "train.lr_gamma": 0.1}
        if not reading.has("train.lr_step_iterations"):
            reading.refused.append(
                f"learning_rate_policy=step: the rate falls every {STEP_EPOCHS} epochs; give that many epochs in "
                f"iterations, train.lr_step_iterations=…, or another train.lr_policy"
            )


def _data(reading: Reading) -> None:
    driver, words = reading.driver, reading.words
    words |= {"container": "docker", "container.image": driver.container}
    images = driver.kind is Kind.images
    name = Path(driver.data_dir).name or "pipedream"
    words["data.prefix"] = f"data/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
    if images:
        words["data.augment.flip"] = True
    else:
        words["data.bucketing"] = BUCKETING
    made = f"prepare its data ({driver.data_dir}) with tdpp data {'images' if images else 'pairs'}"
    if driver.synthetic_data and images:
        words["data.prefix"] = "data/synthetic"
        if "train.epochs" in words:
            words["train.samples"] = words.pop("train.epochs") * SYNTHETIC_IMAGES
        made = "synthetic_data: use any images, such as tdpp data images --source digits --size 224 --channels 3"
    elif driver.synthetic_data:
        reading.notes.append("synthetic_data has no effect on translation (in PipeDream neither)")
    if not (reading.has("data") or reading.has("data.prefix")):
        reading.notes.append(f"{made} --output {words['data.prefix']}")
