"""What a rank holds, bytes: weights, gradients and optimizer state, activations in flight, buffers.

A stage's memory is linear in its layers, so the GPUs of a stage allow it a largest number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from fasop.costs.blocks import Blocks, blocks_of
from fasop.costs.measured_module import MeasuredBlock, MeasuredModule
from fasop.costs.memory.activations import (
    attended_bytes,
    held_scores,
    layer_activations,
    loss_memory,
    passing_bytes,
    widest,
)
from fasop.costs.memory.amounts import FRAGMENT_BYTES, WORKSPACE_BYTES, Amount, Spared, StageMemory
from fasop.costs.memory.shared_state import gathered_bytes, parameter_bytes, pieces_bytes, scattered_bytes
from fasop.costs.network.links import Number
from fasop.costs.schedules import in_flight
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.sizes import activation_bytes, embedding_parameters, head_parameters, word_parameters
from fasop.costs.training import Training
from megatron_ext.contract.parallel_config import Recompute

LAYERS_HERE = 2.0
"""Layers whose activations are on a GPU at once, if those of all others are in the host's memory."""

ONE_BYTE = 1.0
"""What a layer that keeps nothing counts for, so that some number of them fits into a memory."""


def module_memory(
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
        return none + first * sums[0] + last * sums[1]

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
            + pieces_bytes(training)
            + messages
            + scattered_bytes(training, first, last, max(block.parameters for block in model.sequence))
            + gathered_bytes(training, first, last, max(block.parameters for block in model.sequence)),
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
        return module_memory(training, training.model, stage, of_layer, kind, versions, part)
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
    of_loss = loss_memory(training, logits)
    # The norm's input and output, and the loss; of several chunks the last goes back as soon as it is there.
    of_head = 1 if parallel.chunks > 1 else held
    of_stage = held if parallel.chunks == 1 else parallel.schedule.definition.held(stage, stages, parallel.chunks)
    activations = last * of_head * (2 * (predicting * sized.head_inputs * training.width) + of_loss.kept)
    if training.offloads_activations:
        # Two layers are here and the gradients of one, or one layer and the loss; and what came from other stages and
        # goes to them. What waits for the weights' gradients has come back.
        here = LAYERS_HERE * kept + message * (1 + widest(sized) / tensor / sized.hidden)
        if parallel.schedule.definition.splits_backward:
            here, put_off = kept, kept * np.minimum(stage + 1, parallel.micro_batches)
        ends = first + last if parallel.chunks == 1 else 0.0
        activations = np.maximum(activations + kept, here) + of_stage * message * (2 - ends)
        kept = 0.0
    if context := attended_bytes(training, sized):  # comes as a message, and is there for all of a stage's layers
        activations = activations + context * of_stage
    words = float(training.width * word_parameters(model, tensor))
    passing = last * of_loss.passing + again if training.megatron_lm else none
    if not training.megatron_lm:
        of_moment = partial(
            passing_bytes, training, sized, first, last, kept=of_first, logits=of_loss.kept, words=words
        )
        passing = of_moment(again=again)
        if spared is not None:  # the logits may have left room for all of it, so that it added less
            spared = replace(spared, beyond=passing - of_moment(again=0.0))
    # A message each way, being received and being sent, to each neighbour; one stage has only its loss's gradient.
    messages = (1.0 if stages == 1 else 4.0 * (2 - first - last)) * message
    buffers = WORKSPACE_BYTES + pieces_bytes(training) + messages + passing + held_scores(training, triton=True)
    buffers = buffers + scattered_bytes(training, first, last, max(numbers.held))
    buffers = buffers + gathered_bytes(training, first, last, max(numbers.held))
    ends = 1 - (1 - first) * (1 - last)
    return StageMemory(
        weights=Amount(layer=versions * state.weight * layer, fixed=versions * state.weight * fixed),
        gradients=Amount(layer=state.gradient * layer, fixed=state.gradient * fixed),
        optimizer=Amount(layer=state.optimizer * updated, fixed=state.optimizer * fixed),
        activations=Amount(layer=held * kept + put_off, fixed=activations, spared=spared),
        buffers=Amount(layer=none, fixed=buffers),
        fragments=Amount(layer=none, fixed=FRAGMENT_BYTES + ends * words),
    )
