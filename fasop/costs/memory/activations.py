"""What a layer and the loss of tdpp's own models keep of a micro-batch, and need for a moment, bytes; and what it takes
to have it in the host's memory from a layer's forward to its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from conf.schema.cluster import Gpu
from conf.schema.model import Model
from fasop.costs.blocks import blocks_of
from fasop.costs.layers import LayerTimes
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.network.links import Number
from fasop.costs.roofline import Time
from fasop.costs.sizes import head_parameters
from fasop.costs.training import Training
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.train_config import Precision

SCORE_BYTES, SCORE_BYTES_OF_16_BITS = 14, 12
"""Measured: what is there at once for each of an attention's weights, where some are dropped and all are held."""

WIDEST_HEAD = 256
"""Up to which no weights are held on a GPU with Triton (megatron_ext/tasks/language/attention.py)."""

SUM_BYTES, SUM_MOST = 8.0, 108.0 * 2**20
"""Measured with torch 2.14 for 108 multiprocessors, as an A100 has: what a sum over rows takes for each number, and at
most."""


def layer_activations(training: Training, kind: int = 0, *, fused: bool = False) -> float:
    """Count the bytes of activations that one layer of a kind keeps of one micro-batch from its forward to its backward
    pass, without recomputation.

    Counted in tensors of [micro-batch, sequence, hidden]. tdpp's engine: the inputs of both norms and of the linear
    layers after them; and, shared by the tensor group, what attention and MLP keep inside
    (`megatron_ext.contract.models.counts`). Its attention keeps no scores, so recomputing it saves nothing.
    `fused`: on a GPU.
    Megatron-LM: Korthikanti et al. 2022, equations 2 and 4, where the scores are kept unless they are recomputed.
    """
    model, parallel = training.model, training.parallel
    tensor = parallel.tensor_size
    size = parallel.own_samples * model.sequence_length * model.hidden * training.width
    if training.megatron_lm and not model.traits.decoder:
        scores = (
            0.0
            if parallel.recompute is Recompute.selective
            else 2.5 * model.heads * model.sequence_length / model.hidden
        )
        return size * (5 / (tensor if parallel.sequence_parallel else 1) + (12 + scores) / tensor)
    kept = _kept_of(model, tensor, kind, fused)
    outside = kept.outside / 2 / tensor + kept.outside / 2 if parallel.sequence_parallel else kept.outside
    return size * (outside + kept.inside / tensor) + training.width * kept.weights


class _Kept(NamedTuple):
    """What a layer keeps: activations in tensors of [micro-batch, sequence, hidden], and numbers of weights."""

    outside: float
    inside: float
    weights: int


@lru_cache(maxsize=4096)
def _kept_of(model: Model, tensor: int, kind: int, fused: bool) -> _Kept:
    sized, numbers = model.sized(tensor), model.sequence_length * model.hidden
    kinds, traits = blocks_of(model).kinds[kind], sized.traits
    return _Kept(
        outside=sum(traits.outside_activations(sized, one) for one in kinds) / numbers,
        inside=sum(traits.inside_activations(sized, one, fused) for one in kinds) / numbers,
        weights=sum(traits.weights_kept(sized, one) for one in kinds),
    )


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """Bytes that the loss of a micro-batch takes on the last stage."""

    kept: float
    """From its forward to its backward pass."""
    passing: float


def loss_memory(training: Training, logits: float) -> LossMemory:
    """tdpp's engine keeps the logits, of which it makes their gradient; on a GPU nothing of them is in fp32.
    Megatron-LM keeps fp32 probabilities, and has logits and an fp32 gradient of them besides.
    """
    if training.megatron_lm:
        return LossMemory(kept=4 * logits, passing=(training.width + 4) * logits)
    capped = getattr(training.model.sized(1), "logits_softcap", None) is not None  # their tanh is kept, too
    return LossMemory(kept=(2 if capped else 1) * training.width * logits, passing=0.0)


def held_scores(training: Training, *, triton: bool) -> float:
    """Bytes of a micro-batch in one layer, while tdpp's engine drops some of attention's weights or caps its scores:
    never kept. `triton`: whether the GPU has kernels for the former."""
    model = training.model
    if training.megatron_lm or isinstance(model, MeasuredModule):
        return 0.0
    sized = model.sized(1)
    capped = getattr(sized, "attention_softcap", None) is not None
    if not model.attention_dropout and not capped:
        return 0.0
    if triton and not capped and sized.head_width <= WIDEST_HEAD:
        return 0.0
    scores = max(stack.tokens * max(stack.tokens, stack.context) for stack in sized.stacks())
    of_each = SCORE_BYTES if training.precision is Precision.fp32 else SCORE_BYTES_OF_16_BITS
    return of_each * training.parallel.own_samples * model.heads / training.parallel.tensor_size * scores


def passing_bytes(
    training: Training,
    sized: ModelConfig,
    first: Number,
    last: Number,
    *,
    kept: float,
    again: float,
    logits: float,
    words: float,
) -> Number:
    """Count the bytes that tdpp's engine on a GPU needs for a moment at the fullest one, beside all that is kept.

    Either in a layer's backward pass: what is computed again, and the scratch of the largest sum over rows, a bias's
    gradient. Or, where one stage has tied embeddings, when the loss has gone back: a gradient of all words in the
    weights' format, before it is added to the one in fp32. Or on the first stage, when a micro-batch has left all
    layers: the embedding's, in the place of what one layer kept, which is at most what its layers kept.
    Counted by torch's own allocator with the tests' stand-in for CUDA, torch 2.14.
    """
    model, parallel = training.model, training.parallel
    tensor = parallel.tensor_size
    rows = parallel.own_samples * max(_tokens_of(model))
    scratch = min(SUM_BYTES * rows * (widest(sized) // tensor), SUM_MOST) if sized.add_bias_linear else 0.0
    tied = parallel.pipeline == 1 and head_parameters(model, tensor, own_word=False) < head_parameters(
        model, tensor, own_word=True
    )
    in_layer = again + scratch + 0.0 * last
    if tied:
        return np.maximum(words, in_layer - logits)
    from_words = np.maximum(0.0, first * (words - kept - last * logits))
    if parallel.schedule.definition.splits_backward:  # logits wait for the weights' gradients, as all else
        return np.maximum(in_layer, from_words)
    return np.maximum(in_layer - last * np.minimum(in_layer, logits), from_words)


def widest(sized: ModelConfig) -> int:
    """Count the numbers that a layer has of a token at its widest place."""
    return sized.inner * (2 if sized.swiglu else 1)


def attended_bytes(training: Training, sized: ModelConfig) -> float:
    """Count the bytes of a micro-batch that layers attend to beside what passes through them."""
    return training.parallel.own_samples * _tokens_of(training.model).attended * sized.hidden * training.width


class _Tokens(NamedTuple):
    """The most tokens of a sample that a layer has, and that it attends to beside its own."""

    own: int
    attended: int


@lru_cache(maxsize=1024)
def _tokens_of(model: Model) -> _Tokens:
    stacks = model.sized(1).stacks()
    return _Tokens(max(stack.tokens for stack in stacks), max(stack.context for stack in stacks))


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
