"""The times of a profile as a table for people: a row for each size, or of a user's module for each kind of block."""

from __future__ import annotations

from collections.abc import Sequence

from fasop.costs.profiles.doubts import SMALL
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heading and rows."""


def tables(profile: LayerProfile) -> list[tuple[str, Table]]:
    """Of the models, in words, and their tables."""
    found = []
    if profile.models:
        costs = [one for one in profile.costs if one.model in profile.models]
        found.append((f"model {', '.join(profile.models)}", _by_size(costs)))
    for name, module in profile.modules.items():
        costs = [one for one in profile.costs if one.model == name]
        found.append((f"model {name}, {module.code}", _by_kind(profile, name, costs)))
    return found


def steps_table(profile: LayerProfile) -> Table:
    """Of the steps that this project measured: what several copies on a GPU take together, and gain."""
    columns = ["model", "host", "micro", "precision", "streams", "pass ms", "accumulate ms", "samples/s", "gain"]
    rows = []
    for steps in profile.steps:
        if steps.precision is None:
            continue
        one = steps.times[0].forward + steps.times[0].backward
        for times in steps.times:
            took = times.forward + times.backward
            rate = times.workers * steps.micro_batch_size / took * 1e3
            gain = times.workers * one / took - 1
            rows.append(
                [
                    *(str(steps.model), steps.host, str(steps.micro_batch_size), str(steps.precision)),
                    *(str(times.workers), f"{took:g}", f"{times.copy:g}", f"{rate:,.4g}", f"{gain:+.1%}"),
                ]
            )
    return columns, rows


def _by_size(every: Sequence[ModelCosts]) -> Table:
    kinds = list(dict.fromkeys(kind for costs in every for kind in costs.parts))
    keeping = [kind for kind in kinds if kind not in SMALL]
    sizes = ("tensor", "micro", "precision")
    columns = (*sizes, *(f"{kind} ms" for kind in kinds), *(f"{kind} keeps" for kind in keeping))
    rows = [
        [
            str(costs.tensor),
            str(costs.micro_batch_size),
            str(costs.precision),
            *(_passes(costs.parts.get(kind)) for kind in kinds),
            *(_kept(costs.parts.get(kind)) for kind in keeping),
        ]
        for costs in every
    ]
    return columns, rows


def _by_kind(profile: LayerProfile, name: str, every: Sequence[ModelCosts]) -> Table:
    """The bytes are those of the largest micro-batch, and of the first block of the kind."""
    blocks = profile.modules[name].blocks
    largest = max(costs.micro_batch_size for costs in every)
    keeps = next(costs for costs in every if costs.micro_batch_size == largest)
    columns = ["kind", "blocks", "parameters", *(f"{one.micro_batch_size} x {one.precision} ms" for one in every)]
    rows = []
    for kind in keeps.parts:
        alike = [block for block in blocks if block.kind == kind]
        names = f"{alike[0].name} … ({len(alike)})" if len(alike) > 1 else "".join(block.name for block in alike)
        times = [_passes(costs.parts.get(kind)) for costs in every]
        parameters = str(alike[0].parameters) if alike else "-"
        kib = (keeps.parts[kind].activation_bytes or 0) / 2**10
        rows.append([kind, names or "-", parameters, *times, f"{kib:,.4g}"])
    return [*columns, f"{largest} keeps KiB"], rows


def _passes(cost: Cost | None) -> str:
    return "-" if cost is None else f"{cost.forward:g} + {cost.backward:g}"


def _kept(cost: Cost | None) -> str:
    return "-" if cost is None or cost.activation_bytes is None else f"{cost.activation_bytes / 2**20:.3g} MiB"
