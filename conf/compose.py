"""From YAML files and overrides to an `Experiment`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, MissingMandatoryValue

from conf.errors import ConfigError
from conf.schema import Experiment
from conf.yaml_file import load_yaml


def register() -> None:
    """Makes the schema known to Hydra, as the config `schema` that `config.yaml` starts from."""
    ConfigStore.instance().store(name="schema", node=Experiment)


def to_experiment(cfg: DictConfig) -> Experiment:
    """The composed configuration as one checked, frozen object.

    Raises:
        ConfigError: a key is unknown, a value is missing, an interpolation leads nowhere, or a rule is broken.
    """
    try:
        # Hydra's `+key=value` adds a key to any class; a merge of plain values tells that the class has none such.
        whole = OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.to_container(cfg))
        return cast(Experiment, OmegaConf.to_object(whole))
    except ConfigKeyError as error:
        raise ConfigError(f"{error.full_key} is not a key: 'tdpp launch --cfg job' prints all of them") from error
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(f"{key} has no value: give {key}=…, or choose a file that sets it") from error
    except InterpolationResolutionError as error:
        key, cause = error.full_key, str(error).splitlines()[0]
        raise ConfigError(f"{key} cannot be resolved: {cause}; give {key}=…") from error


def read_experiment(config: Path) -> Experiment:
    """The experiment of a run's config.yaml.

    Raises:
        ConfigError: as `to_experiment`, for example because it is of another version of tdpp.
    """
    try:
        return to_experiment(load_yaml(config))
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from error


def compose(overrides: Sequence[str] = (), config_name: str = "config") -> Experiment:
    """The experiment that `tdpp launch <overrides>` runs.

    Raises:
        ConfigError: as `to_experiment`.
        hydra.errors.HydraException: an override cannot be parsed, or names no key or file.
    """
    return to_experiment(compose_unchecked(overrides, config_name))


def compose_unchecked(overrides: Sequence[str] = (), config_name: str = "config") -> DictConfig:
    """The same before any rule is checked: what a search for a plan reads, since its parts need not fit together yet.

    Raises:
        hydra.errors.HydraException: an override cannot be parsed, or names no key or file.
    """
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return hydra_compose(config_name, list(overrides))
