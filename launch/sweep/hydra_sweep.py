"""Hydra for `tdpp launch`: calling its application, and a launcher and loader that compose a sweep's combinations.

What the combinations have in common is read and merged once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TextIO

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launch.machine.processes import variable_set

CHOICE = "hydra/launcher=tdpp"
"""The word with which Hydra takes the launcher, once it is registered."""
PLUGINS = Path(__file__).parent / "plugins"


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """What Hydra calls with each configuration, and the launcher behind the last one of a batch."""

    compose: Callable[[DictConfig], None]
    end_batch: Callable[[Sequence[JobReturn]], None]
    """May change what the sweeper is given of each combination."""

    def __call__(self, config: DictConfig) -> None:
        self.compose(config)


def register_launcher() -> None:
    """Makes the launcher known to Hydra, also where Hydra has looked for plugins before."""
    if str(PLUGINS) not in sys.path:
        sys.path.append(str(PLUGINS))
    Plugins.instance().register(import_module("hydra_plugins.tdpp_launcher").TdppLauncher)


class SweepLoader(ConfigLoaderImpl):
    """Hydra reads and merges the files of the chosen groups, which takes 0.1 CPU seconds, and then puts the single
    values in; it does both twice for each combination. Here each choice of groups is merged once."""

    def __init__(self, loader: ConfigLoader) -> None:
        super().__init__(loader.get_search_path())
        self._merged: dict[tuple[str, ...], DictConfig] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Sweepers call this to see whether the launcher, maybe elsewhere, can compose a batch, and take no notice of
        the result. Ours composes all of it here, before anything is started."""
        return master_config

    def combination(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """What Hydra composes of these. Raises HydraException: it cannot be composed."""
        try:
            overrides = OverridesParser.create().parse_overrides(sweep_overrides)
            values = [override for override in overrides if self._is_value(override)]
            return self._with_values(master_config, overrides, values)
        except (HydraException, OmegaConfBaseException):  # Hydra's own way says what is wrong
            return super().load_sweep_config(master_config, sweep_overrides)

    def _is_value(self, override: Override) -> bool:
        """Whether it is put in after all files are merged, and decides nothing of how they are."""
        return not (
            override.package is not None
            or override.is_delete()
            or override.is_sweep_override()
            or override.is_hydra_override()
            or self.repository.group_exists(override.key_or_group)
        )

    def _with_values(self, master: DictConfig, overrides: list[Override], values: list[Override]) -> DictConfig:
        lines = {id(override): str(override.input_line) for override in overrides}
        groups = tuple(lines[id(override)] for override in overrides if override not in values)
        if groups not in self._merged:
            self._merged[groups] = super().load_sweep_config(master, [*groups])
        made = deepcopy(self._merged[groups])
        self._apply_overrides_to_config(values, made)
        task = [override for override in overrides if not override.is_hydra_override()]
        with open_dict(made.hydra):
            made.hydra.overrides.task = [lines[id(override)] for override in task]
            form = made.hydra.job.config.override_dirname
            made.hydra.job.override_dirname = get_overrides_dirname(
                task, exclude_keys=form.exclude_keys, item_sep=form.item_sep, kv_sep=form.kv_sep
            )
        OmegaConf.copy_cache(from_config=master, to_config=made)
        return made


_INFO = ("-i", "--info")


@contextmanager
def called_with(argv: Sequence[str]) -> Iterator[None]:
    """Has an application of Hydra's read these arguments within it, and raise its errors."""
    has_info = any(word.partition("=")[0] in _INFO for word in argv)
    printed = _info_printed() if has_info else nullcontext()
    with _arguments(_with_launcher(argv)), variable_set("HYDRA_FULL_ERROR", "1"), printed:
        yield


@contextmanager
def _arguments(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads its arguments from sys.argv, and takes options only before or after all overrides."""
    before = sys.argv
    sys.argv = ["tdpp launch", *sorted(argv, key=lambda argument: argument not in ("-m", "--multirun"))]
    try:
        yield
    finally:
        sys.argv = before


def _with_launcher(argv: Sequence[str]) -> list[str]:
    """Puts our launcher beside the first override: Hydra takes overrides only in one row, and --info would take it."""
    overrides = (n for n, word in enumerate(argv) if word.startswith("~") or ("=" in word and not word.startswith("-")))
    place = next(overrides, 0)
    return [*argv[:place], CHOICE, *argv[place:]]


@contextmanager
def _info_printed() -> Iterator[None]:
    """Hydra logs what --info asks for, and logging only notes that stdout is closed or full; here that is raised."""
    logger, handler = logging.getLogger("hydra"), _Stdout(sys.stdout)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Stdout(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Called where the error of `emit` is at hand."""
        raise
