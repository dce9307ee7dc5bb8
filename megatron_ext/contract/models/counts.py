"""What a model's blocks have, keep, give to each other and compute: parameters, activations, wires and operations."""

from __future__ import annotations

from typing import Dict, List

from megatron_ext.contract.models.images import image_operations, image_parameters
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Wire


def block_parameters(model: ModelConfig, kind: str) -> Parameters:
    """The parameters of a block of one of `all_kinds`, by name; none of a family whose blocks are measured."""
    return model.traits.parameters(model, kind)


def block_numel(model: ModelConfig, kind: str, tensor: int) -> int:
    """Parameters of a rank's share of a block, in a tensor group of this size."""
    return sum(parameter.numel(tensor) for parameter in block_parameters(model, kind).values())


def tied_parameters(model: ModelConfig) -> Dict[str, str]:
    """Parameters that are equal to others: by the copy's name in the whole model, that of the owner."""
    return model.traits.tied(model)


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, without the vocabulary's padding; a tied one counts once."""
    copies = tied_parameters(model)
    return image_parameters(model) + sum(
        count * parameter.unpadded()
        for kind, count in model.all_kinds()
        for name, parameter in block_parameters(model, kind).items()
        if f"{kind}.{name}" not in copies
    )


def checkpoint_parameter(model: ModelConfig, part: str, name: str) -> Parameter:
    """A parameter of a part of a checkpoint of gpt: `embedding`, `head` or a layer's."""
    return block_parameters(model, part if part in ("embedding", "head") else "layer")[name]


def inside_activations(model: ModelConfig, kind: str, fused: bool = False) -> int:
    """Numbers of a sample that a layer keeps until the backward pass, and that a tensor group shares out; `fused`: on a
    GPU, where SwiGLU is one kernel."""
    return model.traits.inside_activations(model, kind, fused)


def outside_activations(model: ModelConfig, kind: str) -> int:
    """Numbers of a sample that a layer keeps and that every rank of a tensor group has whole."""
    return model.traits.outside_activations(model, kind)


def kept_of_weights(model: ModelConfig, kind: str) -> int:
    """Numbers that a layer keeps of a micro-batch, whatever its size: weights of which a part is dropped."""
    return model.traits.weights_kept(model, kind)


def wires(model: ModelConfig) -> List[Wire]:
    """What passes between the blocks of a model that a formula describes, in the order of their givers."""
    return model.traits.wires(model)


def crossing(model: ModelConfig, after: int) -> int:
    """Numbers of a sample that cross a cut behind so many counted blocks."""
    return sum(wire.numbers for wire in wires(model) if wire.giver < after <= max(wire.takers))


def operations(model: ModelConfig, kind: str) -> int:
    """Floating-point operations of a block's forward pass for one sample; lookups and norms count nothing."""
    return model.traits.operations(model, kind)


def core_operations(model: ModelConfig, kind: str) -> int:
    """Of these, those of attention's scores and of their product with the values."""
    return model.traits.attention_operations(model, kind)


def flops_per_sample(model: ModelConfig) -> float:
    """Operations of forward and backward pass for one sample, without recomputation: three times the forward pass's.

    Of a user's module nobody knows them: 0.
    """
    forward = image_operations(model) + sum(count * operations(model, kind) for kind, count in model.all_kinds())
    return 3.0 * forward


def flops_per_token(model: ModelConfig) -> float:
    """The same for one of the sample's tokens, of encoder and decoder together; 0 where there are none."""
    return flops_per_sample(model) / model.tokens if model.tokens else 0.0
