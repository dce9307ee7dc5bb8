"""Numbers of a sample that a model's layers keep until the backward pass, and that cross a cut between stages."""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

from megatron_ext.contract.models.model import AWD_LM, GNMT, RECURRENT, ROTARY, S2VT, WITHOUT_ATTENTION, ModelConfig
from megatron_ext.contract.models.parameters import lstm_widths

LSTM_KEEPS = 7
"""Numbers of a cell that an LSTM keeps beside its inputs: four gates, the cell, its tanh, and the result."""


def inside_activations(model: ModelConfig, kind: str, fused: bool = False) -> int:
    """That a layer keeps and that a tensor group shares out; `fused`: on a GPU, where SwiGLU is one kernel.

    Queries, keys and values, and turned or repeated ones beside or instead of them; the attention's result; the
    MLP's inner tensors before and after GELU, or gate, its SiLU (unless fused), the other half, and their product. Of
    an LSTM what goes in, the gates, and the cells before and after their tanh; of its attention also a tanh for every
    two tokens.
    """
    if model.family == GNMT:
        return _of_recurrent(model, kind)
    if model.family in WITHOUT_ATTENTION:
        return _of_lstm(model, kind)
    queries, groups = model.heads * model.head_width, model.query_groups * model.head_width
    repeated, turned = groups < queries, model.position_embedding_type == ROTARY
    kept = queries  # the result
    if repeated:
        kept += 2 * queries + (queries if turned else queries + 2 * groups)
    else:
        kept += queries + 2 * groups + (2 * queries if turned else 0)
    kept += ((3 if fused else 4) if model.swiglu else 2) * model.inner
    found = 0
    for stack in model.stacks():
        if stack.kind == kind:
            cross = 2 * queries * (stack.tokens + stack.context) if repeated else 0
            cross = cross or 2 * (queries * stack.tokens + groups * stack.context)
            found = stack.tokens * kept + (cross if stack.context else 0)
    return found


def outside_activations(model: ModelConfig, kind: str) -> int:
    """That a layer keeps and that every rank of a tensor group has whole.

    The inputs of its norms, and of the linear layers after them; with sequence parallelism the group shares out
    the former. What a decoder attends to is a wire, kept once for all layers of a stage.
    """
    found = 0
    if model.family in RECURRENT:
        return found
    for stack in model.stacks():
        if stack.kind == kind:
            found = (6 if stack.context else 4) * stack.tokens * model.hidden
    return found


class Wire(NamedTuple):
    """What blocks that lie at one place give to others. Counted blocks lie at their numbers, what the first stage has
    beside them at -1, and what the last stage has at their count."""

    giver: int
    takers: Tuple[int, ...]
    numbers: int
    """Of a sample."""


def wires(model: ModelConfig) -> List[Wire]:
    """Of a model whose blocks a formula describes, in the order of their givers."""
    first, last = model.stacks()[0], model.stacks()[-1]
    hidden, end = model.hidden, model.counted
    if model.family == AWD_LM:
        widths = [model.word_width, *[hidden] * (end - 1), model.head_inputs]
        return [Wire(place, (place + 1,), width * first.tokens) for place, width in enumerate(widths, -1)]
    if model.family == S2VT:
        frames = Wire(-1, (0,), model.word_width * model.sequence_length)
        return [frames, *(Wire(place, (place + 1,), hidden * first.tokens) for place in range(end))]
    if first.kind == last.kind:
        return [Wire(place, (place + 1,), hidden * first.tokens) for place in range(-1, end)]
    decoder, recurrent = model.layers, model.family == GNMT  # the number of its first block
    encoded = [Wire(place, (place + 1,), hidden * first.tokens) for place in range(-1, decoder)]
    if recurrent:
        encoded[1] = encoded[1]._replace(numbers=2 * encoded[1].numbers)  # both directions
    others = tuple(range(decoder + 1, end))
    attended = Wire(decoder, others, hidden * (last.tokens if recurrent else last.context))
    decoded = [Wire(place, (place + 1,), hidden * last.tokens) for place in range(decoder, end)]
    return [*encoded, *([attended] if others else []), *decoded]


def kept_of_weights(model: ModelConfig, kind: str) -> int:
    """That a layer keeps of a micro-batch, whatever its size: weights of which a part is dropped."""
    if model.family != AWD_LM or not model.weight_dropout or not kind.startswith("layer"):
        return 0
    return 4 * lstm_widths(model, kind)[1] ** 2


def crossing(model: ModelConfig, after: int) -> int:
    """That cross a cut behind so many counted blocks."""
    return sum(wire.numbers for wire in wires(model) if wire.giver < after <= max(wire.takers))


def _of_recurrent(model: ModelConfig, kind: str) -> int:
    """A layer of gnmt."""
    found = 0
    for stack in model.stacks():
        if stack.kind == kind:
            inputs = 1 if kind in ("encoder_first", "encoder", "decoder_first") else 2
            directions = 2 if kind == "encoder_first" else 1
            found = stack.tokens * model.hidden * directions * (inputs + LSTM_KEEPS)
            found += (stack.tokens + 1) * stack.context * model.hidden
    return found


def _of_lstm(model: ModelConfig, kind: str) -> int:
    """A layer of awd_lm or s2vt; the blocks before and behind the layers keep none of these."""
    inputs, outputs = lstm_widths(model, kind)
    return sum(stack.tokens * (inputs + LSTM_KEEPS * outputs) for stack in model.stacks() if stack.kind == kind)
