"""Values that a command line takes from the demo, or from the schema, because nothing of the user's chose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from conf.compose import command_line
from conf.errors import ConfigError
from conf.hydra_files import hydra_session
from conf.reading.own_folders import SHIPPED
from conf.reading.user_files import config_dirs
from conf.reading.yaml_file import load_yaml

SEARCHED = ("cluster.name", "model.name", "parallel.global_batch_size", "train.precision")
"""What decides the result of a search."""
TRAINED = (*SEARCHED, "parallel.micro_batch_size", "data.prefix", "train.iterations", "train.lr")
"""What decides the result of a run."""
_SUBJECT = ("cluster.name", "model.name", "data.prefix")
"""Whoever chose none of these wants the demo, with its values."""
_UNDECIDED = "undecided"


def defaults_taken(words: Sequence[str], composed: object, keys: Sequence[str]) -> str | None:
    """In words, those of these keys that nobody chose, with their values; None if there are none, or the demo is meant.

    A value is chosen by a word of the command line, by an experiment, or by a file of a group that one of the two
    names. `composed` is what the command line gives: an `Experiment`, or the like of it.
    """
    folders, others = config_dirs(words)
    given = {word.partition("=")[0].lstrip("+"): word for word in others}
    listed = [entry for entry in load_yaml(SHIPPED / "config.yaml").defaults if not isinstance(entry, str)]
    ConfigStore.instance().store(name=_UNDECIDED, node={"defaults": ["_self_", *map(_undecided, listed)]})
    groups = {key for entry in listed for key in entry}
    choices = [word for key, word in given.items() if key in groups]
    try:
        with (
            command_line([*(f"--config-dir={folder}" for folder in folders), *choices]) as found,
            hydra_session(),
        ):
            chosen: Any = OmegaConf.to_container(hydra_compose(_UNDECIDED, found.all))
    except ConfigError:  # files that rely on what the demo has
        return None
    if getattr(getattr(composed, "model", None), "code", None) is not None:  # a module brings its data
        keys = [key for key in keys if key != "data.prefix"]
    train = getattr(composed, "train", None)
    if any(getattr(train, key, None) is not None for key in ("epochs", "samples")):
        keys = [key for key in keys if key != "train.iterations"]
    left = [key for key in (*_SUBJECT, *keys) if key not in given and not _has(chosen, key.split("."))]
    if all(key in left for key in _SUBJECT):
        return None
    defaults = [f"{key.removesuffix('.name')}={attrgetter(key)(composed)}" for key in keys if key in left]
    return f"defaults in use: {' '.join(defaults)}" if defaults else None


def _undecided(entry: Mapping[str, str | None]) -> dict[str, str | None]:
    """An entry of the defaults list without its choice, but for Hydra's own."""
    return {key: value if key.startswith("override ") else None for key, value in entry.items()}


def _has(chosen: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(chosen, dict) or part not in chosen:
            return False
        chosen = chosen[part]
    return bool(chosen != "???")
