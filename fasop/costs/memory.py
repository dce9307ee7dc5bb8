"""What a rank holds, bytes: weights, gradients and optimizer state, activations in flight, buffers.

A stage's memory is linear in its layers, so the GPUs of a stage allow it a largest number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from conf.schema.experiment import EngineKind, Precision, Recompute
from fasop.costs.blocks import Blocks, blocks_of
from fasop.costs.experts import layer_numbers
from fasop.costs.measured_module import MeasuredBlock, MeasuredModule
from fasop.costs.network.links import Number
from fasop.costs.overlap import LARGE_PARTS
from fasop.costs.schedules import in_flight
from fasop.costs.sizes import activation_bytes, embedding_parameters, head_parameters, word_parameters
from fasop.costs.training import Training
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import BUCKETS_UNDER_WAY, PIECE, SLOTS
from megatron_ext.contract.plan import BUCKET_BYTES

GIB = 2**30

SCORE_BYTES, SCORE_BYTES_OF_16_BITS = 14, 12
"""Measured: what is there at once for each of an attention's weights, where some are dropped and all are held."""

WIDEST_HEAD = 256
"""Up to which no weights are held on a GPU with Triton (megatron_ext/tasks/language/attention.py)."""

WORKSPACE_BYTES = 2 * 8.125 * 2**20
"""cuBLAS's and cuBLASLt's workspaces, which torch allocates for a stream (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

SUM_BYTES, SUM_MOST = 8.0, 108.0 * 2**20
"""Measured with torch 2.14 for 108 multiprocessors, as an A100 has: what a sum over rows takes for each number, and at
most."""

FRAGMENT_BYTES = 375.0 * 2**20
"""Measured likewise: what the allocator holds and does not use at the peak, beyond the size of a gradient of all words;
the most in 34 ranks of 20 runs (GPT-2 of 124M and 355M, Llama of 1B and 7B), rounded up."""

LAYERS_HERE = 2.0
"""Layers whose activations are on a GPU at once, if those of all others are in the host's memory."""

ONE_BYTE = 1.0
"""What a layer that keeps nothing counts for, so that some number of them fits into a memory."""


@dataclass(frozen=True, kw_only=True)
class Amount(Generic[Number]):
    """Bytes: of every layer, and what is there with none."""

    layer: Number
    fixed: Number
    spared: Spared[Number] | None = None

    def of(self, layers: int) -> Number:
        whole = self.fixed + layers * self.layer
        if self.spared is None:
            return whole
        beyond = self.spared.beyond if layers > self.spared.most else 0.0
        return whole - min(layers, self.spared.most) * self.spared.layer - beyond


@dataclass(frozen=True, kw_only=True)
class Spared(Generic[Number]):
    """Bytes that a stage does not need because some of its layers are computed again, if not all of them are."""

    most: int
    """Layers of a stage that are computed again, if it has as many."""
    layer: Number
    """For each of these."""
    beyond: Number
    """Where a stage has more layers: these are gone before a layer is computed again, which then adds nothing to the
    most that is there."""


