"""Which keys can change how long an iteration takes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from conf.identity import of_speed
from conf.schema.train import Train

CAN = {
    *("optimizer", "nesterov", "overlap_optimizer", "precision", "compile", "loss_scaler"),
    *("checkpoint", "save_interval", "save_memory", "save_async", "best", "lora_rank", "lora_targets", "sync_every"),
}
BY_BEING_0 = {"momentum", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "ema", "outer_momentum"}


def test_of_the_training_what_an_iteration_computes_can_and_how_long_or_large_things_are_cannot():
    """A new key is put where it belongs by its type; who adds one sees here where that is."""
    names = {one.name for one in fields(Train)}
    one, other = ({f"train.{name}": value for name in names} for value in ("0.1", "0.2"))
    first, second = of_speed(one), of_speed(other)
    assert {key.removeprefix("train.") for key in first if first[key] != second[key]} == CAN
    assert {key.removeprefix("train.") for key in first if first[key] == second[key]} == BY_BEING_0


@pytest.mark.parametrize(
    ("key", "a", "b", "can"),
    [
        ("model.hidden_dropout", "0.1", "0.2", False),
        ("model.hidden_dropout", "0.1", "0.0", True),
        ("train.ema", "0.9", "null", True),
        ("train.lora_rank", "16", "null", True),
        ("train.lora_alpha", "16.0", "32.0", False),
        ("model.name", "one", "two", False),
        ("model.hidden", "64", "128", True),
        ("parallel.partition", "1-3", "2-2", True),
        ("data.prefix", "a", "b", True),
    ],
)
def test_a_real_number_matters_by_being_0_alone(key: str, a: str, b: str, can: bool):
    assert (of_speed({key: a}) != of_speed({key: b})) is can
