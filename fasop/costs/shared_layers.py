"""What layers take that ranks share out by sequences or by experts: parameters on a rank, and messages on their way.

Ranks of a context group lie beside each other. In a layer's forward pass the keys and values of each come to all
others, in its backward pass once more, with their gradients. Causal attention is divided evenly, as each rank has a
piece from either end of a sequence. What Transformer Engine sends while it computes counts in full, an upper bound.

Ranks of an expert group, which are replicas that follow each other, hold `experts / expert` experts of each layer. In a
layer's forward pass every token's activations go to the ranks of its experts and back, in two all-to-alls, and as much
comes back in the backward pass. Tokens are taken to be spread evenly, as the router's balancing loss wants them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from conf.schema.model import Model
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.network import links
from fasop.costs.network.collectives import Exchange
from fasop.costs.profiles.steps import Operation
from fasop.costs.roofline import Time
from fasop.costs.sizes import kind_parameters
from fasop.costs.training import Training
from megatron_ext.contract.parallel_config import Recompute

ALL_TO_ALLS = 2
"""In a forward pass: to the experts and back."""


@dataclass(frozen=True, kw_only=True)
class LayerNumbers:
    """How many parameters of a layer of each kind a rank has to do with; all the same where experts are not shared."""

    held: tuple[float, ...]
    summed: tuple[float, ...]
    """All replicas would sum so many in the same time: an expert's gradients are summed by fewer."""
    stepped: tuple[float, ...]
    """The optimizer updates so many; a sharded one leaves each replica its part of them."""


def layer_numbers(training: Training) -> LayerNumbers:
    """Returns the parameters of a layer of each kind."""
    parallel, model = training.parallel, training.model
    whole = kind_parameters(model, parallel.tensor_size, own_word=parallel.pipeline > 1)
    if parallel.expert == 1:
        return LayerNumbers(held=whole, summed=whole, stepped=whole)
    shared, data, expert = _of_experts(model, parallel.tensor_size), parallel.data, parallel.expert
    held = tuple(number - shared + shared / expert for number in whole)
    summing = shared * (data - expert) / (expert * (data - 1))
    return LayerNumbers(
        held=held,
        summed=tuple(number - shared + summing for number in whole),
        stepped=whole if parallel.sharded_optimizer else held,
    )


@lru_cache(maxsize=1024)
def _of_experts(model: Model, tensor: int) -> int:
    """Count the parameters of a layer's experts on a rank that has all of them."""
    sized = model.sized(tensor)
    (stack,) = sized.stacks()
    parameters = sized.traits.parameters(sized, stack.kind)
    return sum(one.numel(tensor) for name, one in parameters.items() if name.startswith("experts."))


def with_exchanges(times: LayerTimes, kind: NodeKind, training: Training) -> LayerTimes:
    """Adds to the layers' passes what keys and values, and the tokens' way to the experts and back, take on such
    nodes; passes of shared sequences are those of a rank's part of the tokens (`layer_times`)."""
    recompute = training.parallel.recompute
    again = recompute.way is Recompute.full and recompute.layers is None
    for seconds, ways in ((sequences_s(kind, training), 2), (experts_s(kind, training), 1)):
        if seconds:
            layers = (
                Time(forward=one.forward + seconds, backward=one.backward + (ways + again) * seconds)
                for one in times.layers
            )
            more = seconds if recompute.layers is not None else 0.0
            times = replace(times, layers=tuple(layers), again=times.again + more)
    return times


def sequences_s(kind: NodeKind, training: Training) -> float:
    """Seconds in which the keys and values of a layer come to all ranks that share a sequence, round a ring: as fast as
    its slowest link."""
    parallel = training.parallel
    context, tensor = parallel.context, parallel.tensor_size
    if context == 1:
        return 0.0
    model = training.model.sized(tensor)
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


def experts_s(kind: NodeKind, training: Training) -> float:
    """Seconds of a layer's all-to-alls in a forward pass, if all of an expert group are on nodes of this kind.

    A rank sends each other one its part of the activations: within its node at a GPU's bandwidth, out of it at its
    share of the node's.
    """
    parallel, model = training.parallel, training.model
    expert, tensor = parallel.expert, parallel.tensor_size
    if expert == 1:
        return 0.0
    tokens = parallel.own_samples * model.sequence_length / tensor  # the sequence is shared, too
    size = tokens * model.hidden * getattr(model, "experts_per_token", 2) * training.width
    inside = expert if kind.gpus % (expert * tensor) == 0 else min(expert, max(1, kind.gpus // tensor))
    every = Exchange(Operation.alltoall, expert, size, tensor)
    if (measured := kind.measured(every, between=inside < expert)) is not None:
        return ALL_TO_ALLS * measured.all_gather(expert).takes(size)  # in as many steps of as many bytes
    within, between = links.within(kind.group), links.between(kind.group, kind.gpus)
    seconds = (inside - 1) * within.takes(size / expert) + (expert - inside) * between.takes(size / expert)
    return ALL_TO_ALLS * seconds