@dataclass(frozen=True, kw_only=True)
class StageMemory(Generic[Number]):
    """What a rank of one stage holds, or of each of several."""

    weights: Amount[Number]
    gradients: Amount[Number]
    optimizer: Amount[Number]
    """Master weights, moments and the average of the weights."""
    activations: Amount[Number]
    """Activations of all micro-batches in flight."""
    buffers: Amount[Number]
    """Messages, cuBLAS's workspaces, and what is there for a moment only."""
    fragments: Amount[Number]
    """What torch's allocator holds and does not use."""
    communicators: Amount[Number] | None = None
    """NCCL's buffers; as the next one, known of a stage on its GPUs (`fasop.costs.allowance`)."""
    context: Amount[Number] | None = None
    """CUDA's."""

    def by_term(self) -> dict[str, Amount[Number]]:
        """Every known amount by its name."""
        return {name: amount for name, amount in vars(self).items() if amount is not None}

    @property
    def layer(self) -> Number:
        """Return what a layer takes that is not computed again, unless all are."""
        return reduce(add, (amount.layer for amount in self.by_term().values()))

    @property
    def fixed(self) -> Number:
        return reduce(add, (amount.fixed for amount in self.by_term().values()))

    def of(self, layers: int) -> Number:
        return reduce(add, (amount.of(layers) for amount in self.by_term().values()))

    def capacity(self, memory_gib: Number) -> NDArray[np.int64]:
        """The most layers that fit into so much memory; negative if not even a stage without layers does."""
        room, spared = memory_gib * GIB - self.fixed, self.activations.spared
        if spared is None:
            most: NDArray[np.int64] = np.floor(room / self.layer).astype(np.int64)
            return most
        again = np.floor(room / (self.layer - spared.layer))
        beyond = np.floor((room + spared.most * spared.layer + spared.beyond) / self.layer)
        least = np.minimum(again, spared.most)
        fitting: NDArray[np.int64] = (least + (beyond > spared.most) * (beyond - least)).astype(np.int64)
        return fitting


EACH_STREAM = ("gradients", "buffers", "fragments")
"""Terms of a `StageMemory`, of which every stream of a rank has its own."""


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes that one parameter takes."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def all(self) -> float:
        return self.weight + self.gradient + self.optimizer


def parameter_bytes(training: Training, part: float | None = None) -> ParameterBytes:
    """What is kept for every parameter, by a rank that keeps such a part of what its replicas share out; None: all of
    them keep as much.

    tdpp's engine keeps 16-bit weights, gradients in fp32 and an optimizer with its moments, the average of the weights
    and fp32 master weights, which in fp32 are the weights themselves unless the optimizer is sharded. Megatron-Core's
    sharded optimizer has no copy of weights in fp32 either. Megatron-LM:
    docs/source/api-guide/dist_optimizer.md, where fp16 has 16-bit gradients and an fp32 copy of them, 20 bytes in all.
    """
    precision, sharded = training.precision, training.parallel.sharded_optimizer
    kept = 4.0 * training.kept_values
    part = 1 / training.parallel.data if part is None else part
    gradient, state = 4.0, kept if precision is Precision.fp32 else kept + 4.0
    if training.megatron_lm:
        if precision is Precision.fp16:
            gradient, state = 2.0, 16.0
    else:
        state = kept + 4.0 if sharded and training.engine.kind is EngineKind.tdpp else state
        if training.scatters:
            gradient *= part
        elif training.parallel.data > 1 and training.reduced_bytes < gradient:
            gradient += training.reduced_bytes  # copies of the buckets, until the last one is summed
    weight = training.width * (part if training.gathers else 1.0)
    if training.gathers and precision is Precision.fp32:
        state -= 4.0  # the share of the weights is what the optimizer steps
    if training.offloads:
        state = 0.0
    return ParameterBytes(weight=weight, gradient=gradient, optimizer=state * (part if sharded else 1.0))


def _pieces(training: Training) -> float:
    """Count the bytes in which an offloaded optimizer's state passes through a GPU."""
    return 4.0 * SLOTS * PIECE * training.offloaded_values if training.offloads else 0.0


def _scattered(training: Training, first: Number, last: Number, largest: float) -> Number:
    """Count the bytes of gradients that are summed, or wait for it, where a rank keeps the sums of its share alone:
    those of the buckets under way, and of the one that is filled. Of words they are a bucket by themselves: there while
    those of layers are summed, where they are tied in one stage, and at one end of the pass of a stage that has them
    alone; where stages share them, always, until the iteration ends.

    `largest` are the parameters of the largest layer.
    """
    if not training.scatters:
        return 0.0 * first
    each = max(float(BUCKET_BYTES), 4.0 * largest / LARGE_PARTS)
    layers = (BUCKETS_UNDER_WAY + 1) * each
    if isinstance(training.model, MeasuredModule):
        return layers + 0.0 * first
    model, tensor, several = training.model, training.parallel.tensor_size, training.parallel.pipeline > 1
    words = 4.0 * word_parameters(model, tensor)
    tied = head_parameters(model, tensor, own_word=False) < head_parameters(model, tensor, own_word=True)
    at_ends = words if tied else max(0.0, words - each)
    return layers + (np.maximum(first, last) if several else 1.0) * at_ends + 0.0 * first


