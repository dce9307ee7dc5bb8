"""The small languages of a plan: the pipeline partition, the shares of the replicas, the node order, and the numbers of
streams on a GPU (`parallel.streams`) and of forward passes that stages run ahead (`parallel.depth`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby

from conf.errors import ConfigError, reworded
from conf.visible import plural
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.parallel_config import MOST_RANKS
from megatron_ext.contract.schedule.stream_check import prove
from megatron_ext.contract.schedule.streams import TWO, Stream


@dataclass(frozen=True)
class Partition:
    """Transformer layers per pipeline stage.

    The embedding belongs to the first stage, the final norm and the head to the last; 0 is a stage without
    transformer layers. Written as in `0-11-8-8-8-8-5-0`.
    """

    layers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Partition:
        if not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})*", text):
            raise ConfigError(
                f"parallel.partition={text!r} is not a partition: join the layers of each stage by dashes, such as "
                f"0-11-8-8-8-8-5-0"
            )
        return cls(tuple(int(part) for part in text.split("-")))

    @classmethod
    def even(cls, layers: int, stages: int) -> Partition:
        """The most even partition; the first stages take what is left over, for the last one has the head."""
        share, rest = divmod(layers, stages)
        return cls(tuple(share + (stage < rest) for stage in range(stages)))

    def fitted(self, layers: int) -> Partition:
        """The nearest partition with as many stages and `layers` layers in all.

        Largest remainders: every stage gets its share of `layers` rounded down, and those with the largest
        fractions one more. So no stage moves away from the others, and one without layers stays so.
        """
        total = sum(self.layers)
        if total == 0:
            return Partition.even(layers, len(self.layers))
        parts = [part * layers // total for part in self.layers]
        by_fraction = sorted(range(len(parts)), key=lambda i: self.layers[i] * layers % total, reverse=True)
        for stage in by_fraction[: layers - sum(parts)]:
            parts[stage] += 1
        return Partition(tuple(parts))

    def __str__(self) -> str:
        return "-".join(map(str, self.layers))


@dataclass(frozen=True)
class Shares:
    """How the micro-batches of an iteration are shared by the replicas, in proportion.

    Written as numbers joined by dashes, with `*N` for a run of N replicas: `3-1`, `3*4-1*4`.
    """

    numbers: tuple[int, ...]

    @classmethod
    def even(cls, micro_batches: int, replicas: int) -> Shares:
        """The most even shares; the first replicas take what is left over."""
        share, rest = divmod(micro_batches, replicas)
        return cls(tuple(share + (replica < rest) for replica in range(replicas)))

    @classmethod
    def parse(cls, text: str) -> Shares:
        try:
            return cls(numbers_in(text))
        except ValueError as error:
            raise ConfigError(
                f"parallel.shares={text!r} is invalid: {error}; write for example 3-1 or 3*4-1*4"
            ) from None

    @property
    def least(self) -> int:
        """The fewest micro-batches that can be shared so."""
        return sum(self.numbers) // math.gcd(*self.numbers)

    def of(self, micro_batches: int) -> tuple[int, ...]:
        """Those of each replica; `micro_batches` is a multiple of `least`."""
        whole = sum(self.numbers)
        return tuple(micro_batches * number // whole for number in self.numbers)

    def fitted(self, micro_batches: int) -> Shares:
        """The nearest shares of so many micro-batches, no fewer than there are replicas, none being 0.

        Largest remainders, as of a partition; where every replica but has one, those that are furthest ahead have less.
        """
        total = sum(self.numbers)
        counts = [max(1, micro_batches * number // total) for number in self.numbers]
        left = micro_batches - sum(counts)
        ahead = [count * total - micro_batches * number for count, number in zip(counts, self.numbers, strict=True)]
        for place in sorted(range(len(counts)), key=ahead.__getitem__)[: max(0, left)]:
            counts[place] += 1
        heap = [(-over, place) for place, over in enumerate(ahead) if counts[place] > 1] if left < 0 else []
        heapify(heap)
        for _ in range(-left):
            over, place = heappop(heap)
            counts[place] -= 1
            if counts[place] > 1:
                heappush(heap, (over + total, place))
        return Shares(tuple(counts))

    def __str__(self) -> str:
        return run_length_text(self.numbers, "-")


@dataclass(frozen=True)
class NodeOrder:
    """The node group of each node of the plan, in the order of node ranks; the first node is the master.

    Written as group names joined by plus signs, with `*N` for a run of N nodes: `hgx+gpu2*7`.
    """

    groups: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> NodeOrder:
        groups: list[str] = []
        for item in text.split("+"):
            match = re.fullmatch(r"\s*([\w.-]+?)\s*(?:\*\s*([1-9][0-9]{0,5}))?\s*", item)
            if match is None:
                raise ConfigError(
                    f"parallel.node_order={text!r} is not a node order: {item!r} is neither a group name nor "
                    "GROUP*COUNT; write for example hgx+gpu2*7"
                )
            groups += [match[1]] * int(match[2] or 1)
        return cls(tuple(groups))

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> NodeOrder:
        """Every node, group after group, in the order of the mapping."""
        return cls(tuple(name for name, count in counts.items() for _ in range(count)))

    def __str__(self) -> str:
        return run_length_text(self.groups, "+")


def numbers_in(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, joined by dashes, with `*N` for a run of N: `3-1`, `3*4-1*4`. Raises ValueError: what is
    wrong, in words."""
    numbers: list[int] = []
    for item in text.split("-"):
        match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*(?:\*\s*([1-9][0-9]{0,5}))?\s*", item)
        if match is None:
            raise ValueError(f"{item!r} is neither a whole number of at least 1 nor NUMBER*TIMES")
        if len(numbers) + int(match[2] or 1) > MOST_RANKS:
            raise ValueError(f"with {item!r} it has more than {MOST_RANKS} numbers")
        numbers += [int(match[1])] * int(match[2] or 1)
    return tuple(numbers)


