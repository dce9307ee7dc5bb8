"""What `tdpp launch` gives to Hydra's sweepers: a task, and a launcher that runs a batch of combinations together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from omegaconf import DictConfig

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