def _gathered(training: Training, first: Number, last: Number, largest: float) -> Number:
    """Count the bytes of whole weights that are there beside a rank's share: those of two neighbouring blocks. Words
    are a block's, or a whole copy is always there where stages share them.

    `largest` are the parameters of the largest layer.
    """
    if not training.gathers:
        return 0.0 * first
    layer = training.width * largest
    if isinstance(training.model, MeasuredModule):
        return 2 * layer + 0.0 * first
    model, tensor, several = training.model, training.parallel.tensor_size, training.parallel.pipeline > 1
    words = float(training.width * word_parameters(model, tensor))
    tied = head_parameters(model, tensor, own_word=False) < head_parameters(model, tensor, own_word=True)
    if tied and several:
        whole: Number = 2 * layer + np.maximum(first, last) * words
    else:
        whole = 2 * layer + (np.maximum(first, last) if several else 1.0) * max(0.0, words - layer) + 0.0 * first
    return whole


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
    sized, numbers = model.sized(tensor), model.sequence_length * model.hidden
    kinds = blocks_of(model).kinds[kind]
    whole = sum(sized.traits.outside_activations(sized, one) for one in kinds) / numbers
    outside = whole / 2 / tensor + whole / 2 if parallel.sequence_parallel else whole
    inside = sum(sized.traits.inside_activations(sized, one, fused) for one in kinds) / numbers
    of_weights = training.width * sum(sized.traits.weights_kept(sized, one) for one in kinds)
    return size * (outside + inside / tensor) + of_weights


@dataclass(frozen=True, kw_only=True)
class _LossMemory:
    """Bytes that the loss of a micro-batch takes on the last stage."""

    kept: float
    """From its forward to its backward pass."""
    passing: float


def _loss_memory(training: Training, logits: float) -> _LossMemory:
    """tdpp's engine keeps the logits, of which it makes their gradient; on a GPU nothing of them is in fp32.
    Megatron-LM keeps fp32 probabilities, and has logits and an fp32 gradient of them besides.
    """
    if training.megatron_lm:
        return _LossMemory(kept=4 * logits, passing=(training.width + 4) * logits)
    capped = getattr(training.model.sized(1), "logits_softcap", None) is not None  # their tanh is kept, too
    return _LossMemory(kept=(2 if capped else 1) * training.width * logits, passing=0.0)


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


