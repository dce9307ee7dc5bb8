"""What a rank holds, bytes: weights, gradients and optimizer state, activations in flight, buffers.

A stage's memory is linear in its layers, so the GPUs of a stage allow it a largest number of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Precision, Recompute, Schedule
from conf.sizes import activation_bytes, embedding_parameters, head_parameters, layer_parameters
from fasop.training import Training

GIB = 2**30
CONTEXT_BYTES = GIB
"""An allowance, assumed, for what no tensor shows: the CUDA context, NCCL's buffers, fragments of the allocator."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one stage: what every layer takes, and what is there with none."""

    layer: float
    fixed: float

    def of(self, layers: int) -> float:
        return self.fixed + layers * self.layer

    def capacity(self, memory_gib: float) -> int:
        """The most layers that fit into a GPU; negative if not even a stage without layers does."""
        return int((memory_gib * GIB - self.fixed) // self.layer)


def bytes_per_parameter(training: Training) -> float:
    """Of weights, gradients, and the optimizer's master weights and moments.

    tdpp's engine keeps 16-bit weights, gradients in fp32 and an optimizer with fp32 master weights, which in fp32 are
    the weights themselves unless the optimizer is sharded. Megatron-LM: docs/source/api-guide/dist_optimizer.md, where
    fp16 has 16-bit gradients and an fp32 copy of them, 20 bytes in all.
    """
    precision, sharded = training.precision, training.parallel.sharded_optimizer
    weight, gradient, state = float(training.width), 4.0, 8.0 if precision is Precision.fp32 else 12.0
    if training.megatron_lm:
        if precision is Precision.fp16:
            gradient, state = 2.0, 16.0
    elif sharded:
        state = 12.0
    return weight + gradient + state / (training.parallel.data if sharded else 1)


def layer_activations(training: Training) -> float:
    """Of one layer and one micro-batch, kept from its forward to its backward pass, without recomputation.

    Counted in tensors of [micro-batch, sequence, hidden]. tdpp's engine: the inputs of both norms and of the linear
    layers after them; and, shared by the tensor group, query, key, value, the attention's result and the MLP's inner
    tensor before and after GELU. Its attention keeps no scores, so recomputing it saves nothing. Megatron-LM:
    Korthikanti et al. 2022, equations 2 and 4, where the scores are kept unless they are recomputed.
    """
    model, parallel = training.model, training.parallel
    tensor = parallel.tensor
    size = activation_bytes(model, parallel.micro_batch_size, training.precision)
    if training.megatron_lm:
        scores = (
            0.0
            if parallel.recompute is Recompute.selective
            else 2.5 * model.heads * model.sequence_length / model.hidden
        )
        return size * (5 / (tensor if parallel.sequence_parallel else 1) + (12 + scores) / tensor)
    outside = 2 / tensor + 2 if parallel.sequence_parallel else 4
    return size * (outside + 12 / tensor)


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Micro-batches, or pairs of one and a chunk, that a stage holds at once, at most (megatron_ext/schedule.py)."""
    if schedule is Schedule.gpipe:
        return micro_batches
    if schedule is Schedule.interleaved:
        return min(micro_batches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)
    return min(micro_batches, stages if schedule is Schedule.zb_h1 else stages - stage)


def stage_memory(training: Training, stage: int) -> StageMemory:
    """Of the ranks of a stage, with the schedule, batches and sizes of `training.parallel`."""
    model, parallel = training.model, training.parallel
    tensor, stages = parallel.tensor, parallel.pipeline
    first, last = stage == 0, stage == stages - 1
    state = bytes_per_parameter(training)
    message = activation_bytes(model, parallel.micro_batch_size, training.precision)
    held = in_flight(parallel.schedule, stage, stages, parallel.micro_batches, parallel.chunks)
    kept = layer_activations(training)
    fixed = CONTEXT_BYTES + 4.0 * message  # a message each way, being received and being sent
    if parallel.recompute is Recompute.full:
        fixed += kept  # of the one layer that is computed again
        kept = float(message)
    if first:
        fixed += state * embedding_parameters(model, tensor)
    if last:
        logits = message / training.width / model.hidden * (model.padded_vocab(tensor) // tensor)
        fixed += state * head_parameters(model, tensor, own_word=not first)
        fixed += held * (2 * message + 4 * logits)  # the norm's input and output, and fp32 probabilities
        fixed += (training.width + 4) * logits  # logits and their gradient
    return StageMemory(layer=state * layer_parameters(model, tensor) + held * kept, fixed=fixed)
