"""What a rank holds, bytes: weights, gradients and optimizer state, activations in flight, buffers.

A stage's memory is linear in its layers, so the GPUs of a stage allow it a largest number of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from fasop.costs.blocks import blocks_of
from fasop.costs.experts import layer_numbers
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.memory.activations import (
    attended_bytes,
    held_scores,
    layer_activations,
    loss_memory,
    passing_bytes,
    widest,
)
from fasop.costs.memory.amounts import FRAGMENT_BYTES, WORKSPACE_BYTES, Amount, Spared, StageMemory
from fasop.costs.memory.modules import LAYERS_HERE, module_memory
from fasop.costs.memory.shared_state import gathered_bytes, parameter_bytes, pieces_bytes, scattered_bytes
from fasop.costs.network.links import Number
from fasop.costs.schedules import in_flight
from fasop.costs.sizes import activation_bytes, embedding_parameters, head_parameters, word_parameters
from fasop.costs.training import Training
from megatron_ext.contract.parallel_config import Recompute


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
