"""What it takes to have activations in the host's memory from a layer's forward to its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conf.schema.cluster import Gpu
from fasop.costs.blocks import blocks_of
from fasop.costs.layers import LayerTimes
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.memory.activations import layer_activations
from fasop.costs.roofline import Time
from fasop.costs.training import Training


def through_host(times: LayerTimes, gpu: Gpu, training: Training) -> LayerTimes:
    """Have a layer take as long as its activations take to the host, or back; they come and go while it computes."""
    if not training.offloads_activations:
        return times
    found = []
    for kind, time in enumerate(times.layers):
        way = kept_by_layer(training, kind) / (gpu.host_gb_per_s * 1e9)
        found.append(Time(forward=max(time.forward, way), backward=max(time.backward, way)))
    return replace(times, layers=tuple(found))


def kept_by_layer(training: Training, kind: int) -> float:
    """Count the bytes that a layer of a kind keeps of one micro-batch, computing nothing again, on a GPU."""
    if isinstance(training.model, MeasuredModule):
        of_kind = blocks_of(training.model).kinds[kind]
        return sum(training.model.kept(name, training.parallel.micro_batch_size) for name in of_kind)
    return layer_activations(training, kind, fused=True)


def host_bytes(training: Training, layers: Sequence[int]) -> float:
    """Count the bytes of activations that all nodes hold at most, with so many layers in each stage, or of several
    chunks in each of these."""
    parallel, stages, chunks = training.parallel, training.parallel.pipeline, training.parallel.chunks
    of_layer = max(kept_by_layer(training, kind) for kind in range(len(blocks_of(training.model).kinds)))
    held = [parallel.schedule.definition.held(stage, stages, chunks) for stage in range(stages)]
    passes = sum(
        min(number, parallel.micro_batches * chunks) * sum(layers[stage::stages]) / chunks
        for stage, number in enumerate(held)
        if parallel.offloads[stage].takes_activations
    )
    return float(of_layer * passes * parallel.data * parallel.tensor_size)
