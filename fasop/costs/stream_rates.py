"""What several streams on a GPU gain (`parallel.streams`), as `tdpp profile streams=…` measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from conf.schema.model import Model
from fasop.costs.profiles.profile import LayerProfile
from megatron_ext.contract.train_config import Precision


@dataclass(frozen=True, kw_only=True)
class StreamRates:
    """How fast a GPU trains a whole model with micro-batches of one size."""

    rates: Mapping[int, float]
    """For each number of streams, upwards from 1: micro-batches in a time, over those of one stream."""
    copy_s: float
    """Seconds in which a further stream's gradients are added up, once an iteration."""

    def rate(self, streams: int) -> float:
        """Between what was measured on a line; of more streams as of the most."""
        return float(np.interp(streams, [*self.rates], [*self.rates.values()]))


NO_GAIN = StreamRates(rates={1: 1.0}, copy_s=0.0)
"""What is assumed where nothing was measured."""


def stream_rates(
    profile: LayerProfile | None, model: Model, precision: Precision, micro_batch_size: int
) -> StreamRates:
    """Medians over the hosts that were measured; `NO_GAIN` where none was with this model and size."""
    names = set() if profile is None else profile.names(model)
    rates: dict[int, list[float]] = {}
    copies = list[float]()
    for steps in profile.steps if profile is not None else ():
        if (steps.precision, steps.micro_batch_size) != (precision, micro_batch_size) or steps.model not in names:
            continue
        one = steps.times[0].forward + steps.times[0].backward
        for times in steps.times:
            rates.setdefault(times.workers, []).append(times.workers * one / (times.forward + times.backward))
            if times.workers > 1:
                copies.append(times.copy / (times.workers - 1) / 1e3)
    if 1 not in rates:
        return NO_GAIN
    return StreamRates(
        rates={streams: median(rates[streams]) for streams in sorted(rates)}, copy_s=median(copies) if copies else 0.0
    )
