"""What every stage of plans takes on the nodes where it lies: `Pipelines`, made from costs, links and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fasop.costs import overlap, sizes
from fasop.costs.arrays import Floats
from fasop.costs.layers import gradients_summed, weights_gathered, weights_handed_out
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.memory.amounts import GIB
from fasop.costs.memory.stages import stage_memory
from fasop.costs.network.links import Link
from fasop.costs.schedules import filling
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.simulation.linear import Again, BackwardMessages, Hidden, LayerOrder, Linear
from fasop.simulation.nodes import Nodes, step_s_per_parameter, times_on
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.placed_links import Hops


def on_nodes(training: Training, nodes: Nodes) -> Pipelines:
    """The pipelines of `training` on nodes in each of some orders.

    Of a stage on several kinds of nodes the slowest counts, for each time of its own; of its memory the smallest.

    Raises:
        SearchError: a profile has no costs for the tensor size.
    """
    parallel, where = training.parallel, nodes.links_of(training)
    times = [times_on(kind, training) for kind in nodes.kinds]
    slowest = nodes.slowest(where.stages, training, times)
    handing, exchanged = weights_handed_out(where.handing, training), exchanged_on(training, nodes)
    stepping = slowest.step / (parallel.data if parallel.sharded_optimizer else 1)
    if training.shares_by_memory:
        stepping = _unlike_steps(training, nodes)
    step, numbers = Link(latency_s=np.zeros_like(stepping), s_per_byte=stepping), layer_numbers(training)
    backward = pass_times(training, slowest.backward, slowest.again)
    optimizer = by_parameters(training, handing, numbers.summed).plus(by_parameters(training, step, numbers.stepped))
    capacity, shares = nodes.capacity(training, slowest.memory_gib)
    alike = training.blocks.alike
    hidden = None
    if exchanged.last is not None:
        time = _after_first_bucket(training, backward.layer[..., : parallel.pipeline, :])
        if parallel.recompute.layers is not None:  # the first layers of a stage are the last ones in a backward pass
            longer = filling(parallel.schedule) * slowest.again
            most = np.full(longer.shape[1], parallel.recompute.layers)
            time = replace(time, again=Again(most=most, layer=longer))
        hidden = Hidden(time=time, last=exchanged.last)
        if training.overlaps_optimizer:
            hidden = _beside_steps(hidden, training, stepping)
    forward = pass_times(training, slowest.forward)
    if hidden is not None and training.gathers:
        hidden = _waits_for_weights(hidden, exchanged.sums, where.handing, training, forward, backward)
    elif hidden is not None and training.scatters:
        hidden = replace(hidden, behind=_behind(exchanged.sums, training, forward, backward))
    return Pipelines(
        schedule=parallel.schedule,
        micro_batches=parallel.micro_batches,
        forward=forward,
        backward=backward,
        hop=exchanged.hop,
        busy=min(training.messages) * where.hops.link.s_per_byte,
        one_way_out=where.one_way_out,
        blocking=training.blocking,
        sums=exchanged.sums,
        optimizer=optimizer,
        embedding=exchanged.embedding,
        capacity=capacity,
        shares=shares,
        basis=np.array([time.basis for time in times])[nodes.orders].max(axis=1),
        hidden=hidden,
        order=None if alike else _order(training),
        s_per_byte=None if alike else where.hops.longer,
        back=None if where.back is None else _back(where.back, min(training.messages), alike=alike),
    )


def _behind(sums: Linear, training: Training, forward: Linear, backward: Linear) -> Linear:
    """`Hidden.behind`: sums of a micro-batch's gradients go on beside its passes, through all chunks of each stage."""
    before, stages = training.parallel.micro_batches - 1, training.parallel.pipeline
    both = forward.fixed + backward.fixed
    fixed = both.reshape(-1, stages, both.shape[-1]).sum(axis=0)
    layer = (forward.layer + backward.layer)[..., :stages, :]
    return Linear(fixed=before * (sums.fixed - fixed), layer=before * (sums.layer - layer))


