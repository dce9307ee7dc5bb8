"""From YAML files and overrides to an `Experiment`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from conf import schema
from conf.errors import ConfigError
from conf.schema import Experiment
from conf.yaml_file import load_yaml

_NOISE = re.compile(r"To append to your config use|See https?://|\s*(full_key|object_type|reference_type)[:=]")

_UNKNOWN = re.compile(r"Key '(?P<key>.*)' not in '(?P<of>\w+)'$")
"""OmegaConf's words for a key that a class of `conf.schema` has not."""

_REFERENCE = re.compile(r"(\\*)\$\{")


def register() -> None:
    """Makes the schema known to Hydra, as the config `schema` that `config.yaml` starts from."""
    ConfigStore.instance().store(name="schema", node=Experiment)


def to_experiment(cfg: DictConfig) -> Experiment:
    """The composed configuration as one checked, frozen object.

    Raises:
        ConfigError: a key is unknown, a value is missing, an interpolation leads nowhere, or a rule is broken.
    """
    try:
        return cast(Experiment, OmegaConf.to_object(_known(cfg)))
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(f"{key} has no value: give {key}=…, or choose a file that sets it") from error
    except InterpolationResolutionError as error:
        key, cause = error.full_key, str(error).splitlines()[0]
        raise ConfigError(f"{key} cannot be resolved: {cause}; give {key}=…") from error


def _known(cfg: DictConfig) -> DictConfig:
    """The same, all keys of which the schema has.

    Hydra's `+key=value` adds a key to any class; a merge of plain values tells that the class has none such.

    Raises:
        ConfigError: a key is unknown.
    """
    try:
        return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.to_container(cfg)))
    except ConfigKeyError as error:
        raise ConfigError(f"{error.full_key} is not a key: 'tdpp launch --cfg job' prints all of them") from error


def read_experiment(config: Path) -> Experiment:
    """The experiment of a run's config.yaml.

    Raises:
        ConfigError: as `to_experiment`, for example because it is of another version of tdpp.
    """
    try:
        return to_experiment(load_yaml(config))
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from error


def config_text(experiment: Experiment) -> str:
    """What `read_experiment` reads: YAML, in which a `${` of a value stands for itself and refers to nothing."""
    return OmegaConf.to_yaml(OmegaConf.create(_literal(asdict(experiment))))


def _literal(value: Any) -> Any:
    """With the escapes of OmegaConf, for which backslashes have a meaning before `${` only."""
    if isinstance(value, dict):
        return {key: _literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_literal(part) for part in value]
    return _REFERENCE.sub(r"\1\1\\${", value) if type(value) is str else value


def compose(overrides: Sequence[str] = (), config_name: str = "config") -> Experiment:
    """The experiment that `tdpp launch <overrides>` runs.

    Raises:
        ConfigError: as `to_experiment`.
        hydra.errors.HydraException: an override cannot be parsed, or names no key or file.
    """
    return to_experiment(_composed(overrides, config_name))


def compose_unchecked(overrides: Sequence[str] = (), config_name: str = "config") -> DictConfig:
    """The same before any rule is checked: what a search for a plan reads, since its parts need not fit together yet.

    Raises:
        ConfigError: a key is unknown.
        hydra.errors.HydraException: an override cannot be parsed, or names no key or file.
    """
    return _known(_composed(overrides, config_name))


def _composed(overrides: Sequence[str], config_name: str) -> DictConfig:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return hydra_compose(config_name, list(overrides))


def hydra_message(error: BaseException) -> str:
    """What Hydra and OmegaConf say about a configuration, without their advice for their own developers."""
    said = [str(error), *([str(error.__cause__)] if isinstance(error.__cause__, OmegaConfBaseException) else [])]
    lines = (
        [f"{error.override}: is not KEY=VALUE as Hydra reads it"] if isinstance(error, OverrideParseException) else []
    )
    for line in "\n".join(said).splitlines():
        if line.startswith("Config search path"):
            break
        if line.strip() and not _NOISE.match(line):
            lines.append(line)
    if "Could not override" in str(error):
        lines.append(f"{_meant(lines)}'tdpp launch --cfg job' prints every key")
    return "\n".join(lines)


def _meant(lines: Sequence[str]) -> str:
    """The keys that an unknown one may have been meant for, in words."""
    for found in filter(None, map(_UNKNOWN.match, lines)):
        keys = getattr(getattr(schema, found["of"], None), "__dataclass_fields__", ())
        if near := get_close_matches(found["key"], keys, cutoff=0.6):
            return f"did you mean {' or '.join(near)}? "
    return ""
