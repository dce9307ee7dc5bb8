"""What a model's blocks have, keep, give to each other and compute: parameters, activations, wires and operations."""

from __future__ import annotations

from typing import Optional

from megatron_ext.contract.models.images import image_operations, image_parameters
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameter

BALANCE = 0.01
"""Factor of the loss by which a router learns to use all experts alike (Fedus et al. 2021)."""


def block_numel(model: ModelConfig, kind: str, tensor: int) -> int:
    """Parameters of a rank's share of a block, in a tensor group of this size."""
    return sum(parameter.numel(tensor) for parameter in model.traits.parameters(model, kind).values())


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, without the vocabulary's padding; a tied one counts once."""
    copies = model.traits.tied(model)
    return image_parameters(model) + sum(
        count * parameter.unpadded()
        for kind, count in model.all_kinds()
        for name, parameter in model.traits.parameters(model, kind).items()
        if f"{kind}.{name}" not in copies
    )


def checkpoint_parameter(model: ModelConfig, part: str, name: str) -> Parameter:
    """A parameter of a part of a checkpoint of gpt: `embedding`, `head` or a layer's."""
    return model.traits.parameters(model, part if part in ("embedding", "head") else "layer")[name]


def experts_of(model: object) -> Optional[int]:
    """Return how many experts each layer of a model of any family has; None without a router."""
    return getattr(model, "experts", None)


def crossing(model: ModelConfig, after: int) -> int:
    """Numbers of a sample that cross a cut behind so many counted blocks."""
    return sum(wire.numbers for wire in model.traits.wires(model) if wire.giver < after <= max(wire.takers))


def flops_per_sample(model: ModelConfig) -> float:
    """Operations of forward and backward pass for one sample, without recomputation: three times the forward pass's.

    Of a user's module nobody knows them: 0.
    """
    forward = image_operations(model) + sum(
        count * model.traits.operations(model, kind) for kind, count in model.all_kinds()
    )
    return 3.0 * forward
