"""Files of keys and values that people may have edited."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from conf.errors import ConfigError

NOT_TEXT = "not a text file"
NO_KEYS = "it has no keys"


def load_yaml(path: Path) -> DictConfig:
    """The keys of a YAML file.

    Raises:
        ConfigError: it is not YAML, has no keys, or has a reference `${…}` that cannot be read.
        OSError: it cannot be read.
    """
    try:
        loaded = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{NOT_TEXT}: byte {error.start} is no UTF-8") from error
    except YAMLError as error:
        raise ConfigError(f"not YAML: {yaml_fault(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(fault(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        loaded = None  # what OmegaConf says of a lone word or number
    if not isinstance(loaded, DictConfig):
        raise ConfigError(NO_KEYS)
    return loaded


def yaml_fault(error: YAMLError) -> str:
    """Why a text is no YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    said = ": ".join(filter(None, (error.context, error.problem)))
    return f"{said} (line {mark.line + 1}, column {mark.column + 1})"


def fault(error: OmegaConfBaseException) -> str:
    """The key whose value cannot be, and why; of an unknown one, those of its class that it may stand for."""
    where = f"{error.full_key}: " if error.full_key else ""
    keys = getattr(error.object_type, "__dataclass_fields__", ()) if isinstance(error, ConfigKeyError) else ()
    near = get_close_matches(str(error.key), keys)
    return where + str(error).splitlines()[0] + (f"; did you mean {' or '.join(near)}?" if near else "")
