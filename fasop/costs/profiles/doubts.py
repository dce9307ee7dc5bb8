"""What a reader of predicted times must know about them: what they rest on, and which measured figures are odd.

A measurement that nobody expected may still be right: what cannot be is an error (`rules.py`), what is hard
to believe a warning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from conf.schema.cluster import CPU
from conf.schema.engine import EngineKind
from conf.schema.model import Model
from fasop.costs.hardware import NodeKind
from fasop.costs.hardware_doubts import node_doubts
from fasop.costs.layers import Basis, why_not_measured
from fasop.costs.network import links
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_doubts import link_doubts
from fasop.costs.network.links import Link
from fasop.costs.profiles.profile import LayerProfile, ModelCosts
from fasop.costs.profiles.steps import CollectiveTimes
from fasop.costs.roofline import roofline
from fasop.costs.sizes import ADAM_BYTES
from fasop.costs.training import Training

LONGEST_MS = 600_000.0
"""The longest believable pass of one part of a model."""
SLOWEST_NS = 10_000.0
"""The longest believable time of the optimizer, for a parameter."""
SLOWER_BACKWARD = (0.7, 8.0)
"""A layer's backward pass, in forward passes: matrix products twice, so about 2. An embedding's is another matter: its
gradient is as large as the vocabulary."""
HEAD_BACKWARD = (1 / 8, 8.0)
"""The same of a head, whose loss may make its gradients in the forward pass."""
SLOWER_THAN_PEAK = (0.4, 50.0)
"""A part of a model, times what the GPU's peak rates allow (`roofline`): shipped profiles have 0.6 to 24."""
SLOWER_OPTIMIZER = (0.2, 50.0)
"""The same of the optimizer: caches of a CPU hold what it moves."""
SLOWER_SPLIT = 1.5
"""A layer in a tensor group, at most, times what does not shrink, its part of the rest and the group's sums."""
SLOWER_WITH_TENSOR = (0.8, 30.0)
"""A layer with a larger tensor size, times what a perfect split would take: collectives over a bad link may make it
slower than without, but only caches make it faster."""
SLOWER_WITH_BATCH = (0.95, 1.5)
"""A layer with a larger micro-batch: at least this part of the smaller one's time, and at most this many times what
its samples would take."""
FALLING = 0.95
"""A collective of more bytes: at least this part of the time of fewer."""
UNLIKE_LINK = 4.0
"""How many times a collective's ring may be faster or slower than the links of the configuration, with many bytes."""
LARGE = 2**24
"""Many."""
FURTHER = 0.4
"""What a further sample of a micro-batch takes, at least, in what it took between the two sizes before: kernels that
fill a GPU better make it a little less, never so much."""
ON_CPU = (0.85, 0.2)
"""The lower limits of the last two on a CPU, whose times differ more from one measurement to the next."""

SMALL = frozenset(("embedding", "decoder_embedding", "encoder_norm", "head"))
"""Kinds of blocks of which a model has one: what starting a pass costs may be most of their time."""

_BASES = {
    Basis.OTHER_FORMAT: "other format: measured in fp16 for bf16, or the other way round; peak rates are the same",
    Basis.OTHER_ENGINE: "other engine: measured with the layers of another engine, whose kernels take other times",
    Basis.EXTRAPOLATED: "extrapolated: beyond the micro-batch sizes of the profile, in proportion; an upper bound",
    Basis.NOT_MEASURED: "not measured: what the GPUs' peak rates allow; real runs take longer",
}


