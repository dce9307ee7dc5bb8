"""The blocks of a user's module, which torch alone can tell: a process of its own looks at the module."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import torch_answers
from conf.errors import ConfigError, reworded
from conf.schema.model import Model, check_code
from conf.schema.values.partition import AUTO
from megatron_ext.contract.files import digest_of_file
from megatron_ext.contract.models.hf_config import config_file
from megatron_ext.contract.models.model import defined_by_user

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from conf.schema.experiment import Experiment

LOOK = "megatron_ext.blocks"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a module's blocks depend on."""

    code: str
    """The same as `model.code`."""
    capture: bool
    micro_batch_size: int
    precision: str
    seed: int
    recompute: str
    """The same as `parallel.recompute`."""


def digest_of(model: Model) -> str:
    """SHA-256 of a module's file, or of what makes a model of another family the one that it is. Raises ConfigError:
    the file cannot be read."""
    if model.config is not None:
        return digest_of_config(model.config)
    if model.code is None:
        identity = json.dumps(model.sized(1).identity(), sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()
    with reworded(ConfigError, f"model.code={model.code}: {model.code_file} cannot be read: ", "; give FILE.py:NAME"):
        return digest_of_file(Path(model.code_file))


def digest_of_config(config: str) -> str:
    """SHA-256 of the file that `model.config` names. Raises ConfigError if it cannot be read."""
    path = Path(config_file(config))
    with reworded(
        ConfigError,
        f"model.config={config}: {path} cannot be read: ",
        "; give a config.json, or the folder that has it",
    ):
        return digest_of_file(path)


def asked_of(experiment: Experiment | DictConfig) -> Asked:
    """What the blocks of an experiment's module depend on; a micro-batch that is still to be chosen has one sample."""
    model, parallel, train = experiment.model, experiment.parallel, experiment.train
    return Asked(
        code=str(model.code),
        capture=model.capture,
        micro_batch_size=1 if parallel.micro_batch_size == AUTO else parallel.micro_batch_size,
        precision=str(train.precision),
        seed=train.seed,
        recompute=str(parallel.recompute),
    )


def can_look() -> bool:
    """Whether torch is here."""
    return find_spec("torch") is not None


_seen: dict[Asked, tuple[str, ...]] = {}
"""What this process found: the file does not change meanwhile, and looking takes seconds."""


def known_blocks(experiment: Experiment) -> list[str] | None:
    """The names of the counted blocks, where their family has no rule for them; of a module, if this process has looked
    at it."""
    family = experiment.model.traits
    if not family.counts_all:
        return None
    if not family.user_code:
        return experiment.model.block_names()
    names = _seen.get(asked_of(experiment))
    return list(names) if names is not None and len(names) == experiment.model.layers else None


def blocks_of(asked: Asked) -> tuple[str, ...]:
    """The names of a module's blocks, once one micro-batch has passed through them, forward and backward. Raises
    ConfigError: the module cannot be trained."""
    if asked not in _seen:
        _seen[asked] = tuple(_said_of(asked)["blocks"])
    return _seen[asked]


def samples_of_module(asked: Asked, split: str) -> int | None:
    """How many samples a split of a module's data has before any of them comes again; None if they have no end. Raises
    ConfigError: the module cannot be trained, or has no such data."""
    found = _said_of(asked, f"--split={split}")["samples"]
    if found is not None and not (isinstance(found, int) and found > 0):
        raise ConfigError(
            f"model.code={asked.code}: epoch({split!r}) gives {found!r}, but it must be a number of samples or None"
        )
    return found


def _said_of(asked: Asked, *options: str) -> dict[str, Any]:
    """What a process says that looks at a module."""
    words = [asked.code, "--json", f"--micro-batch-size={asked.micro_batch_size}"]
    words += [f"--precision={asked.precision}", f"--seed={asked.seed}", f"--recompute={asked.recompute}"]
    done = torch_answers.run(LOOK, [*words, *["--capture"] * asked.capture, *options])
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        raise ConfigError(
            f"model.code={asked.code}: the inspection of the model exited with {done.returncode}: "
            f"{lines[-1] if lines else 'no message'}"
        ) from None
    if "error" in found:
        raise ConfigError(found["error"])
    return found


def is_user_code(model: Mapping[Any, Any]) -> bool:
    """Whether a user's file defines the model of a configuration that nothing has checked."""
    return defined_by_user(str(model.get("family")).removeprefix("Family."))


def count_blocks(cfg: DictConfig) -> None:
    """Sets `model.layers` of a module to the number of its blocks, unless it is given.

    Where torch is not here, or the module will run in a container, a partition says how many they should be.

    Raises:
        ConfigError: the module cannot be trained, or nothing says how many blocks it has.
    """
    from omegaconf import OmegaConf

    model, partition = cfg.model, cfg.parallel.partition
    if not OmegaConf.is_missing(model, "layers") or not is_user_code(model):
        return
    check_code(model.code)
    if can_look() and str(cfg.container.kind) == "none":
        model.layers = len(blocks_of(asked_of(cfg)))
        return
    if partition is None:
        where = "they can be counted only in the container" if can_look() else "torch is not installed here"
        raise ConfigError(
            f"model.layers is not set: the number of blocks of model.code={model.code} is unknown, because {where}; "
            f"give model.layers or parallel.partition"
        )
    model.layers = sum(int(part) for part in str(partition).split("-") if part.isdigit())
