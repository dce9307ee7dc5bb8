"""What a GPU takes for the parts of a model that was not measured: an estimate from its peak rates and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import hypot

from conf.schema.cluster import Gpu
from conf.schema.model import Model
from fasop.costs.measured_module import MeasuredModule, PassCounts, between
from fasop.costs.network.links import Link
from fasop.costs.sizes import BYTES
from fasop.errors import SearchError
from megatron_ext.contract.models.counts import block_numel
from megatron_ext.contract.models.pieces import Stack
from megatron_ext.contract.train_config import Precision

START_S = 10e-6
"""Until a kernel works, whatever the size of the micro-batch: Python and PyTorch call it, the one before it ends."""
STEP_S = 5e-6
"""The same for a step of an LSTM, which cuDNN and oneDNN start without Python."""
EMBEDDING, HEAD, NORM, LAYER, CROSS, ATTENTION = 3, 12, 1, 12, 7, 14
"""Kernels of a forward pass, as the engine starts them: of a layer, of the attention to another stack beside it, and
of that in GNMT. tests/fasop/costs/test_roofline.py counts them."""


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one micro-batch."""

    forward: float
    backward: float


@lru_cache(maxsize=1024)
def roofline(
    gpu: Gpu, model: Model, precision: Precision, tensor: int, batch: float, within: Link[float]
) -> Mapping[str, Time]:
    """Estimate by kind of block what peak rates allow (Williams et al. 2009): matrix products by the GPU's operations
    per second or the reading of their weights, everything else by the memory traffic. Kernels take their starts, too,
    without which no micro-batch would be too small; the more they compute, the more of that is hidden. A backward pass
    takes twice a forward pass.

    Operations: Narayanan et al. 2021, appendix. A tensor group all-reduces the activations of attention and MLP in a
    layer's forward pass and in its backward pass, once after an embedding and once before the head (Shoeybi et al.
    2019).
    """
    sizes, width = model.sized(tensor), BYTES[precision]
    rate = _rate(gpu, precision)
    traffic = gpu.memory_gb_per_s * 1e9
    group = within.all_reduce(tensor)
    family = sizes.traits

    def product(count: float, weights: float) -> float:
        return max(count / rate, width * weights / traffic)

    def layer(stack: Stack) -> Time:
        kind = stack.kind
        matrices = product(batch * family.operations(sizes, kind) / tensor, block_numel(sizes, kind, tensor))
        # What memory.py counts, written and read.
        kept = family.outside_activations(sizes, kind) + family.inside_activations(sizes, kind) / tensor
        work = hypot(matrices + 2 * width * batch * kept / traffic, starts_s(model, stack))
        sums = 2 + (stack.context > 0)
        reduce = group.takes(float(batch * stack.tokens * model.hidden * width))
        return Time(forward=work + sums * reduce, backward=2 * work + sums * reduce)

    def embedding(tokens: int) -> Time:
        looked_up = hypot(3 * width * batch * tokens * sizes.word_width / traffic, EMBEDDING * START_S)
        reduce = group.takes(float(batch * tokens * sizes.word_width * width))
        return Time(forward=looked_up + reduce, backward=2 * looked_up)

    def head() -> Time:
        tokens, vocabulary = batch * sizes.predicting, model.padded_vocab(tensor) // tensor
        logits = product(2 * tokens * sizes.head_inputs * vocabulary, sizes.head_inputs * vocabulary)
        logits += 2 * width * tokens * vocabulary / traffic
        if beside := family.operations(sizes, "head") - 2 * sizes.predicting * sizes.head_inputs * model.vocab_size:
            logits += batch * beside / rate
        logits = hypot(logits, HEAD * START_S)
        reduce = group.takes(float(tokens * sizes.head_inputs * width))
        return Time(forward=logits, backward=2 * logits + reduce)

    first, *others = sizes.stacks()
    found = {stack.kind: layer(stack) for stack in sizes.stacks()}
    found.update(embedding=embedding(first.tokens), head=head())
    for stack in others:
        normed = hypot(2 * width * batch * stack.context * model.hidden / traffic, NORM * START_S)
        found["encoder_norm"] = Time(forward=normed, backward=2 * normed)
        found["decoder_embedding"] = embedding(stack.tokens)
    return found


@lru_cache(maxsize=1024)
def roofline_of_counts(
    gpu: Gpu, model: MeasuredModule, precision: Precision, tensor: int, batch: int, within: Link[float]
) -> Mapping[str, Time]:
    """Estimate as `roofline`, by block, with the operations, bytes, kernels and sums of a tensor group that were
    counted of a model. Raises SearchError: the model cannot have a tensor group of this size."""
    if tensor != model.tensor:
        raise SearchError(model.refused.get(tensor, f"parallel.tensor={tensor} cannot be predicted for {model.said}"))
    works, sums = work_of_counts(gpu, model, precision, batch), sums_of_counts(model, batch, within)
    return {
        name: Time(forward=work.forward + sums[name].forward, backward=work.backward + sums[name].backward)
        for name, work in works.items()
    }


def work_of_counts(gpu: Gpu, model: MeasuredModule, precision: Precision, batch: int) -> Mapping[str, Time]:
    """Estimate the seconds of the passes of each counted block, without sums of a tensor group."""
    traffic = gpu.memory_gb_per_s * 1e9

    def takes(counts: PassCounts) -> float:
        operations, moved = (between(model.sizes, of, batch) for of in (counts.operations, counts.traffic))
        return hypot(max(operations / _rate(gpu, precision), moved / traffic), counts.kernels * START_S)

    return _of_passes(model, takes)


def sums_of_counts(model: MeasuredModule, batch: int, within: Link[float]) -> Mapping[str, Time]:
    """Return the seconds of the sums of a tensor group in the passes of each counted block."""
    group = within.all_reduce(model.tensor)

    def takes(counts: PassCounts) -> float:
        size = between(model.sizes, counts.sum_bytes, batch) if counts.sums else 0.0
        return counts.sums * group.latency_s + size * group.s_per_byte

    return _of_passes(model, takes)


def _of_passes(model: MeasuredModule, takes: Callable[[PassCounts], float]) -> Mapping[str, Time]:
    """Return what each block's passes take."""
    found = {}
    for block in model.sequence:
        assert block.counts is not None, "what was measured has times"
        found[block.name] = Time(forward=takes(block.counts.forward), backward=takes(block.counts.backward))
    return found


def _rate(gpu: Gpu, precision: Precision) -> float:
    return {"fp32": gpu.fp32_tflops, "fp16": gpu.fp16_tflops, "bf16": gpu.bf16_tflops}[precision] * 1e12


def starts_s(model: Model, stack: Stack) -> float:
    """Seconds of a layer's forward pass in which its kernels start."""
    if not model.traits.recurrent:
        return (LAYER + (CROSS if stack.context else 0)) * START_S
    kernels = LAYER / 2 + (ATTENTION if stack.context else 0)
    return kernels * START_S + model.traits.directions(stack.kind) * stack.tokens * STEP_S
