"""The words of `tdpp simulate` that are not Hydra's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, reworded
from conf.reading.values import NoValue, Reader, above_0, name_of, not_negative, one_of, parse_key_values, path, whole
from conf.schema.values.partition import NodeOrder
from fasop.errors import SearchError
from launch.commands.searching.shares import Overlap
from megatron_ext.contract.adaptive.forecast import GOALS

RESTART_S = 60.0
"""Seconds of a restart on other nodes, where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line asks for; every field but the last two is a word."""

    noise: str | None = None
    nodes: tuple[NodeOrder, ...] = ()
    epoch: int | None = None
    """Samples."""
    elastic: str | None = None
    restart_s: float | None = None
    profile: str | None = None
    csv: Path | None = None
    page: Path | None = None
    iidp: Path | None = None
    unit: int | None = None
    prices: Mapping[str, float] | None = None
    json: bool = False
    overrides: tuple[str, ...] = ()
    """Hydra's."""


def parse(argv: Sequence[str]) -> Arguments:
    """Takes the command's own words out of the others. Raises SearchError: a word has no such value, or no meaning
    beside another one."""
    own, overrides = parse_key_values([word for word in argv if word != "--json"], WORDS, SearchError)
    chooses = "elastic" in own or any(word.startswith("elastic.by=") for word in overrides)
    if "restart_s" in own and not chooses:
        raise SearchError(f"restart_s={own['restart_s']:g} is the time of a change of nodes: add elastic=time")
    if "iidp" in own and "profile" in own:
        raise SearchError(f"iidp={own['iidp']} names its own files of times; leave out profile={own['profile']}")
    if "iidp" not in own and (others := [word for word in ("unit", "prices") if word in own]):
        raise SearchError(f"{others[0]}=… applies only to iidp=FILE; leave it out")
    return Arguments(**own, json="--json" in argv, overrides=tuple(overrides))


def _noise(text: str) -> str:
    if not text:
        raise NoValue("is not a forecast; give a number, two numbers, a CSV file or a run")
    return text


def _nodes(text: str) -> tuple[NodeOrder, ...]:
    with reworded(NoValue, "must be sets of nodes, joined by commas, such as hgx+gpu2*7,gpu2*4: ", of=ConfigError):
        return tuple(dict.fromkeys(NodeOrder.parse(one) for one in text.split(",")))


def _goal(text: str) -> str:
    if text not in GOALS:
        raise NoValue(f"must be {' or '.join(GOALS)}: what the changes should save")
    return text


def _prices(text: str) -> dict[str, float]:
    found = {}
    for one in text.split(","):
        name, _, number = one.rpartition(":")
        if not name:
            raise NoValue("must be servers and US dollars an hour, such as node0:12.24,node4:3.06")
        found[name] = above_0(number)
    return found


WORDS: Mapping[str, Reader[Any]] = {
    "noise": _noise,
    "nodes": _nodes,
    "epoch": whole,
    "elastic": _goal,
    "restart_s": not_negative,
    "profile": name_of("profile"),
    "csv": path,
    "page": path,
    "iidp": path,
    "unit": whole,
    "prices": _prices,
}
"""The reader of each word, which is a field of `Arguments`."""
OF_PUBLIC: Mapping[str, Reader[Any]] = {
    "parallel.global_batch_size": whole,
    "parallel.micro_batch_size": whole,
    "parallel.streams": str,
    "train.overlap_optimizer": one_of(Overlap),
    "train.epochs": whole,
    "train.samples": whole,
    "runs_dir": path,
}
"""Keys that servers of IIDP or JABAS are simulated with, beside those of adapt."""
