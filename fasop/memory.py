"""What a rank holds, bytes: weights, gradients and optimizer state, activations in flight, buffers.

A stage's memory is linear in its layers, so the GPUs of a stage allow it a largest number of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from conf.schema import Precision, Recompute, Schedule
from conf.sizes import activation_bytes, embedding_parameters, head_parameters, layer_parameters
from fasop.training import Training

GIB = 2**30
CONTEXT_BYTES = GIB
"""An allowance, assumed, for what no tensor shows: the CUDA context, NCCL's buffers, fragments of the allocator."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Bytes: of every layer, and what is there with none."""

    layer: float = 0.0
    fixed: float = 0.0

    def of(self, layers: int) -> float:
        return self.fixed + layers * self.layer


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a rank of one stage holds."""

    weights: Amount
    gradients: Amount
    optimizer: Amount
    """Master weights and moments."""
    activations: Amount
    """Of all micro-batches in flight."""
    buffers: Amount
    """Messages, logits, and `CONTEXT_BYTES`."""

    def by_term(self) -> dict[str, Amount]:
        """Every amount by its name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    def layer(self) -> float:
        return sum(amount.layer for amount in self.by_term().values())

    @property
    def fixed(self) -> float:
        return sum(amount.fixed for amount in self.by_term().values())

    def of(self, layers: int) -> float:
        return self.fixed + layers * self.layer

    def capacity(self, memory_gib: float) -> int:
        """The most layers that fit into a GPU; negative if not even a stage without layers does."""
        return int((memory_gib * GIB - self.fixed) // self.layer)


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Of one parameter."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def all(self) -> float:
        return self.weight + self.gradient + self.optimizer


def parameter_bytes(training: Training) -> ParameterBytes:
    """What is kept for every parameter.

    tdpp's engine keeps 16-bit weights, gradients in fp32 and an optimizer with fp32 master weights, which in fp32 are
    the weights themselves unless the optimizer is sharded. Megatron-LM: docs/source/api-guide/dist_optimizer.md, where
    fp16 has 16-bit gradients and an fp32 copy of them, 20 bytes in all.
    """
    precision, sharded = training.precision, training.parallel.sharded_optimizer
    gradient, state = 4.0, 8.0 if precision is Precision.fp32 else 12.0
    if training.megatron_lm:
        if precision is Precision.fp16:
            gradient, state = 2.0, 16.0
    elif sharded:
        state = 12.0
    shares = training.parallel.data if sharded else 1
    return ParameterBytes(weight=float(training.width), gradient=gradient, optimizer=state / shares)


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
    """Of the ranks of a stage, with the schedule, batches and sizes of `training.parallel`.

    A stage of several chunks counts as if they had equally many layers.
    """
    model, parallel = training.model, training.parallel
    tensor, stages = parallel.tensor, parallel.pipeline
    first, last = stage == 0, stage == stages - 1
    state = parameter_bytes(training)
    message = float(activation_bytes(model, parallel.micro_batch_size, training.precision))
    held = in_flight(parallel.schedule, stage, stages, parallel.micro_batches, parallel.chunks)
    kept = layer_activations(training)
    activations, buffers = 0.0, CONTEXT_BYTES + 4.0 * message  # a message each way, being received and being sent
    if parallel.recompute is Recompute.full:
        activations += kept  # of the one layer that is computed again
        kept = message
    fixed, layer = 0, layer_parameters(model, tensor)
    if first:
        fixed += embedding_parameters(model, tensor)
    if last:
        logits = message / training.width / model.hidden * (model.padded_vocab(tensor) // tensor)
        fixed += head_parameters(model, tensor, own_word=not first)
        activations += held * (2 * message + 4 * logits)  # the norm's input and output, and fp32 probabilities
        buffers += (training.width + 4) * logits  # logits and their gradient
    return StageMemory(
        weights=Amount(layer=state.weight * layer, fixed=state.weight * fixed),
        gradients=Amount(layer=state.gradient * layer, fixed=state.gradient * fixed),
        optimizer=Amount(layer=state.optimizer * layer, fixed=state.optimizer * fixed),
        activations=Amount(layer=held * kept / parallel.chunks, fixed=activations),
        buffers=Amount(fixed=buffers),
    )