def _waits_for_weights(
    hidden: Hidden, sums: Linear, link: Link[Floats], training: Training, forward: Linear, backward: Linear
) -> Hidden:
    """The same with what passes wait for weights that are gathered for each of them
    (megatron_ext/engine/executor/gathering.py).

    A rank has room for two blocks, so those of one come while another computes, a layer's beside a layer's pass: what
    one pass does not hide, another cannot. A backward pass has the sums of gradients beside it as well, for which it
    leaves what gathers do not take, and the last bucket of these is summed where the next micro-batch's forward pass
    begins. The first block of an iteration is waited for. Words that several blocks have are always there.
    """
    parallel, stages = training.parallel, training.parallel.pipeline
    gathering = weights_gathered(link, training, parallel.data)
    weights = by_parameters(training, gathering, layer_numbers(training).summed)
    each, ends, before = weights.layer + gathering.latency_s, weights.fixed, parallel.micro_batches - 1
    tied, _ = sizes.shared_parameters(training.model, parallel.tensor_size)
    if tied:
        ends = ends.copy()
        for stage in {0, stages - 1} if stages > 1 else {0}:
            ends[stage] = np.maximum(0.0, ends[stage] - tied * gathering.s_per_byte[stage])
    ahead, back = forward.layer[..., :stages, :], backward.layer[..., :stages, :]
    waits, others = np.maximum(0.0, each - ahead), np.maximum(0.0, each + sums.layer - back)
    first, shortest = (each, ahead) if training.blocks.alike else (each.max(axis=0), ahead.min(axis=0))
    turn = before * (np.maximum(0.0, hidden.last + first - shortest) - np.maximum(0.0, first - shortest))
    turn[0] += (first + ends)[0]
    return Hidden(
        time=replace(hidden.time, layer=np.maximum(0.0, hidden.time.layer + others - each)),
        last=hidden.last,
        behind=Linear(
            fixed=2 * parallel.micro_batches * np.maximum(0.0, ends - shortest),
            layer=parallel.micro_batches * (waits + others),
        ),
        at_turns=turn,
    )


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What messages and sums of gradients take, as in `Pipelines`, whatever GPUs compute."""

    hop: Floats
    sums: Linear
    last: Floats | None
    """The same as in `Hidden`; None where gradients are summed after the last backward pass."""
    embedding: Floats

    @property
    def least_exposed(self) -> Floats:
        """Return what the attribute of this name in `Pipelines` has."""
        return self.sums.fixed if self.last is None else np.minimum(self.sums.fixed, self.last)


def exchanged_on(training: Training, nodes: Nodes) -> Exchanged:
    """Work out what `training` exchanges on these nodes, in each of their orders."""
    where = nodes.links_of(training)
    summing = gradients_summed(where.sums, training)
    sums = by_parameters(training, summing, layer_numbers(training).summed)
    return Exchanged(
        hop=where.hops.link.takes(np.array(float(min(training.messages)))),
        sums=_in_buckets(training, sums, summing) if training.overlaps else sums,
        last=_last_bucket(training, summing) if training.overlaps else None,
        embedding=_embedding(where.embedding, training),
    )


def _back(hops: Hops, shortest: int, *, alike: bool) -> BackwardMessages:
    return BackwardMessages(
        hop=hops.link.takes(np.array(float(shortest))),
        busy=shortest * hops.link.s_per_byte,
        s_per_byte=None if alike else hops.longer,
    )


def _order(training: Training) -> LayerOrder:
    messages = np.array(training.messages, float)
    return LayerOrder(counts=training.blocks.counts, extra=messages - messages.min())


def handing_out(training: Training, nodes: Nodes) -> Linear:
    """The part of `Pipelines.optimizer` that handing out the new weights of a sharded one takes."""
    where = nodes.links_of(training)
    return by_parameters(training, weights_handed_out(where.handing, training), layer_numbers(training).summed)


def _unlike_steps(training: Training, nodes: Nodes) -> Floats:
    """[stages, pipelines]: seconds of the optimizer for a parameter, of the replica that takes longest for its part of
    them; parts are those with as many layers in each stage."""
    layers = -(-training.blocks.layers // training.parallel.pipeline)
    stages = np.arange(float(training.parallel.pipeline)).reshape(-1, 1)
    held = None
    if training.parallel.chunks > 1:
        held = training.parallel.schedule.definition.held(stages, len(stages), training.parallel.chunks)
    taken = stage_memory(training, stages, held, part=0.0).of(layers)
    steps = np.array([step_s_per_parameter(kind, training) for kind in nodes.kinds])
    found = []
    for rooms, ranks, beside in zip(nodes.rooms_gib(training), nodes.replicas_of(training), taken, strict=True):
        left = np.maximum(rooms * GIB - beside, 1.0)
        found.append((left / left.sum(axis=0) * steps[nodes.orders.T[ranks]].max(axis=1)).max(axis=0))
    return np.stack(found)


def pass_times(training: Training, times: Floats, again: Floats | None = None) -> Linear:
    """[parts, pipelines], from the times of embedding, head and layers by stage; `again` is what a layer takes longer
    that is computed again, where not all are."""
    embedding, head, *kinds = times
    layers = [np.concatenate([layer] * training.parallel.chunks) for layer in kinds]
    fixed = np.zeros_like(layers[0])
    fixed[0] += embedding[0]
    fixed[-1] += head[-1]
    most, longer = training.parallel.recompute.layers, None
    if again is not None and most is not None:
        every = np.concatenate([again] * training.parallel.chunks)
        longer = Again(most=np.full(every.shape[1], most), layer=every)
    return Linear(fixed=fixed, layer=layers[0] if training.blocks.alike else np.stack(layers), again=longer)


def by_parameters(training: Training, link: Link[Floats], of_layer: Sequence[float]) -> Linear:
    """What takes so many seconds for each parameter of a stage's ranks; a layer of each kind has so many."""
    model, tensor = training.model, training.parallel.tensor_size
    fixed = np.zeros((training.parallel.pipeline, 1))
    fixed[0] += sizes.embedding_parameters(model, tensor)
    fixed[-1] += sizes.head_parameters(model, tensor, own_word=len(fixed) > 1)
    return Linear(fixed=link.takes(fixed), layer=link.s_per_byte * _of_kinds(training, of_layer))


