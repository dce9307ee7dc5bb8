"""The model that is trained."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.divisors import divides
from megatron_ext.contract.model import (
    BERT,
    GPT,
    LAYER_NORM,
    LEARNED,
    NO_POSITIONS,
    ONLY_OF,
    OPTIONS,
    RMS_NORM,
    ROTARY,
    T5,
    ModelConfig,
)


class Family(StrEnum):
    """What a model is made of, and what it learns (docs/models.md)."""

    gpt = GPT
    """A decoder that predicts the next token; with Llama's options, a Llama."""
    bert = BERT
    """An encoder that predicts masked tokens, and whether two sentences follow each other."""
    t5 = T5
    """An encoder and a decoder, which predicts the spans that were cut out of the encoder's tokens."""


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
    """A transformer. Its options have Megatron-LM's names, and begin as GPT-2's."""

    name: str = MISSING
    family: Family = Family.gpt
    layers: int = MISSING
    """Of t5, the encoder's."""
    hidden: int = MISSING
    heads: int = MISSING
    sequence_length: int = MISSING
    """Tokens a sample has, and positions the model knows; of t5, the encoder's."""
    vocab_size: int = MISSING
    """Tokens of the tokenizer, before padding."""
    vocab_multiple: int = 128
    """The embedding has vocab_size rounded up to a multiple of this times the tensor size, as in Megatron."""
    ffn_hidden: int | None = None
    """Inner width of the MLP; null: 4 times hidden."""
    num_query_groups: int | None = None
    """Heads of keys and values, each shared by several query heads; null: one for each query head."""
    kv_channels: int | None = None
    """Width of a head; null: hidden / heads."""
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
    bert_binary_head: bool = True
    """Of bert: token types, and a head that says whether the second sentence follows the first."""
    decoder_layers: int | None = None
    """Of t5; null: as many as the encoder has."""
    decoder_sequence_length: int | None = None
    """Of t5; null: the encoder's."""

    def __post_init__(self) -> None:
        ranges.check("model", self)
        _check_family(self)
        if self.kv_channels is None:
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

    @property
    def counted(self) -> int:
        """Blocks that a partition counts: the layers, of t5 the encoder's and the decoder's."""
        return self.sized(1).counted

    @property
    def blocks(self) -> str:
        """The keys whose values add up to `counted`, in words."""
        if self.family is not Family.t5:
            return f"model.layers={self.layers}"
        decoder = self.counted - self.layers
        return f"model.layers={self.layers} + model.decoder_layers={decoder} = {self.counted}"

    def parameters(self) -> int:
        """Weights of the model without vocabulary padding; a tied embedding counts once."""
        return self.sized(1).parameters()


def _check_family(model: Model) -> None:
    for key, families in ONLY_OF.items():
        if model.family not in families and getattr(model, key) != OPTIONS[key]:
            whose = " or ".join(f"model.family={family}" for family in families)
            value = "null" if OPTIONS[key] is None else str(OPTIONS[key]).lower()
            raise ConfigError(
                f"model.{key}={str(getattr(model, key)).lower()} is only for {whose}, not for "
                f"model.family={model.family}; leave it out, or use model.{key}={value}"
            )


def _check_positions(model: Model) -> None:
    rotary = model.position_embedding_type is PositionEmbedding.rope
    if rotary and model.kv_channels is not None and model.kv_channels % 2:
        raise ConfigError(
            f"model.kv_channels={model.kv_channels} is odd, but model.position_embedding_type=rope turns pairs of "
            f"numbers; use {model.kv_channels + 1}, or another even number"
        )
    width = model.hidden // model.heads
    if rotary and model.kv_channels is None and width % 2:
        raise ConfigError(
            f"model.hidden={model.hidden} and model.heads={model.heads} give heads of width {width}, but "
            "model.position_embedding_type=rope turns pairs of numbers; choose sizes whose ratio is even"
        )
    if model.rope_scaling_factor is not None and not rotary:
        raise ConfigError(
            f"model.rope_scaling_factor={model.rope_scaling_factor} is only for model.position_embedding_type=rope, "
            f"not for {model.position_embedding_type}; use null, or rope"
        )
