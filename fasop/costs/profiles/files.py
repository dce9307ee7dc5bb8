"""Where profiles lie, reading them, and `profile=NAME`: what 'tdpp profile' saved so, as keys of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.compose import to_object, with_known_keys
from conf.composition_cache import kept_object
from conf.errors import ConfigError
from conf.reading.own_folders import PROFILES, SUFFIX, is_file, own_folders, path_of
from conf.reading.words import in_word
from conf.schema.cluster import Cluster
from conf.schema.values.links import FILE, KEY, only
from fasop.costs.profiles.profile import LayerProfile, Links

if TYPE_CHECKING:
    from omegaconf import DictConfig

FOLDER = Path(__file__).parents[2] / "profiles"


def name_of(wanted: str, gpu: str, *, alone: bool) -> str:
    """Return the name of a GPU's profile; of several, the name that is asked for ends with the GPU's."""
    if alone:
        return wanted
    return f"{wanted.removesuffix(SUFFIX)}_{gpu}{SUFFIX}" if is_file(wanted) else f"{wanted}_{gpu}"


def profile_path(name: str) -> Path:
    """Find the file of a profile that has a name: in `profiles` of a folder of your own, or among the shipped ones."""
    return path_of(name, PROFILES, FOLDER)


def read_profile(name: str) -> LayerProfile:
    """The profile `fasop/profiles/<name>.yaml`, or of the file `name`. Raises ConfigError: it does not exist, is not
    one, or holds what cannot be."""
    path = profile_path(name)
    return kept_object(LayerProfile, path, partial(_read, path, name))


def _read(path: Path, name: str) -> LayerProfile:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    from conf.reading.yaml_file import fault, load_yaml

    try:
        keys = load_yaml(path, LayerProfile)
        profile = OmegaConf.to_object(OmegaConf.unsafe_merge(OmegaConf.structured(LayerProfile), keys))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{path} is not a profile: {error.full_key} is not set (docs/profile.md)") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} is not a profile: {fault(error)} (docs/profile.md)") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        folders = [FOLDER, *(folder / PROFILES for folder in own_folders())]
        known = ", ".join(sorted({other.stem for folder in folders for other in folder.glob(f"*{SUFFIX}")}))
        others = "" if is_file(name) else f" in {' or '.join(map(str, folders))}; the known ones are {known}"
        raise ConfigError(f"no profile {name!r}{others}; 'tdpp profile' makes one") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    assert isinstance(profile, LayerProfile)
    return profile


def with_profile(cfg: DictConfig, profile: str, words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The configuration with these keys, and the words that say the same. What `words` give themselves stays. Raises
    ConfigError: there is no such profile, or the cluster breaks a rule of its own."""
    from omegaconf import OmegaConf  # a search whose parts were read before needs none of it

    cfg = with_known_keys(cfg, None)
    cluster = to_object(cfg, Cluster, "cluster")
    given = {word.partition("=")[0].lstrip("+") for word in words}
    of_links = any(key == FILE or key.startswith(KEY) for key in given)
    added = []
    for key, value in _values(cluster, profile):
        if key in given or (key == KEY and (of_links or cluster.links)):
            continue
        OmegaConf.update(cfg, key, value)
        added.append(f"{'+' if key == KEY else ''}{key}={in_word(value)}")
    return cfg, added


def _values(cluster: Cluster, profile: str) -> Iterator[tuple[str, Any]]:
    used = list(dict.fromkeys(group.gpu for group in cluster.groups.values()))
    names = {gpu: name_of(profile, gpu, alone=len(used) == 1) for gpu in used}
    profiles = {gpu: read_profile(name) for gpu, name in names.items()}
    for gpu, name in names.items():
        yield f"cluster.gpus.{gpu}.profile", name
    for name, group in cluster.groups.items():
        yield from _of_group(name, profiles[group.gpu])
    table: dict[str, dict[str, Any]] = {}
    for one in profiles.values():
        for row, columns in only(one.links, cluster.groups).items():
            table.setdefault(row, {}).update(columns)
    if table:
        yield KEY, table


def _of_group(name: str, profile: LayerProfile) -> Iterator[tuple[str, float]]:
    places: tuple[tuple[str, Links], ...] = (("intra", profile.within), ("inter", profile.between))
    for place, links in places:
        if links.p2p is not None:
            yield f"cluster.groups.{name}.{place}_latency_us", links.p2p.latency_us
            yield f"cluster.groups.{name}.{place}_gbit_per_s", links.p2p.gbit_per_s
