"""A time that no plan of given sizes beats, known before any stage is laid on any node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conf.schema import Schedule
from fasop.hardware import NodeKind
from fasop.on_nodes import times_on
from fasop.training import Training


def floor(training: Training, kinds: Sequence[NodeKind]) -> float:
    """Seconds below which no order of these nodes and no partition gets an iteration, proved; layers alone count.

    A stage computes u for each of M micro-batches. With GPipe and 1F1B it also waits while the first one goes through
    the stages before it, and the last one back: U_0 + ... + U_(s-1) + M U_s is at most the iteration T. So U_s is at
    most T/M (1 - 1/M)^s, and all stages together have at most T/M times the sum of (1 - 1/M)^s / l_s layers, if a layer
    takes l_s on stage s. With other schedules a stage may wait for less; there T/M is all that is used.
    A stage is as slow as its slowest GPU, so 1 / l_s is at most the mean of its GPUs' rates; and the sum is largest
    with the fastest GPUs first.
    """
    parallel = training.parallel
    times = [times_on(kind, training).layer for kind in kinds]
    rates = [1 / (time.forward + time.backward) for time in times]
    every = np.repeat(rates, [kind.gpus * kind.group.count for kind in kinds])
    stages = np.sort(every)[::-1].reshape(parallel.pipeline, -1).mean(axis=1)
    plain = parallel.schedule in (Schedule.gpipe, Schedule.one_f_one_b)
    share = 1 - 1 / parallel.micro_batches if plain else 1.0
    reach = share ** np.arange(parallel.pipeline) @ stages
    return float(parallel.micro_batches * training.model.layers / reach)