def doubts(training: Training, kinds: Sequence[NodeKind], bases: Collection[Basis]) -> Iterator[str]:
    """Say what is doubtful about times on these nodes: what some of them rest on, what is odd about a profile, and why
    it does not serve."""
    yield from (text for basis, text in _BASES.items() if basis in bases)
    for name, profile in {kind.gpu.profile: kind.profile for kind in kinds}.items():
        if profile is not None:
            yield from (f"profile {name!r}: {doubt}" for doubt in profile_doubts(profile, training.model))
    for gpu, profile in {kind.gpu: kind.profile for kind in kinds}.items():
        if profile is not None and profile.gpu != gpu.name:
            yield f"profile {gpu.profile!r} is for {profile.gpu}, not for {gpu.name}"
        if (why := why_not_measured(gpu, profile, training)) is not None:
            yield why
        elif profile is not None and not profile.is_of(training.engine):
            measured = in_words(profile.engine, profile.engine_options)
            yield (
                f"profile {gpu.profile!r} of {gpu.name} has times of {measured}, and this is "
                f"{in_words(training.engine.kind, training.engine.options)}: measure its layers with 'tdpp profile' "
                f"and the same keys of engine"
            )
    for kind in kinds:
        yield from _unlike_links(kind)
    known = [kind for kind in kinds if kind.profile is not None and kind.profile.gpu == kind.gpu.name]
    yield from dict.fromkeys(text for kind in known for text in _unlike_rates(kind, training.model))
    groups = {kind.name: kind.group for kind in kinds}
    yield from node_doubts(groups, {kind.name: kind.gpu for kind in kinds})
    of_pairs = {(kind.name, name): link for kind in kinds for name, link in kind.links.items() if name in groups}
    yield from link_doubts(groups, of_pairs)


def in_words(kind: EngineKind | None, options: Mapping[str, object]) -> str:
    """Whose layers were measured, as keys."""
    return " ".join([f"engine={kind}", *(f"engine.options.{key}={value}" for key, value in sorted(options.items()))])


def profile_doubts(profile: LayerProfile, model: Model | None = None) -> list[str]:
    """The figures of a profile that are hard to believe, in words; with a model those of other models are left out."""
    names = {*profile.models, *profile.modules} if model is None else profile.names(model)
    costs = [costs for costs in profile.costs if costs.model in names]
    usual = [one for one in costs if one.model in profile.models]  # a user's blocks may do anything
    found = [
        *(doubt for one in profile.collectives for doubt in _falling(one)),
        *_too_long(costs),
        *_lone_doubts(usual),
        *_doubts_between(usual, *(ON_CPU if profile.gpu == CPU else (SLOWER_WITH_BATCH[0], FURTHER))),
    ]
    for precision, nanoseconds in profile.optimizer_ns_per_parameter.items():
        if nanoseconds > SLOWEST_NS:
            found.append(
                f"optimizer_ns_per_parameter.{precision}={nanoseconds:g} is more than {SLOWEST_NS:g} nanoseconds "
                f"(usual are 0.1 to 10); check the value, or measure again"
            )
    return found


def _falling(times: CollectiveTimes) -> Iterator[str]:
    """Say where a collective takes less time for more bytes."""
    for (size, us), (larger, its_us) in pairwise(sorted(times.us_by_bytes.items())):
        if its_us < FALLING * us:
            yield (
                f"collectives: {times.name}: {larger} bytes take {its_us:g} us, less than {size} bytes ({us:g} us); "
                f"predictions use {us:g} us for both; check both values, or measure again"
            )