def _passing(
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
    rows = parallel.own_samples * max(max(stack.tokens, stack.context) for stack in sized.stacks())
    scratch = min(SUM_BYTES * rows * (_widest(sized) // tensor), SUM_MOST) if sized.add_bias_linear else 0.0
    tied = parallel.pipeline == 1 and head_parameters(model, tensor, own_word=False) < head_parameters(
        model, tensor, own_word=True
    )
    in_layer = again + scratch + 0.0 * last
    if tied:
        return np.maximum(words, in_layer - logits)  # type: ignore[no-any-return]
    from_words = np.maximum(0.0, first * (words - kept - last * logits))
    if parallel.schedule.definition.splits_backward:  # logits wait for the weights' gradients, as all else
        return np.maximum(in_layer, from_words)  # type: ignore[no-any-return]
    return np.maximum(in_layer - last * np.minimum(in_layer, logits), from_words)  # type: ignore[no-any-return]


def _widest(sized: ModelConfig) -> int:
    """Count the numbers that a layer has of a token at its widest place."""
    return sized.inner * (2 if sized.swiglu else 1)


def _context_bytes(training: Training, sized: ModelConfig) -> float:
    """Count the bytes of a micro-batch that layers attend to beside what passes through them."""
    tokens = max(stack.context for stack in sized.stacks())
    return training.parallel.own_samples * tokens * sized.hidden * training.width


def stage_memory(
    training: Training,
    stage: Number,
    of_layer: Number | None = None,
    kind: int = 0,
    versions: int = 1,
    part: float | None = None,
) -> StageMemory[Number]:
    """Work out what the ranks of a stage keep in memory, or those of each of several, with the schedule, batches and
    sizes of `training.parallel`.

    `of_layer` is of how many micro-batches a layer keeps its activations; without it, what follows from the schedule
    for a stage of one chunk. Of several chunks each has its own number (`chunks_in_flight`). Layers are of one kind
    (`Blocks.kinds`). Of the weights that are trained, so many versions are held. Of what replicas share out the ranks
    keep such a `part` (`parameter_bytes`).
    """
    if isinstance(training.model, MeasuredModule):
        return _of_module(training, training.model, stage, of_layer, kind, versions, part)
    model, parallel = training.model, training.parallel
    tensor, stages = parallel.tensor_size, parallel.pipeline
    first, last, none = stage == 0, stage == stages - 1, 0.0 * stage
    state = parameter_bytes(training, part)
    message = float(activation_bytes(model, parallel.own_samples, training.precision))
    if (held := of_layer) is None:
        held = in_flight(parallel.schedule, stage, stages, parallel.micro_batches)
    again, kept, put_off = 0.0, layer_activations(training, kind, fused=True), none
    number, spared = parallel.recompute.layers, None
    of_first = kept
    if parallel.recompute.way is Recompute.full:
        if parallel.schedule.definition.splits_backward:  # what was computed again waits for the weights' gradients
            put_off = kept * np.minimum(stage + 1, parallel.micro_batches)
        again = max(layer_activations(training, one, fused=True) for one in range(len(blocks_of(model).kinds)))
        of_first = message  # and what one layer keeps that is computed again
        if number is None:
            kept = message
        else:
            spared = Spared(most=number, layer=held * (kept - message) - put_off, beyond=again + none)
            put_off = none
    sized = model.sized(tensor)
    predicting = float(parallel.own_samples * sized.predicting)
    logits = predicting * (model.padded_vocab(tensor) // tensor)
    numbers = layer_numbers(training)
    layer, updated = numbers.held[kind] + none, numbers.stepped[kind] + none
    fixed = first * embedding_parameters(model, tensor) + last * head_parameters(model, tensor, own_word=stages > 1)
    of_loss = _loss_memory(training, logits)
    # The norm's input and output, and the loss; of several chunks the last goes back as soon as it is there.
    of_head = 1 if parallel.chunks > 1 else held
    of_stage = held if parallel.chunks == 1 else parallel.schedule.definition.held(stage, stages, parallel.chunks)
    activations = last * of_head * (2 * (predicting * sized.head_inputs * training.width) + of_loss.kept)
    if training.offloads_activations:
        # Two layers are here and the gradients of one, or one layer and the loss; and what came from other stages and
        # goes to them. What waits for the weights' gradients has come back.
        here = LAYERS_HERE * kept + message * (1 + _widest(sized) / tensor / sized.hidden)
        if parallel.schedule.definition.splits_backward:
            here, put_off = kept, kept * np.minimum(stage + 1, parallel.micro_batches)
        ends = first + last if parallel.chunks == 1 else 0.0
        activations = np.maximum(activations + kept, here) + of_stage * message * (2 - ends)
        kept = 0.0
    if context := _context_bytes(training, sized):  # comes as a message, and is there for all of a stage's layers
        activations = activations + context * of_stage
    words = float(training.width * word_parameters(model, tensor))
    passing = last * of_loss.passing + again if training.megatron_lm else none
    if not training.megatron_lm:
        of_moment = partial(_passing, training, sized, first, last, kept=of_first, logits=of_loss.kept, words=words)
        passing = of_moment(again=again)
        if spared is not None:  # the logits may have left room for all of it, so that it added less
            spared = replace(spared, beyond=passing - of_moment(again=0.0))
    # A message each way, being received and being sent, to each neighbour; one stage has only its loss's gradient.
    messages = (1.0 if stages == 1 else 4.0 * (2 - first - last)) * message
    buffers = WORKSPACE_BYTES + _pieces(training) + messages + passing + held_scores(training, triton=True)
    buffers = buffers + _scattered(training, first, last, max(numbers.held))
    buffers = buffers + _gathered(training, first, last, max(numbers.held))
    ends = 1 - (1 - first) * (1 - last)
    return StageMemory(
        weights=Amount(layer=versions * state.weight * layer, fixed=versions * state.weight * fixed),
        gradients=Amount(layer=state.gradient * layer, fixed=state.gradient * fixed),
        optimizer=Amount(layer=state.optimizer * updated, fixed=state.optimizer * fixed),
        activations=Amount(layer=held * kept + put_off, fixed=activations, spared=spared),
        buffers=Amount(layer=none, fixed=buffers),
        fragments=Amount(layer=none, fixed=FRAGMENT_BYTES + ends * words),
    )


def _of_module(
    training: Training,
    model: MeasuredModule,
    stage: Number,
    of_layer: Number | None,
    kind: int,
    versions: int,
    part: float | None,
) -> StageMemory[Number]:
    """Do as `stage_memory` for a user's module: what enters a stage is there for all micro-batches in flight, as much
    as any cut has.

    Of a block that is computed again its inputs are kept, and what one layer keeps is there once more.
    """
    parallel, blocks, state = training.parallel, blocks_of(model), parameter_bytes(training, part)
    stages, batch = parallel.pipeline, parallel.micro_batch_size
    first, last, none = stage == 0, stage == stages - 1, 0.0 * stage
    if (held := of_layer) is None:
        held = in_flight(parallel.schedule, stage, stages, parallel.micro_batches)
    # Of a stage, whatever its chunks.
    in_all = held if parallel.chunks == 1 else parallel.schedule.definition.held(stage, stages, parallel.chunks)
    again, number = parallel.recompute.way is Recompute.full, parallel.recompute.layers
    every = again and number is None
    each = {block.name: (model.given if every else model.kept)(block.name, batch) for block in model.sequence}
    message = float(max(training.crossing))

    def beside(of: Callable[[MeasuredBlock], float]) -> Number:
        """Count what the first and the last stage have beside their layers."""
        sums = [sum(of(model.block(name)) for name in part) for part in (blocks.first, blocks.last)]
        both: Number = none + first * sums[0] + last * sums[1]
        return both

    layer = [model.block(name) for name in blocks.kinds[kind]]
    parameters, fixed = sum(block.parameters for block in layer), beside(lambda block: block.parameters)
    if stages == 1:  # one copy of what several blocks share
        fixed = fixed - model.tied_parameters * max(0, model.tied_blocks - 1)
    untrained = none + sum(block.fixed_bytes for block in layer)
    kept = max(ONE_BYTE, sum(each[block.name] for block in layer))
    most = max(sum(model.kept(name, batch) for name in kinds) for kinds in blocks.kinds) if again else 0.0
    spared: Spared[Number] | None = None
    if model.always is None:
        # The gradients of the head's weights, when the loss has gone back; or what one layer keeps that is computed
        # again, by when all of the head is gone.
        of_head = training.width * sum(model.block(name).parameters for name in blocks.last)
        gone = sum(each[name] for name in blocks.last)
        moment = (1.0 - last) * most + last * max(of_head, most - gone)
        messages, leaving = 4.0 * message + none, none
    else:
        # Of a tied embedding in one stage autograd holds the head's gradient until it has the embedding's.
        waiting = training.width * model.tied_parameters * (model.tied_blocks > 1) if stages == 1 else 0.0
        moment, spared = _moment(training, model, blocks, again, first, last, each, waiting)
        moment = moment + model.always
        # A message each way, being received and being sent, to each neighbour.
        messages = 4.0 * (2 - first - last) * message
        leaving = (1.0 - last) * max(model.dropped(kinds[-1], batch) for kinds in blocks.kinds) * in_all
    here = none
    if training.offloads_activations:
        here = LAYERS_HERE * kept + none
        kept = ONE_BYTE
    if number is not None:
        given = sum(model.given(block.name, batch) for block in layer)
        spared = Spared(most=number, layer=held * max(0.0, kept - max(ONE_BYTE, given)), beyond=0.0 * held)
    entering = message * in_all * (1.0 if parallel.chunks > 1 else 1.0 - first)
    return StageMemory(
        weights=Amount(
            layer=versions * state.weight * parameters + untrained,
            fixed=versions * state.weight * fixed + beside(lambda block: block.fixed_bytes),
        ),
        gradients=Amount(layer=state.gradient * parameters + none, fixed=state.gradient * fixed),
        optimizer=Amount(layer=state.optimizer * parameters + none, fixed=state.optimizer * fixed),
        activations=Amount(
            layer=held * kept,
            fixed=moment + entering + leaving + here + in_all * beside(lambda block: each[block.name]),
            spared=spared,
        ),
        buffers=Amount(
            layer=none,
            fixed=WORKSPACE_BYTES
            + _pieces(training)
            + messages
            + _scattered(training, first, last, max(block.parameters for block in model.sequence))
            + _gathered(training, first, last, max(block.parameters for block in model.sequence)),
        ),
        fragments=Amount(layer=none, fixed=FRAGMENT_BYTES + none),
    )


def _moment(
    training: Training,
    model: MeasuredModule,
    blocks: Blocks,
    again: bool,
    first: Number,
    last: Number,
    each: Mapping[str, float],
    waiting: float,
) -> tuple[Number, Spared[Number] | None]:
    """Count the bytes of counted blocks that are there at the fullest moment, beside all that is kept by then; when a
    backward pass comes to a block, what those behind it kept is gone.

    When that of the first stage comes to the embedding, all its layers are gone: each spares a part of it, up to where
    another moment is the fullest. Where layers already spare something, one of them is gone. `waiting` are bytes that
    the head's backward pass leaves to the embedding's.
    """
    parallel, batch = training.parallel, training.parallel.micro_batch_size

    def at_most(names: Sequence[str], behind: Number) -> Number:
        found: Number = 0.0 * first
        for name in reversed(names):
            found = np.maximum(found, model.passing(name, batch, again=again) - behind)
            behind = behind + each[name]
        return found

    head = sum(each[name] for name in blocks.last)
    a_layer = max(ONE_BYTE, min(sum(each[name] for name in kinds) for kinds in blocks.kinds)) / parallel.chunks
    behind = last * head - waiting
    moments = [last * at_most(blocks.last, 0.0 * first)]
    moments += [at_most(kinds, behind) for kinds in blocks.kinds]
    others: Number = reduce(np.maximum, moments)
    single = parallel.recompute.layers is not None or training.offloads_activations
    found: Number = np.maximum(others, first * at_most(blocks.first, behind + a_layer * single))
    if single:
        return found, None
    more = float(np.max(found - others))
    spared = int(more // a_layer)
    return found, Spared(most=spared, layer=first * a_layer, beyond=first * (more - spared * a_layer))


def memory_of_streams(one: StageMemory[float], streams: int) -> StageMemory[float]:
    """Work out the memory of a rank with so many copies of the model, which hold activations of as many micro-batches
    (`one` has these): each has gradients and buffers of its own, and blocks of the allocator, which gives none to
    another stream.
    """

    def of_all(amount: Amount[float]) -> Amount[float]:
        return Amount(layer=streams * amount.layer, fixed=streams * amount.fixed)

    several = {name: of_all(amount) for name, amount in one.by_term().items() if name in EACH_STREAM}
    return replace(one, **several)
