"""The words of `tdpp search graph=FILE` that are not Hydra's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conf.reading.values import NoValue, Reader, above_0, flag, one_of, parse_key_values, path, read_by, whole, words_of
from conf.visible import plural
from fasop.errors import SearchError
from fasop.graphs.division import Level, Options, Sync
from fasop.graphs.own.machines import require_few

T = TypeVar("T")
MOST_LEVELS = 8
"""The most levels of a network."""
LEAST_BYTES_PER_S = 1e5
"""The slowest link that is believed: less was meant in another unit."""


def _graphs(text: str) -> dict[str, Path]:
    """A file, or for each GPU of a cluster its own: GPU:FILE,GPU:FILE."""
    parts = [re.fullmatch(r"([\w.-]+):(.+)", part) for part in text.split(",")]
    if not all(parts):
        return {"": path(text)}
    return {part[1]: Path(part[2]) for part in parts if part}


def _each(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """Values joined by commas, in their order; a value may come twice."""

    def values(text: str) -> tuple[T, ...]:
        try:
            return tuple(reader(part.strip()) for part in text.split(","))
        except NoValue as rule:
            raise NoValue(f"{rule}; separate several by commas") from rule

    return values


def _rate(text: str) -> float:
    rate = above_0(text)
    if rate < LEAST_BYTES_PER_S:
        raise NoValue(f"must be bytes per second, at least {LEAST_BYTES_PER_S:g}; 1.25 GB/s is 1.25e9")
    return rate


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line asks for; every field but the last is a word."""

    graph: Mapping[str, Path] = read_by(_graphs)
    """The graph's file for each GPU of the cluster; with the key "" for any."""
    reference: bool = read_by(flag, False)
    """The public optimizer's answer."""
    levels: tuple[int, ...] = read_by(_each(whole), ())
    """Machines of each level of the network, the innermost first."""
    bandwidths: tuple[float, ...] = read_by(_each(_rate), ())
    """Bytes a second, by level."""
    memory_gb: float | None = read_by(above_0, None)
    """10^9 bytes, of a machine."""
    straight: bool = read_by(flag, False)
    fewer: bool = read_by(flag, False)
    compression: float | None = read_by(above_0, None)
    sync: Sync = read_by(one_of(Sync), Sync.sum)
    csv: Path | None = read_by(path, None)
    page: Path | None = read_by(path, None)
    graph_output: Path | None = read_by(path, None)
    export: Path | None = read_by(path, None)
    overrides: tuple[str, ...] = ()
    """Hydra's."""

    @property
    def network(self) -> list[Level]:
        return [
            Level(machines=machines, bytes_per_s=rate)
            for machines, rate in zip(self.levels, self.bandwidths, strict=True)
        ]

    @property
    def options(self) -> Options:
        return Options(
            memory_bytes=None if self.memory_gb is None else self.memory_gb * 1e9,
            straight=self.straight,
            fewer=self.fewer,
            compression=self.compression,
            sync=self.sync,
        )


WORDS = words_of(Arguments)
"""How each word is read, which is a field of `Arguments`."""


def parse(argv: Sequence[str]) -> Arguments:
    """Takes these words out of the others. Raises SearchError: a word has no such value, or no meaning beside another
    one."""
    own, overrides = parse_key_values(argv, WORDS, SearchError)
    args = Arguments(**own, overrides=tuple(overrides))
    levels, rates = (",".join(f"{one:g}" for one in some) for some in (args.levels, args.bandwidths))
    if len(args.levels) != len(args.bandwidths):
        given = f"bandwidths={rates} has {len(args.bandwidths)}" if rates else "bandwidths= is not given"
        raise SearchError(
            f"levels={levels} has {plural(len(args.levels), 'level')}, but {given}; give one "
            f"bandwidth per level, in bytes per second, such as bandwidths=1.25e9 for 10 Gbit/s"
        )
    if not args.levels:
        for word in ("reference", "memory_gb"):
            if word in own:
                raise SearchError(
                    f"{word}={argv_of(argv, word)} applies to machines in levels: add levels= and bandwidths=, or "
                    f"leave it out to use the nodes of cluster="
                )
        if not overrides:
            raise SearchError(
                "graph= needs machines: levels=N, or levels=4,2 for 2 nodes of 4 GPUs, with as many bandwidths=; or "
                "cluster=CHOICE"
            )
        return args
    if len(args.levels) > MOST_LEVELS:
        raise SearchError(
            f"levels=: {len(args.levels)} levels of a network are too many, at most {MOST_LEVELS}; join those of equal "
            "bandwidth by multiplying their machines"
        )
    require_few(math.prod(args.levels), f"levels={levels}", "give fewer, such as one machine for each node")
    if overrides:
        raise SearchError(
            f"{overrides[0]} has no effect with levels={levels}, which describes the machines; leave it out, or leave "
            f"out levels= and bandwidths=. With levels= these words work: {', '.join(WORDS)}"
        )
    if [*args.graph] != [""]:
        raise SearchError(f"levels={levels} are machines of one kind; give graph=FILE, without the name of a GPU")
    return args


def argv_of(argv: Sequence[str], word: str) -> str:
    """The value of a word, as it was given last."""
    return [one.partition("=")[2] for one in argv if one.startswith(f"{word}=")][-1]
