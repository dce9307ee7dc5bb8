"""Hydra's loader of configurations, for a sweep: what its combinations have in common is read and merged once."""

from __future__ import annotations

from copy import deepcopy

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException


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
        """What Hydra composes of these.

        Raises:
            HydraException: it cannot be composed.
        """
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