def _unlike_links(kind: NodeKind) -> Iterator[str]:
    """Say which measured messages and collectives of a node group contradict the links that it is configured with."""
    if (profile := kind.profile) is None:
        return
    found = [
        (f"{place}.{name} of profile {kind.gpu.profile!r} has a link", place == "between", times.gbit_per_s)
        for place, of_place in (("within", profile.within), ("between", profile.between))
        for name, times in (("p2p", of_place.p2p), ("all_reduce", of_place.all_reduce))
        if times is not None
    ]
    for times in profile.collectives:
        size, between = max(times.us_by_bytes), times.nodes > 1
        stride = max(1, kind.gpus * times.nodes // times.ranks) if between else 1
        exchange = Exchange(times.operation, times.ranks, size, stride)
        link = kind.measured(exchange, between=between)
        assert link is not None
        steps, share = exchange.steps
        rate = 8e-3 * steps * share * size / times.us_by_bytes[size]  # starts included: too fast it is in any case
        if size >= LARGE and link.s_per_byte > 0:
            rate = 8e-9 / link.s_per_byte
        elif rate <= UNLIKE_LINK * _configured(kind, between)[1]:
            continue
        found.append((f"collectives of profile {kind.gpu.profile!r}: {times.name} has links", between, rate))
    for what, between, rate in found:
        key, configured = _configured(kind, between)
        if not 1 / UNLIKE_LINK <= rate / configured <= UNLIKE_LINK:
            yield (
                f"{what} of {rate:.3g} Gbit/s, but cluster.groups.{kind.name}.{key}={configured:g}; check both values, "
                f"or measure again"
            )


def _configured(kind: NodeKind, between: bool) -> tuple[str, float]:
    """The key of a node group's bandwidth, and its value."""
    key = f"{'inter' if between else 'intra'}_gbit_per_s"
    return key, getattr(kind.group, key)


def _unlike_rates(kind: NodeKind, model: Model) -> Iterator[str]:
    """Say which times of a profile its GPU cannot have by its peak rates or hardly would, of each kind of part the one
    that is furthest off, and where a layer gains too little from a tensor group."""
    profile, gpu, within = kind.profile, kind.gpu, links.within(kind.group)
    assert profile is not None
    unlike: dict[str, list[tuple[float, str]]] = defaultdict(list)

    def compare(part: str, what: str, value: float, least: float, limits: tuple[float, float], unit: str) -> None:
        low, high = limits
        if not low * least <= value <= high * least:
            text = (
                f"profile {gpu.profile!r}: {what}={value:g} {unit} is {value / least:.3g} times what the peak rates of "
                f"{gpu.name} allow ({least:.3g} {unit}), but usual is {_in_words(low, high)}"
            )
            unlike[part].append((abs(math.log(value / least)), text))

    alike = [costs for costs in profile.costs if costs.model in profile.names(model) & profile.models.keys()]
    for costs in alike:
        size = (gpu, model, costs.precision, costs.tensor, costs.micro_batch_size)
        best, alone = roofline(*size, within), roofline(*size, Link(latency_s=0.0, s_per_byte=0.0))
        for name, part in costs.parts.items():
            for key in ("forward", "backward") if name in best else ():  # a profile may have parts of other models
                ms, least, unsummed = getattr(part, key), *(1e3 * getattr(one[name], key) for one in (best, alone))
                low, high = SLOWER_THAN_PEAK
                if name.endswith("embedding") and key == "backward":
                    high = math.inf  # its gradient is as large as the vocabulary
                compare(name, f"{costs}: {name}.{key}", ms, unsummed if ms < least else least, (low, high), "ms")
                split = _split(alike, costs, name, key)
                slower = SLOWER_SPLIT * (2 if gpu.is_cpu else 1)
                if split is not None and ms > slower * (split + least - unsummed):
                    yield (
                        f"profile {gpu.profile!r}: {costs}: {name}.{key}={ms:g} ms, but by its times without a tensor "
                        f"group it would take {split:.3g} ms, and sums of {least - unsummed:.3g} ms by cluster.groups."
                        f"{kind.name}.intra_gbit_per_s={kind.group.intra_gbit_per_s:g}; check these values, or measure "
                        f"again"
                    )
    for precision, ns in profile.optimizer_ns_per_parameter.items():
        least = ADAM_BYTES[precision] / gpu.memory_gb_per_s
        compare("optimizer", f"optimizer_ns_per_parameter.{precision}", ns, least, SLOWER_OPTIMIZER, "ns")
    for found in unlike.values():
        others = f" ({len(found) - 1} others are as unusual)" if len(found) > 1 else ""
        yield f"{max(found)[1]}{others}; check the values, their units and the rates of cluster.gpus, or measure again"


def _in_words(low: float, high: float) -> str:
    return f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"


def _split(alike: Sequence[ModelCosts], costs: ModelCosts, name: str, key: str) -> float | None:
    """Milliseconds of a layer's pass in a tensor group, but for its sums, by two micro-batches without one, which tell
    what does not shrink; None: these were not measured."""
    if costs.tensor == 1 or name in SMALL:
        return None
    whole: dict[int, float] = {
        one.micro_batch_size: getattr(one.parts[name], key)
        for one in alike
        if one.tensor == 1 and one.precision is costs.precision and name in one.parts
    }
    size = costs.micro_batch_size
    fewer = max((one for one in whole if one < size), default=None)
    if size not in whole or fewer is None:
        return None
    fixed = min(whole[size], max(0.0, (size * whole[fewer] - fewer * whole[size]) / (size - fewer)))
    return fixed + (whole[size] - fixed) / costs.tensor


def _too_long(every: Sequence[ModelCosts]) -> Iterator[str]:
    for costs in every:
        for name, part in costs.parts.items():
            for key in ("forward", "backward"):
                if (ms := getattr(part, key)) > LONGEST_MS:
                    yield f"{costs}: {name}.{key}={ms:g} ms is more than {LONGEST_MS / 60_000:g} minutes"


def _lone_doubts(every: Sequence[ModelCosts]) -> Iterator[str]:
    """Say what is odd about each entry by itself."""
    for costs in every:
        for name, part in costs.parts.items():
            if not name.endswith("embedding"):
                usual = HEAD_BACKWARD if name in SMALL else SLOWER_BACKWARD
                yield from _unlike(f"{costs}: {name}.backward", part.backward, "forward", part.forward, usual)


def _doubts_between(every: Sequence[ModelCosts], least: float, further: float) -> Iterator[str]:
    """Say what is odd between entries that differ in one size alone; `least` is the first of `SLOWER_WITH_BATCH`, and
    `further` what `FURTHER` is."""
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
            samples = more.micro_batch_size / less.micro_batch_size
            limits = (least, SLOWER_WITH_BATCH[1] * samples)
            yield from _compared(less, more, f"micro-batch {less.micro_batch_size}", limits)
        yield from _bent(sorted(alike, key=lambda costs: costs.micro_batch_size), further)


def _bent(alike: Sequence[ModelCosts], further: float) -> Iterator[str]:
    """Say where a sample more takes far less than the samples before: one of the three times is wrong."""
    for few, some, many in zip(alike, alike[1:], alike[2:], strict=False):
        for key in ("forward", "backward"):
            for kind in sorted((few.parts.keys() & some.parts.keys() & many.parts.keys()) - SMALL):
                ms = [getattr(costs.parts[kind], key) for costs in (few, some, many)]
                sizes = [costs.micro_batch_size for costs in (few, some, many)]
                before, after = ((ms[at + 1] - ms[at]) / (sizes[at + 1] - sizes[at]) for at in (0, 1))
                if 0 < after < further * before:
                    yield (
                        f"{many}: {kind}.{key}={ms[2]:g} ms: each sample beyond micro-batch {sizes[1]} takes "
                        f"{after:.3g} ms, but {before:.3g} ms beyond micro-batch {sizes[0]}; check the values of all "
                        f"three sizes, or measure again"
                    )


def _compared(less: ModelCosts, more: ModelCosts, other: str, limits: tuple[float, float]) -> Iterator[str]:
    for key in ("forward", "backward"):
        for kind in sorted((more.parts.keys() & less.parts.keys()) - SMALL):
            ms, other_ms = getattr(more.parts[kind], key), getattr(less.parts[kind], key)
            yield from _unlike(f"{more}: {kind}.{key}", ms, f"that of {other}", other_ms, limits)


def _unlike(what: str, ms: float, other: str, other_ms: float, limits: tuple[float, float]) -> Iterator[str]:
    low, high = limits
    if not low <= ms / other_ms <= high:
        yield (
            f"{what}={ms:g} ms is {ms / other_ms:.3g} times {other} ({other_ms:g} ms), but usual is "
            f"{low:.3g} to {high:.3g}; check both values, or measure again"
        )
