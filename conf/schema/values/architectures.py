"""What a model can be made of: its family, its normalization, its position embedding."""

from __future__ import annotations

from enum import StrEnum

from megatron_ext.contract.models.model import (
    LAYER_NORM,
    LEARNED,
    NO_POSITIONS,
    RMS_NORM,
    ROTARY,
    SINUSOIDAL,
    family_named,
    family_names,
)


class Family(StrEnum):
    """What a model is made of, and what it learns (docs/models.md)."""

    _ignore_ = "name_"
    for name_ in family_names():
        vars()[name_] = name_

    @property
    def summary(self) -> str:
        """A sentence about it."""
        return family_named(self).summary


class Normalization(StrEnum):
    """Of the inputs of attention, MLP and head."""

    LayerNorm = LAYER_NORM
    RMSNorm = RMS_NORM


class PositionEmbedding(StrEnum):
    """How a model knows where a token stands."""

    learned_absolute = LEARNED
    rope = ROTARY
    """Rotary: queries and keys are rotated by an angle."""
    none = NO_POSITIONS
    sinusoidal = SINUSOIDAL
    """For transformer only: sines and cosines, added to embeddings that are scaled by the square root of hidden."""
