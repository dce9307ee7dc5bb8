"""The files that Hydra composes, read so that a key that holds text gets what is written
(conf/reading/written_text.py): a source of configurations beside Hydra's own, for the folders of tdpp and of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from conf.composition_cache import ROOT, VARIES, asks_the_machine, state_of
from conf.reading.own_folders import SHIPPED
from conf.reading.user_files import SCHEME
from conf.reading.written_text import kind_at, load
from conf.schema.cluster import Gpu
from conf.schema.experiment import Experiment

_LOCK = RLock()


@contextmanager
def hydra_session() -> Iterator[None]:
    """Within it, Hydra composes from the configurations in `conf`; other threads wait for their turn."""
    register()
    with _LOCK, initialize_config_module("conf", version_base="1.3"):
        yield


def composed(name: str, words: Sequence[str]) -> tuple[DictConfig, Mapping[Path, str]]:
    """What Hydra composes of a config and words, and what it looked up for that (`conf.composition_cache`)."""
    with hydra_session():
        TdppFiles.looked_up = {}
        return compose(name, [*words]), TdppFiles.looked_up


_GLOBAL = ("_global_", "")


class TdppFiles(FileConfigSource):
    """A folder of groups."""

    looked_up: ClassVar[dict[Path, str]] = {}
    """The states of all paths that Hydra has asked for in this session."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if not path.exists():
            raise ConfigLoadError(f"Config not found : {path}")
        self._look_up(self._normalize_file_name(config_path))
        with path.open(encoding="utf-8") as file:
            text = file.read()
            header = ConfigSource._get_header_dict(text[:512])
            if config_path != ROOT and asks_the_machine(text):
                self.looked_up[path] = VARIES
            file.seek(0)
            config = load(file, kind_of(config_path, header["package"]))
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)

    def is_group(self, config_path: str) -> bool:
        self._look_up(config_path)
        return super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        self._look_up(self._normalize_file_name(config_path))
        return super().is_config(config_path)

    def _look_up(self, name: str) -> None:
        path = Path(self.path, name)
        if path not in self.looked_up:
            self.looked_up[path] = state_of(path)


def kind_of(config_path: str, package: str | None) -> Any:
    """The class that a file's keys belong to, by the name that Hydra has for it, such as `cluster/mine`, and by the
    package that its first lines name; None if the schema does not know it."""
    group = config_path.removesuffix(".yaml").split("/")[:-1]
    if package is None:
        return Gpu if group[:1] == ["gpu"] else kind_at(Experiment, group)
    return kind_at(Experiment, [] if package in _GLOBAL else package.split("."))


class ShippedFiles(SearchPathPlugin):
    """Has Hydra read tdpp's own folder, into which a user of a checkout puts files too, in the same way."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("tdpp", f"{SCHEME}://{SHIPPED}")


def register() -> None:
    """Makes both known to Hydra, and the schema as the config `schema` that `config.yaml` starts from."""
    for plugin in (TdppFiles, ShippedFiles):
        Plugins.instance().register(plugin)
    ConfigStore.instance().store(name="schema", node=Experiment)
