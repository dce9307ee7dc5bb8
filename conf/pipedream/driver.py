"""The configuration file of PipeDream's driver (`runtime/driver.py`), typed, and what becomes of it when read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from conf.pipedream.faults import Keys, content_of


class Kind(StrEnum):
    """Of a model, `model_type`."""

    images = "image_classification"
    translation = "translation"


class Policy(StrEnum):
    """Of the learning rate, `learning_rate_policy`."""

    step = "step"
    """A tenth after each 30 epochs."""
    polynomial = "polynomial"
    """(1 - epoch / epochs) squared."""
    exponential_decay = "exponential_decay"
    """0.97 to the power of epoch / epochs."""


@dataclass(frozen=True)
class Machine:
    """A GPU, written `host:gpu`."""

    host: str
    gpu: int

    @property
    def local(self) -> bool:
        return self.host in ("localhost", "127.0.0.1")

    def __str__(self) -> str:
        return f"{self.host}:{self.gpu}"


@dataclass(frozen=True, kw_only=True)
class Driver:
    """One training. What its file leaves out is as PipeDream's programs have it."""

    log_directory: str
    module: str
    """Of Python, with the stages: models.vgg16.gpus=4."""
    data_dir: str
    container: str
    machines: tuple[Machine, ...]
    """By rank."""
    kind: Kind
    distributed_backend: str
    config_file: str | None
    """Stages and ranks, `conf.pipedream.placement`; None: the whole model on one machine."""
    batch_size: int
    """Of a worker."""
    learning_rate: float
    learning_rate_policy: Policy
    weight_decay: float
    epochs: int
    print_frequency: int
    verbose_frequency: int
    no_input_pipelining: bool
    lr_warmup: bool
    synthetic_data: bool
    recompute: bool
    macrobatch: bool
    unknown: tuple[str, ...] = ()
    """Keys that the driver does not know either."""


def read(path: Path) -> Driver:
    """Raises ConfigError for a file that cannot be read, or with a line for each value that cannot be."""
    said = f"pipedream={path}"
    keys = Keys(content_of(path, said))
    kinds = {str(kind): kind for kind in Kind}
    kind = keys.choice("model_type", kinds, "tdpp has no other models")
    images = kind is Kind.images
    policies = {str(policy): policy for policy in Policy}
    driver = Driver(
        kind=kind,
        log_directory=keys.text("log_directory", "the folder of all runs"),
        module=keys.text("module", "the model and its folder, such as models.vgg16.gpus=4"),
        data_dir=keys.text("data_dir", "the folder of the data"),
        container=keys.text("container", "a docker image, such as nvcr.io/nvidia/pytorch:23.04-py3"),
        machines=_machines(keys),
        distributed_backend=keys.choice(
            "distributed_backend", {"nccl": "nccl", "gloo": "gloo"}, "ranks send through NCCL or gloo"
        ),
        config_file=keys.text("config_file", "a JSON file") if keys.left.get("config_file") is not None else None,
        batch_size=keys.whole("batch_size", 1, 256 if images else 128),
        learning_rate=keys.number("learning_rate", 0.1),
        learning_rate_policy=keys.choice("learning_rate_policy", policies, "it is not a policy", str(Policy.step)),
        weight_decay=keys.number("weight_decay", 1e-4),
        epochs=keys.whole("epochs", 1, 90 if images else 8),
        print_frequency=keys.whole("print_frequency", 1, 10),
        verbose_frequency=keys.whole("verbose_frequency", 0, 0),
        no_input_pipelining=keys.flag("no_input_pipelining"),
        lr_warmup=keys.flag("lr_warmup"),
        synthetic_data=keys.flag("synthetic_data"),
        recompute=keys.flag("recompute"),
        macrobatch=keys.flag("macrobatch"),
    )
    for key in ("compress_activations", "compress_in_gpu"):
        if keys.flag(key):
            keys.refused.append(
                f"{key}=True: tdpp does not compress (and PipeDream's driver ignores this key); use False"
            )
    keys.check(said)
    return _with_unknown(driver, keys.left)


def _with_unknown(driver: Driver, left: dict[Any, Any]) -> Driver:
    left.pop("config_file", None)
    return Driver(**{**vars(driver), "unknown": tuple(map(str, left))})


def _machines(keys: Keys) -> tuple[Machine, ...]:
    given = keys.left.pop("machines", None)
    rule = "it must be a list of HOST:GPU, such as ['localhost:0', 'localhost:1']"
    if not isinstance(given, list) or not given:
        keys.refused.append(f"machines={given}: {rule}")
        return ()
    found: list[Machine] = []
    for text in given:
        fitting = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,4})", text) if isinstance(text, str) else None
        if fitting is None:
            keys.refused.append(f"machines: {text}: {rule}")
        elif (machine := Machine(fitting[1], int(fitting[2]))) in found:
            keys.refused.append(f"machines: {machine} is listed twice; each rank needs its own GPU")
        else:
            found.append(machine)
    return tuple(found)


@dataclass
class Reading:
    """Words of the command line, what is to be said, and what is refused: a line each."""

    driver: Driver
    given: tuple[str, ...]
    words: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def has(self, key: str) -> bool:
        """Whether the command line gives it."""
        return any(word.lstrip("+").startswith(f"{key}=") for word in self.given)

    def number(self, key: str, default: float) -> float:
        """The command line's, if that gives one number."""
        for word in self.given:
            name, _, value = word.lstrip("+").partition("=")
            if name == key and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", value):
                return float(value)
        return default
