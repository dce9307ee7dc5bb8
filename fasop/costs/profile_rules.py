"""What the figures of a profile must be: possible, or it is refused; and plausible, or a reader is warned.

A measurement that nobody expected may still be right, so that only what cannot be is an error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from conf.errors import ConfigError

if TYPE_CHECKING:
    from fasop.costs.profile import Cost, LayerProfile, LinkTimes, ModelCosts

LONGEST_MS = 600_000.0
"""Of a pass of one part of a model."""
SLOWEST_NS = 10_000.0
"""Of the optimizer, for a parameter."""
SLOWER_BACKWARD = (1 / 8, 8.0)
"""A layer's or head's backward pass, in forward passes: matrix products twice, so about 2. An embedding's is another
matter: its gradient is as large as the vocabulary."""
SLOWER_WITH_TENSOR = (0.8, 30.0)
"""A layer with a larger tensor size, times what a perfect split would take: collectives over a bad link may make it
slower than without, but only caches make it faster."""
SLOWER_WITH_BATCH = (0.5, 4.0)
"""A layer with a larger micro-batch: at least this part of the smaller one's time, and at most this many times what
its samples would take."""


def check(profile: LayerProfile) -> None:
    """Raises ConfigError for the first figure that cannot be."""
    for model, shape in profile.models.items():
        for key in ("hidden", "heads", "sequence_length", "vocab_size"):
            if getattr(shape, key) < 1:
                raise ConfigError(f"models.{model}.{key}={getattr(shape, key)} must be at least 1")
    if not profile.costs:
        raise ConfigError(f"costs of {profile.gpu} is empty: a profile has the times of one model at least")
    for costs in profile.costs:
        _possible(costs)
        if costs.model not in profile.models:
            raise ConfigError(
                f"costs are of model {costs.model!r}, but models has no such key: give models.{costs.model} its "
                "hidden, heads, sequence_length and vocab_size"
            )
    _distinct(profile.costs)
    for precision, nanoseconds in profile.optimizer_ns_per_parameter.items():
        if not (math.isfinite(nanoseconds) and nanoseconds > 0):
            raise ConfigError(f"optimizer_ns_per_parameter.{precision}={nanoseconds} must be above 0 nanoseconds")
    for place, links in (("within", profile.within), ("between", profile.between)):
        for kind, times in (("p2p", links.p2p), ("all_reduce", links.all_reduce)):
            if times is not None:
                _link(f"{place}.{kind}", times)


def doubts(profile: LayerProfile, costs: Sequence[ModelCosts]) -> list[str]:
    """The figures of a profile that are hard to believe, in words; of its costs only these are looked at."""
    found = [*_lone_doubts(costs), *_doubts_between(costs)]
    for precision, nanoseconds in profile.optimizer_ns_per_parameter.items():
        if nanoseconds > SLOWEST_NS:
            found.append(
                f"optimizer_ns_per_parameter.{precision}={nanoseconds:g} is more than {SLOWEST_NS:g} nanoseconds, and "
                "0.1 to 10 are usual; look for a slip, or measure again"
            )
    return found


def _possible(costs: ModelCosts) -> None:
    """Each figure by itself."""
    for key in ("tensor", "micro_batch_size"):
        if getattr(costs, key) < 1:
            raise ConfigError(f"{costs}: {key} must be at least 1")
    for name, part in _parts(costs):
        for key in ("forward", "backward"):
            ms = getattr(part, key)
            if not (math.isfinite(ms) and ms > 0):
                raise ConfigError(f"{costs}: {name}.{key}={ms} must be above 0 milliseconds")
        for key in ("forward_spread", "backward_spread", "activation_bytes"):
            value = getattr(part, key)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{costs}: {name}.{key}={value} must be 0 or above, or null where it is not known")
    if costs.peak_bytes is not None and costs.peak_bytes < 0:
        raise ConfigError(f"{costs}: peak_bytes={costs.peak_bytes} must be 0 or above, or null")


def _distinct(every: Sequence[ModelCosts]) -> None:
    seen = set()
    for costs in every:
        key = str(costs)
        if key in seen:
            raise ConfigError(f"{costs} is there twice; keep one of them")
        seen.add(key)


def _lone_doubts(every: Sequence[ModelCosts]) -> Iterator[str]:
    """Of each entry by itself."""
    for costs in every:
        for name, part in _parts(costs):
            for key in ("forward", "backward"):
                if (ms := getattr(part, key)) > LONGEST_MS:
                    yield f"{costs}: {name}.{key}={ms:g} ms is more than {LONGEST_MS / 60_000:g} minutes"
            if name != "embedding":
                yield from _unlike(f"{costs}: {name}.backward", part.backward, "forward", part.forward, SLOWER_BACKWARD)


def _doubts_between(every: Sequence[ModelCosts]) -> Iterator[str]:
    """Of entries that differ in one size alone."""
    by_tensor: dict[object, list[ModelCosts]] = defaultdict(list)
    by_batch: dict[object, list[ModelCosts]] = defaultdict(list)
    for costs in every:
        by_tensor[costs.model, costs.precision, costs.micro_batch_size].append(costs)
        by_batch[costs.model, costs.precision, costs.tensor].append(costs)
    for alike in by_tensor.values():
        for less, more in pairwise(sorted(alike, key=lambda costs: costs.tensor)):
            low, high = SLOWER_WITH_TENSOR
            split = low * less.tensor / more.tensor
            yield from _compared(less, more, f"tensor {less.tensor}", (split, high))
    for alike in by_batch.values():
        for less, more in pairwise(sorted(alike, key=lambda costs: costs.micro_batch_size)):
            low, high = SLOWER_WITH_BATCH
            samples = more.micro_batch_size / less.micro_batch_size
            yield from _compared(less, more, f"micro-batch {less.micro_batch_size}", (low, high * samples))


def _compared(less: ModelCosts, more: ModelCosts, other: str, limits: tuple[float, float]) -> Iterator[str]:
    for key in ("forward", "backward"):
        ms, other_ms = getattr(more.layer, key), getattr(less.layer, key)
        yield from _unlike(f"{more}: layer.{key}", ms, f"that of {other}", other_ms, limits)


def _unlike(what: str, ms: float, other: str, other_ms: float, limits: tuple[float, float]) -> Iterator[str]:
    low, high = limits
    if not low <= ms / other_ms <= high:
        yield (
            f"{what}={ms:g} ms is {ms / other_ms:.3g} times {other} ({other_ms:g} ms), and {low:.3g} to {high:.3g} "
            "times is usual; look for a slip in either, or measure again"
        )


def _link(name: str, times: LinkTimes) -> None:
    if not (math.isfinite(times.latency_us) and times.latency_us >= 0):
        raise ConfigError(f"{name}.latency_us={times.latency_us} must be 0 or above")
    if not (math.isfinite(times.gbit_per_s) and times.gbit_per_s > 0):
        raise ConfigError(f"{name}.gbit_per_s={times.gbit_per_s} must be above 0")
    if times.ranks < 2:
        raise ConfigError(f"{name}.ranks={times.ranks} must be at least 2")
    for size, us in times.us_by_bytes.items():
        if not (size > 0 and math.isfinite(us) and us > 0):
            raise ConfigError(f"{name}.us_by_bytes: {size}: {us} must be above 0, both")


def _parts(costs: ModelCosts) -> tuple[tuple[str, Cost], ...]:
    return ("embedding", costs.embedding), ("layer", costs.layer), ("head", costs.head)
