"""A profile as a YAML file that people read and edit: one line for each part of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from omegaconf import OmegaConf

from fasop.costs.profile import Cost, LayerProfile, LinkTimes, ModelCosts

UNITS = (
    "Times of a part are milliseconds of one micro-batch on one rank; spread is half of the median's 95 % confidence\n"
    "interval. docs/profile.md tells every key."
)


def profile_text(profile: LayerProfile, comment: str) -> str:
    """What `read_profile` reads; `comment` is told first, by lines."""
    return "\n".join([*(f"# {line}" for line in f"{comment}\n{UNITS}".splitlines()), *_lines(profile), ""])


def _lines(profile: LayerProfile) -> Iterator[str]:
    yield f"gpu: {_word(profile.gpu)}"
    yield f"source: {_word(profile.source)}"
    if profile.date is not None:
        yield f"date: {_word(profile.date)}"
    if profile.device is not None:
        yield f"device: {_word(profile.device)}"
    if profile.versions:
        yield f"versions: {_flow({name: _word(version) for name, version in profile.versions.items()})}"
    yield "models:"
    for name, shape in profile.models.items():
        keys = ("hidden", "heads", "sequence_length", "vocab_size")
        yield f"  {_word(name)}: {_flow({key: str(getattr(shape, key)) for key in keys})}"
    if profile.optimizer_ns_per_parameter:
        every = {str(key): _number(value) for key, value in profile.optimizer_ns_per_parameter.items()}
        yield f"optimizer_ns_per_parameter: {_flow(every)}"
    for place, links in (("within", profile.within), ("between", profile.between)):
        known = {"p2p": links.p2p, "all_reduce": links.all_reduce}
        if any(times is not None for times in known.values()):
            yield f"{place}:"
            for kind, times in known.items():
                if times is not None:
                    yield from _link(kind, times)
    yield "costs:"
    for costs in profile.costs:
        yield from _costs(costs)


def _link(kind: str, times: LinkTimes) -> Iterator[str]:
    yield f"  {kind}:"
    yield f"    latency_us: {_number(times.latency_us)}"
    yield f"    gbit_per_s: {_number(times.gbit_per_s)}"
    yield f"    ranks: {times.ranks}"
    yield f"    us_by_bytes: {_flow({str(size): _number(us) for size, us in times.us_by_bytes.items()})}"


def _costs(costs: ModelCosts) -> Iterator[str]:
    yield f"  - model: {_word(costs.model)}"
    yield f"    tensor: {costs.tensor}"
    yield f"    micro_batch_size: {costs.micro_batch_size}"
    yield f"    precision: {costs.precision}"
    yield f"    embedding: {_part(costs.embedding)}"
    yield f"    layer: {_part(costs.layer)}"
    yield f"    head: {_part(costs.head)}"
    if costs.peak_bytes is not None:
        yield f"    peak_bytes: {costs.peak_bytes}"
    if costs.peak_layers is not None:
        yield f"    peak_layers: {costs.peak_layers}"


def _part(cost: Cost) -> str:
    values = {
        "forward": cost.forward,
        "backward": cost.backward,
        "forward_spread": cost.forward_spread,
        "backward_spread": cost.backward_spread,
        "activation_bytes": cost.activation_bytes,
    }
    return _flow({key: _number(value) for key, value in values.items() if value is not None})


def _flow(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"


def _number(value: float) -> str:
    """Without an exponent, which YAML 1.1 reads as text unless it has a dot and a sign."""
    return str(value) if isinstance(value, int) else f"{value:.9f}".rstrip("0").rstrip(".")


def _word(text: str) -> str:
    """Quoted where YAML could read it as something else, such as a version or a date; a JSON string is a YAML one."""
    plain = re.fullmatch(r"[A-Za-z][\w-]*", text) and OmegaConf.create(f"word: {text}").word == text
    return text if plain else json.dumps(text)
