"""Which of train.iterations, train.epochs and train.samples says how long a training is."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from conf.errors import ConfigError
from conf.schema.train import LENGTHS


def choose_length(cfg: DictConfig, words: Sequence[str]) -> None:
    """Takes that of the command line in the place of what files give.

    Raises:
        ConfigError: one place gives two.
    """
    if OmegaConf.is_missing(cfg, "train") or cfg.train is None:
        return
    named = {word.partition("=")[0].lstrip("+") for word in words}
    on_line = [key for key in LENGTHS if f"train.{key}" in named and _given(cfg.train, key)]
    for key in LENGTHS if on_line else ():
        if key not in on_line:
            cfg.train[key] = None
    given = [key for key in LENGTHS if _given(cfg.train, key)]
    if len(given) > 1:
        values = " and ".join(f"train.{key}={cfg.train[key]}" for key in given)
        rest = " ".join(f"train.{key}=null" for key in given[:-1])
        raise ConfigError(
            f"{values} {'both' if len(given) == 2 else 'all'} set the length of the training; give one of them, or if "
            f"a file sets the other, add {rest}"
        )


def _given(train: DictConfig, key: str) -> bool:
    return not OmegaConf.is_missing(train, key) and train.get(key) is not None
