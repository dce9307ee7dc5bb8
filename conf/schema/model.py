"""The model that is trained."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.divisors import divides
from megatron_ext.contract.model import LAYER_NORM, LEARNED, NO_POSITIONS, OPTIONS, RMS_NORM, ROTARY, ModelConfig


class Normalization(StrEnum):
    """Of the inputs of attention, MLP and head."""

    LayerNorm = LAYER_NORM
    RMSNorm = RMS_NORM


class PositionEmbedding(StrEnum):
    """How a model knows where a token stands."""

    learned_absolute = LEARNED
    rope = ROTARY
    """Rotary: queries and keys are turned by an angle."""
    none = NO_POSITIONS


@config
class Model:
    """A decoder that predicts the next token. Its options have Megatron-LM's names, and begin as GPT-2's."""

    name: str = MISSING
    layers: int = MISSING
    hidden: int = MISSING
    heads: int = MISSING
    sequence_length: int = MISSING
    """Tokens a sample has, and positions the model knows."""
    vocab_size: int = MISSING
    """Tokens of the tokenizer, before padding."""
    vocab_multiple: int = 128
    """The embedding has vocab_size rounded up to a multiple of this times the tensor size, as in Megatron."""
    ffn_hidden: int | None = None
    """Inner width of the MLP; null: 4 times hidden."""
    num_query_groups: int | None = None
    """Heads of keys and values, each shared by several query heads; null: one for each query head."""
    normalization: Normalization = Normalization.LayerNorm
    norm_epsilon: float = 1e-5
    position_embedding_type: PositionEmbedding = PositionEmbedding.learned_absolute
    rotary_base: float = 10000.0
    rope_scaling_factor: float | None = None
    """With rope, how much longer sequences are than those of 8,192 tokens that Llama 3 was first trained with."""
    swiglu: bool = False
    """An MLP with a gate instead of GELU, and so with a third matrix."""
    add_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    """The head has a matrix of its own instead of the word embedding."""
    hidden_dropout: float = 0.0
    """The part of an embedding's, an attention's and an MLP's results that training drops."""
    attention_dropout: float = 0.0
    """The part of the attention's weights that training drops."""

    def __post_init__(self) -> None:
        ranges.check("model", self)
        divides("model.heads", self.heads, "model.hidden", self.hidden)
        if self.num_query_groups is not None:
            divides("model.num_query_groups", self.num_query_groups, "model.heads", self.heads)
        _check_positions(self)

    def padded_vocab(self, tensor: int) -> int:
        multiple = self.vocab_multiple * tensor
        return -(-self.vocab_size // multiple) * multiple

    def sized(self, tensor: int) -> ModelConfig:
        """What the engine is given, with the vocabulary padded for this tensor size."""
        options: dict[str, Any] = {key: getattr(self, key) for key in OPTIONS}
        options.update({key: str(value) for key, value in options.items() if isinstance(value, StrEnum)})
        return ModelConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            sequence_length=self.sequence_length,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab(tensor),
            **options,
        )

    def parameters(self) -> int:
        """Weights of the model without vocabulary padding; a tied embedding counts once."""
        return self.sized(1).parameters()


def _check_positions(model: Model) -> None:
    rotary = model.position_embedding_type is PositionEmbedding.rope
    width = model.hidden // model.heads
    if rotary and width % 2:
        raise ConfigError(
            f"model.hidden={model.hidden} and model.heads={model.heads} give heads of width {width}, but "
            "model.position_embedding_type=rope turns pairs of numbers; choose sizes whose ratio is even"
        )
    if model.rope_scaling_factor is not None and not rotary:
        raise ConfigError(
            f"model.rope_scaling_factor={model.rope_scaling_factor} is only for model.position_embedding_type=rope, "
            f"not for {model.position_embedding_type}; use null, or rope"
        )
