"""Files of keys and values that people may have edited."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from conf.errors import ConfigError


def load_yaml(path: Path) -> DictConfig:
    """The keys of a YAML file.

    Raises:
        ConfigError: it is not YAML, or has no keys.
        OSError: it cannot be read.
    """
    try:
        loaded = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a text file: byte {error.start} is no UTF-8") from error
    except YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        loaded = None  # what OmegaConf says of a lone word or number
    if not isinstance(loaded, DictConfig):
        raise ConfigError("it has no keys")
    return loaded
