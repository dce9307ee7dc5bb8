"""What layers take longer where ranks share sequences: what keys and values take on their way.

Ranks of a context group lie beside each other. In a layer's forward pass the keys and values of each come to all
others, in its backward pass once more, with their gradients. Causal attention is divided evenly, as each rank has a
piece from either end of a sequence. What Transformer Engine sends while it computes counts in full, an upper bound.
"""

from __future__ import annotations

from dataclasses import replace

from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.network import links
from fasop.costs.network.collectives import Exchange
from fasop.costs.profiles.steps import Operation
from fasop.costs.roofline import Time
from fasop.costs.training import Training
from megatron_ext.contract.parallel_config import Recompute


def with_shared_sequences(times: LayerTimes, kind: NodeKind, training: Training) -> LayerTimes:
    """Returns a rank's times on such nodes from those of its part of the tokens (`layer_times`)."""
    parallel = training.parallel
    if parallel.context == 1:
        return times
    seconds = exchange_s(kind, training)
    recompute = parallel.recompute
    ways = 2 + (recompute.way is Recompute.full and recompute.layers is None)
    return replace(
        times,
        layers=tuple(
            Time(forward=one.forward + seconds, backward=one.backward + ways * seconds) for one in times.layers
        ),
        again=times.again + (seconds if recompute.layers is not None else 0.0),
    )


def exchange_s(kind: NodeKind, training: Training) -> float:
    """Seconds in which the keys and values of a layer come to all ranks that share a sequence, round a ring: as fast as
    its slowest link."""
    parallel, model = training.parallel, training.model.sized(training.parallel.tensor_size)
    context, tensor = parallel.context, parallel.tensor_size
    tokens = parallel.own_samples * training.model.sequence_length
    size = 2 * tokens * model.query_groups * model.head_width / tensor * training.width
    apart = kind.gpus % (context * tensor) > 0  # some group lies on several nodes
    exchange = Exchange(Operation.send_recv, 2, size)
    sharing = max(min(kind.gpus, tensor), kind.alone(exchange)) if apart else 1
    if (measured := kind.measured(exchange, between=apart)) is not None:
        link = replace(measured, s_per_byte=sharing * measured.s_per_byte)
    else:
        link = links.between(kind.group, sharing) if apart else links.within(kind.group)
    return (context - 1) * link.takes(size)
