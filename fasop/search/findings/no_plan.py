"""Why a search finds nothing, and what would help."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from conf.visible import plural
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.layers import measured_tensor_sizes
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.search.space.candidates import MOST_MICRO_BATCHES, Space, divisors, sizes, tensor_sizes
from fasop.search.space.choices import Choices
from megatron_ext.contract.parallel_config import Offload, Recompute
from megatron_ext.contract.rules.engine import LATENT


def why_no_plan(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> SearchError:
    """What to say where no sizes are possible on all nodes of these kinds, or nothing fits into memory."""
    choices = replace(choices, replicated=Choices.replicated)
    every = chain.from_iterable(sizes(training, kinds, choices, math.inf, uneven=uneven) for uneven in (False, True))
    if any(one.parallel.micro_batches > MOST_MICRO_BATCHES for one in every):
        return SearchError(_too_many_micro_batches(training.parallel.global_batch_size, gpus_of(kinds)))
    if not any(len(Space(training, kinds, choices, uneven=uneven)) for uneven in (False, True)):
        return SearchError(_no_sizes(training, kinds, choices))
    return SearchError(_nothing_fits(training, kinds, choices))


def _no_sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> str:
    gpus = gpus_of(kinds)
    batch, model = training.parallel.global_batch_size, training.model
    tensor = tensor_sizes(training, kinds)
    if not tensor:
        known = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
        groups = ", ".join(
            f"cluster.groups.{kind.name}: {plural(kind.gpus, 'GPU')} per node, profile {kind.gpu.profile} with "
            f"tensor sizes {', '.join(map(str, sorted(sizes or []))) or 'not measured'}"
            for kind, sizes in zip(kinds, known, strict=True)
        )
        return f"no tensor size suits all nodes and model.heads={model.heads}: {groups}"
    without = [one.parallel for one in sizes(training, kinds)]
    if without:
        return _not_as_given(without, gpus, choices) + _only_one(training, choices)
    most = training.blocks.most_stages
    replicas = sorted({gpus // t // p for t in tensor for p in divisors(gpus // t) if p <= most})
    near = sorted(
        {n for d in replicas for n in (batch // d * d, (batch // d + 1) * d) if n}, key=lambda n: abs(n - batch)
    )
    nearest = ", ".join(map(str, near[:2]))
    return (
        f"parallel.global_batch_size={batch} is not divisible by any number of replicas that "
        f"{plural(gpus, 'GPU')} allow with at most {plural(most, 'stage')}: {', '.join(map(str, replicas))}; "
        f"the nearest divisible ones are {nearest}"
    )


def _too_many_micro_batches(batch: int, gpus: int) -> str:
    return (
        f"parallel.global_batch_size={batch}: every plan for {plural(gpus, 'GPU')} has more than {MOST_MICRO_BATCHES} "
        "micro-batches for each replica, too many to simulate, or micro-batches that fit on no GPU; use a smaller "
        f"global batch, one with more divisors such as {_rounder(batch)}, or more nodes"
    )


def _rounder(batch: int) -> int:
    """The nearest number that is divisible by the largest power of 2 that is no more than its square root."""
    step = 1 << (batch.bit_length() // 2)
    return max(step, round(batch / step) * step)


def _not_as_given(possible: Sequence[Parallelism], gpus: int, choices: Choices) -> str:
    given = " ".join(f"parallel.{key}={','.join(map(str, values))}" for key, values in choices.sizes.items())
    if any(map(choices.tries, possible)):
        return (
            f"no plan for {plural(gpus, 'GPU')} has parallel.schedule={','.join(choices.schedule)} {given}".rstrip()
            + ": interleaved needs at least two stages, a layer for each of their chunks, and with Megatron-LM a "
            "micro-batch for each stage; also try another schedule"
        )
    values = {key: sorted({getattr(p, key) for p in possible}) for key in choices.sizes}
    known = "; ".join(f"{key} {', '.join(map(str, numbers))}" for key, numbers in values.items())
    together = ", not all of them together" if len(values) > 1 else ""
    return f"no plan for {plural(gpus, 'GPU')} has {given}; possible: {known}{together}"


def _only_one(training: Training, choices: Choices) -> str:
    """Why there are no tensor groups, where they were asked for and the engine has none."""
    latent = training.engine.options.get(LATENT) is True and "tensor" in choices.sizes
    return f"; engine.options.{LATENT}=true has no tensor groups, but takes parallel.context" if latent else ""


def _nothing_fits(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> str:
    """Says how much memory, or how many nodes, it would take; each found by trying."""
    have = ", ".join(f"{kind.gpu.name} {kind.gpu.memory_gib:g} GiB" for kind in kinds)
    ways = []
    percents = range(110, 1001, 10)
    enough = bisect_left(percents, True, key=lambda percent: _fit(training, _larger(kinds, percent), choices))
    if enough < len(percents):
        ways.append(f"{percents[enough]} % of this memory on every GPU")
    for times in (2, 4, 8, 16):
        more = [replace(k, group=replace(k.group, count=k.group.count * times)) for k in kinds]
        if _fit(training, more, choices):
            ways.append(f"{times} times as many nodes, {gpus_of(more)} GPUs")
            break
    ways += [*_savers(training, choices), "a smaller model"]
    p = training.parallel
    tried = [f"parallel.zero={p.zero}"] if p.zero is not None else []
    tried += [f"parallel.offload={p.offload}"] if p.offload is not Offload.none else []
    without = f", not even with {' and '.join(tried)}" if tried else ""
    return (
        f"model={training.model.name} with parallel.global_batch_size={training.parallel.global_batch_size} does not "
        f"fit in the memory of cluster.gpus ({have}) with any plan{without}; what would help: {'; or '.join(ways)}"
    )


def _larger(kinds: Sequence[NodeKind], percent: int) -> list[NodeKind]:
    return [replace(k, gpu=replace(k.gpu, memory_gib=k.gpu.memory_gib * percent / 100)) for k in kinds]


def _savers(training: Training, choices: Choices) -> list[str]:
    """Options that save memory, and were not tried; what is offloaded need not be computed again."""
    savers = []
    if Recompute.full not in choices.recompute and not training.offloads_activations:
        savers.append("parallel.recompute=full")
    if True not in choices.sharded_optimizer:
        savers.append("parallel.sharded_optimizer=true")
    return savers


def _fit(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> bool:
    return any(True for uneven in (False, True) for _ in Space(training, kinds, choices, uneven=uneven).groups)