def stages_in(text: str, item: str) -> tuple[str, ...]:
    """Values by stage, each of the regular expression `item`, joined by dashes, with `*N` for a run of N: `3*2-1`.
    Raises ValueError: what is wrong, in words."""
    found: list[str] = []
    for one in text.split("-"):
        match = re.fullmatch(rf"\s*({item})\s*(?:\*\s*([1-9][0-9]{{0,5}}))?\s*", one)
        if match is None or len(found) + int(match[2] or 1) > MOST_RANKS:
            raise ValueError(f"{one!r} is neither one of them nor VALUE*TIMES")
        found += [match[1]] * int(match[2] or 1)
    return tuple(found)


def run_length_text(items: Iterable[object], join: str) -> str:
    """The same item several times in a row as `item*N`."""
    runs = ((item, sum(1 for _ in same)) for item, same in groupby(items))
    return join.join(str(item) if count == 1 else f"{item}*{count}" for item, count in runs)


FEW = 4
"""So many are each written: 1-1 is read more easily than 1*2."""


def dashed(numbers: Sequence[int]) -> str:
    """3-1, or 16*8-11*4 of many."""
    return "-".join(map(str, numbers)) if len(numbers) <= FEW else run_length_text(numbers, "-")


AUTO = "auto"
"""A launch is to choose them."""
MOST = 64
"""Copies on one GPU."""


def by_replica(text: str | None, replicas: int) -> tuple[int, ...]:
    """The streams of each replica; where they are still to be chosen, 1 each. Raises ConfigError: the text does not say
    that."""
    try:
        numbers = (1,) if text is None or text == AUTO else numbers_in(text)
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= MOST for number in numbers):
        raise ConfigError(
            f"parallel.streams={text} must be a number from 1 to {MOST}, or one for each replica, such as "
            "3-1 or 3*4-1*4, or auto"
        )
    if len(numbers) == 1:
        return numbers * replicas
    if len(numbers) != replicas:
        raise ConfigError(
            f"parallel.streams={text} is for {plural(len(numbers), 'replica')}, but parallel.data={replicas}; "
            "give one number, or one per replica"
        )
    return numbers


def check_depth(stream: Stream) -> None:
    """Whether a stream comes to its end, and meets the weights that it is to meet. Raises ConfigError: it does not."""
    stages = range(len(stream.replicas))
    depth = "" if stream.depth is None else "-".join(map(str, stream.depth))
    if stream.depth is not None and len(stream.depth) != len(stages):
        raise ConfigError(
            f"parallel.depth={depth} is for {plural(len(stream.depth), 'stage')}, but "
            f"parallel.pipeline={len(stages)}; give a number for each stage"
        )
    deepest = max(map(stream.ahead, stages))
    if stream.semantics == TWO and stream.update_every < deepest:
        raise ConfigError(
            f"parallel.update_every={stream.update_every} must be at least {deepest} with parallel.semantics=two, the "
            f"forward passes that a stage runs ahead; otherwise a pass would need a third version; use "
            f"parallel.update_every={deepest}, or parallel.semantics=stashing"
        )
    if stream.depth is None:  # proved for all by tests
        return
    usual = "-".join(str(replace(stream, depth=None).ahead(stage)) for stage in stages)
    with reworded(
        ConfigError,
        f"parallel.depth={depth} would deadlock (",
        f"); use parallel.depth={usual}, or less on later stages",
        of=EngineError,
    ):
        prove(stream, 2 * stream.in_flight + 2 * stream.period)


def depth_in(text: str) -> tuple[int, ...]:
    """The forward passes that each stage takes ahead. Raises ConfigError: the text does not say that."""
    if not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})*", text):
        raise ConfigError(
            f"parallel.depth={text!r} is not a depth: join each stage's number of forward passes before its first "
            f"backward pass by dashes, such as 3-1-0"
        )
    return tuple(int(part) for part in text.split("-"))
