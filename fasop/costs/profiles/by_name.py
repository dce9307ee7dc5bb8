"""`profile=NAME`: what 'tdpp profile' saved under a name, as keys of a cluster: the GPUs' times, and the links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf.compose import to_object, with_known_keys
from conf.reading.words import in_word
from conf.schema.cluster import Cluster
from conf.schema.values.links import FILE, KEY, only
from fasop.costs.profiles.files import name_of, read_profile
from fasop.costs.profiles.profile import LayerProfile, Links


def with_profile(cfg: DictConfig, profile: str, words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The configuration with these keys, and the words that say the same. What `words` give themselves stays.

    Raises:
        ConfigError: there is no such profile, or the cluster breaks a rule of its own.
    """
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
