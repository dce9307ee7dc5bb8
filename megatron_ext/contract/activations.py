"""Numbers of a sample that a model's layers keep until the backward pass, and that cross a cut between stages."""

from __future__ import annotations

from megatron_ext.contract.model import GNMT, ROTARY, ModelConfig

LSTM_KEEPS = 7
"""Numbers of a cell that an LSTM keeps beside its inputs: four gates, the cell, its tanh, and the result."""


def inside_activations(model: ModelConfig, kind: str) -> int:
    """That a layer keeps and that a tensor group shares out.

    Queries, keys and values, and turned or repeated ones beside or instead of them; the attention's result; the
    MLP's inner tensors before and after GELU, or gate, its SiLU, the other half, and their product. Of an LSTM what
    goes in, the gates, and the cells before and after their tanh; of its attention also a tanh for every two tokens.
    """
    if model.family == GNMT:
        return _of_recurrent(model, kind)
    queries, groups = model.heads * model.head_width, model.query_groups * model.head_width
    repeated, turned = groups < queries, model.position_embedding_type == ROTARY
    kept = queries  # the result
    if repeated:
        kept += 2 * queries + (queries if turned else queries + 2 * groups)
    else:
        kept += queries + 2 * groups + (2 * queries if turned else 0)
    kept += (4 if model.swiglu else 2) * model.inner
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
    if model.family == GNMT:
        return found
    for stack in model.stacks():
        if stack.kind == kind:
            found = (6 if stack.context else 4) * stack.tokens * model.hidden
    return found


def crossing(model: ModelConfig, after: int) -> int:
    """That cross a cut behind so many counted blocks."""
    if model.family == GNMT:
        return _crossing_of_recurrent(model, after)
    *before, last = model.stacks()
    encoder = sum(stack.layers for stack in before)
    if before and after <= encoder:
        return model.hidden * before[0].tokens
    return model.hidden * (last.tokens + (last.context if after < encoder + last.layers else 0))


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


def _crossing_of_recurrent(model: ModelConfig, after: int) -> int:
    if after <= model.layers:
        return (2 if after == 1 else 1) * model.hidden * model.sequence_length
    decoded = model.hidden * model.decoder_tokens
    return decoded if after == model.counted else 2 * decoded
