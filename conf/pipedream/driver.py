"""The configuration file of PipeDream's driver (`runtime/driver.py`), typed, and what becomes of it while it is
read: the values of its keys, each taken once, and what is wrong with them, gathered key by key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from conf.errors import ConfigError
from conf.reading.yaml_file import NOT_TEXT, require_small, yaml_fault
from megatron_ext.contract.files import why

T = TypeVar("T")


def content_of(path: Path, said: str) -> dict[Any, Any]:
    """The keys of a YAML or JSON file, which `said` names. JSON is YAML; keys without quotes are read too. Raises
    ConfigError: it is not there, or is not such a file."""
    try:
        require_small(path)
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{said}: cannot be read: {error.strerror}; give the path of a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said}: {NOT_TEXT}: byte {error.start} is not UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{said}: neither YAML nor JSON: {yaml_fault(error)}") from error
    except (ConfigError, RecursionError, ValueError) as error:
        raise ConfigError(f"{said}: {why(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{said}: the file has no keys")
    return found


@dataclass
class Keys:
    """The keys of a file, each taken once; `refused` has a line for each value that cannot be."""

    left: dict[Any, Any]
    refused: list[str] = field(default_factory=list)

    def text(self, key: str, rule: str) -> str:
        """One that must be there."""
        value = self.left.pop(key, None)
        if isinstance(value, str) and value.strip() and value.isprintable():
            return value
        self.refused.append(f"{key}={value}: it must be {rule}" if value is not None else f"{key} is missing: {rule}")
        return ""

    def choice(self, key: str, choices: Mapping[str, T], why: str, default: str | None = None) -> T:
        """What one of the choices stands for; the first one's where it is none, which is refused."""
        value = self.left.pop(key, default)
        if not isinstance(value, str) or value not in choices:
            said = f"{key}={value}" if value is not None else f"{key} is missing"
            self.refused.append(f"{said}: {why}; it must be {' or '.join(choices)}")
            return next(iter(choices.values()))
        return choices[value]

    def whole(self, key: str, least: int, default: int) -> int:
        value = self.left.pop(key, default)
        if type(value) is int and value >= least:
            return value
        self.refused.append(f"{key}={value}: it must be a whole number, at least {least}")
        return default

    def number(self, key: str, default: float) -> float:
        """Not below 0. YAML takes 1e-3 for a text."""
        value = self.left.pop(key, default)
        try:
            found = float(value) if type(value) in (int, float, str) else -1.0
        except ValueError:
            found = -1.0
        if 0.0 <= found < float("inf"):
            return found
        self.refused.append(f"{key}={value}: it must be a number, at least 0")
        return default

    def flag(self, key: str) -> bool:
        value = self.left.pop(key, False)
        if type(value) is bool:
            return value
        self.refused.append(f"{key}={value}: it must be True or False")
        return False

    def check(self, said: str) -> None:
        """Raises ConfigError with all that was refused."""
        if self.refused:
            raise ConfigError(f"{said} cannot be trained unchanged:" + "".join(f"\n  {line}" for line in self.refused))


class ModelType(StrEnum):
    """What a model learns, `model_type`."""

    images = "image_classification"
    translation = "translation"


class Policy(StrEnum):
    """How the learning rate falls, `learning_rate_policy`."""

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
    """The Python package with the stages: models.vgg16.gpus=4."""
    data_dir: str
    container: str
    machines: tuple[Machine, ...]
    """The GPU of each rank."""
    kind: ModelType
    distributed_backend: str
    config_file: str | None
    """Stages and ranks, `conf.pipedream.placement`; None: the whole model on one machine."""
    batch_size: int
    """Samples of a worker."""
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
    compress_activations: bool
    compress_in_gpu: bool
    unknown: tuple[str, ...] = ()
    """Keys that the driver does not know either."""


def read(path: Path) -> Driver:
    """Raises ConfigError for a file that cannot be read, or with a line for each value that cannot be."""
    said = f"pipedream={path}"
    keys = Keys(content_of(path, said))
    kinds = {str(kind): kind for kind in ModelType}
    kind = keys.choice("model_type", kinds, "tdpp has no other models")
    images = kind is ModelType.images
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
        compress_activations=keys.flag("compress_activations"),
        compress_in_gpu=keys.flag("compress_in_gpu"),
    )
    keys.check(said)
    keys.left.pop("config_file", None)
    return Driver(**{**vars(driver), "unknown": tuple(map(str, keys.left))})


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