def _of_kinds(training: Training, numbers: Sequence[float]) -> Floats:
    """[kinds, 1, 1]; where all layers are alike []."""
    return np.array(numbers[0]) if training.blocks.alike else np.array(numbers).reshape(-1, 1, 1)


def _in_buckets(training: Training, sums: Linear, summing: Link[Floats]) -> Linear:
    """With the latency of every bucket."""
    model, tensor, kinds = training.model, training.parallel.tensor_size, range(len(training.blocks.kinds))
    buckets = [overlap.buckets_per_layer(model, tensor, kind) for kind in kinds]
    return replace(sums, layer=sums.layer + _of_kinds(training, buckets) * summing.latency_s)


def _after_first_bucket(training: Training, layer: Floats) -> Linear:
    """`Hidden.time`; `layer` is the backward pass of one, by stage. Where layers differ, the first bucket is of those
    that take longest."""
    model, tensor, kinds = training.model, training.parallel.tensor_size, range(len(training.blocks.kinds))
    layer = filling(training.parallel.schedule) * layer
    if isinstance(model, MeasuredModule):
        every = layer[np.newaxis] if layer.ndim == 2 else layer
        whole = np.tensordot(training.blocks.counts[:, -1].astype(float), every, axes=1)
        before = -overlap.first_bucket_share(model) * (whole if layer.ndim == 2 else whole[np.newaxis])
    else:
        before = -_of_kinds(training, [overlap.first_bucket_layers(model, tensor, kind) for kind in kinds]) * layer
    return Linear(fixed=before if layer.ndim == 2 else before.min(axis=0), layer=layer)


def _last_bucket(training: Training, summing: Link[Floats]) -> Floats:
    """`Hidden.last`."""
    model, tensor, stages = training.model, training.parallel.tensor_size, training.parallel.pipeline
    first, other = (overlap.last_bucket_parameters(model, tensor, first=way) for way in (True, False))
    return summing.takes(np.array([[first], *[[other]] * (stages - 1)]))


def _beside_steps(hidden: Hidden, training: Training, stepping: Floats) -> Hidden:
    """Work out what hides sums in a data parallel plan whose weights are updated bucket by bucket, `stepping` seconds
    for a parameter."""
    parameters = training.blocks.counts[:, -1] @ np.array(sizes.kind_parameters(training.model, 1, own_word=False))
    parameters += sizes.embedding_parameters(training.model, 1)
    parameters += sizes.head_parameters(training.model, 1, own_word=False)
    before_last = max(0.0, parameters - overlap.last_bucket_parameters(training.model, 1, first=True))
    steps = stepping * before_last
    time = replace(hidden.time, fixed=hidden.time.fixed + steps)
    return Hidden(time=time, last=np.maximum(hidden.last - steps, 0.0))


def _embedding(link: Link[Floats], training: Training) -> Floats:
    parallel = training.parallel
    parameters, holders = sizes.shared_parameters(training.model, parallel.tensor_size)
    size = training.gradient_bytes * parameters
    whole = link.all_reduce(min(holders, parallel.pipeline)).takes(np.array(float(size)))
    return whole.reshape(-1)
