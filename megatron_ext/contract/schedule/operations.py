"""Floating-point operations of a model's blocks; lookups and norms count nothing."""

from __future__ import annotations

from typing import Dict

from megatron_ext.contract.models.images import image_operations
from megatron_ext.contract.models.model import GNMT, IMAGES, MODULE, S2VT, WITHOUT_ATTENTION, ModelConfig
from megatron_ext.contract.models.parameters import Parameter, block_parameters

ONCE = ("pooler.", "binary.")
"""Parameters of the head that work on one token of a sample."""
OF_CONTEXT = ("cross_kv.", "memory.")
"""Parameters of a decoder's layer that work on the tokens it attends to."""


def flops_per_sample(model: ModelConfig) -> float:
    """Of forward and backward pass for one sample, without recomputation.

    Narayanan et al. 2021, section 5.1, with 3 passes' worth of operations instead of 4: two for each weight of a
    matrix, and the products of queries, keys and values. Of a user's module nobody knows them: 0.
    """
    if model.family == MODULE:
        return 0.0
    if model.family in IMAGES:
        return 3.0 * image_operations(model)
    return 3.0 * sum(count * operations(model, kind) for kind, count in model.all_kinds())


def flops_per_token(model: ModelConfig) -> float:
    """The same for one of the sample's tokens, of encoder and decoder together; 0 where there are none."""
    return flops_per_sample(model) / model.tokens if model.tokens else 0.0


def operations(model: ModelConfig, kind: str) -> int:
    """Of a block's forward pass for one sample."""
    if kind == "head":
        once = {name: one for name, one in block_parameters(model, kind).items() if name.startswith(ONCE)}
        each = {name: one for name, one in block_parameters(model, kind).items() if name not in once}
        return 2 * (model.predicting * _matrices(each) + _matrices(once))
    if model.family == S2VT and kind == "embedding":
        return 2 * model.sequence_length * _matrices(block_parameters(model, kind))
    for stack in model.stacks():
        if stack.kind == kind:
            parameters = block_parameters(model, kind)
            context = {name: one for name, one in parameters.items() if name.startswith(OF_CONTEXT)}
            own = {name: one for name, one in parameters.items() if name not in context}
            products = stack.tokens * _matrices(own) + stack.context * _matrices(context)
            return 2 * products + core_operations(model, kind)
    return 0


def core_operations(model: ModelConfig, kind: str) -> int:
    """Of these, attention's cores: scores, and their product with the values.

    In gnmt only the first layer of the decoder has one; additive scores take as many operations as products.
    """
    if model.family in WITHOUT_ATTENTION:
        return 0
    width = model.heads * model.head_width
    if model.family == GNMT:
        return sum(4 * stack.tokens * stack.context * width for stack in model.stacks() if stack.kind == kind)
    return sum(
        4 * stack.tokens * (stack.tokens + stack.context) * width for stack in model.stacks() if stack.kind == kind
    )


def _matrices(parameters: Dict[str, Parameter]) -> int:
    """Numbers of those that are matrices, without the vocabulary's padding."""
    return sum(one.unpadded() for one in parameters.values() if len(one.shape) > 1)
