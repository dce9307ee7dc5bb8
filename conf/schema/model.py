"""The model that is trained."""

from __future__ import annotations

from omegaconf import MISSING

from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.divisors import divides


@config
class Model:
    """A GPT-2 family model."""

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

    def __post_init__(self) -> None:
        ranges.check("model", self)
        divides("model.heads", self.heads, "model.hidden", self.hidden)

    def padded_vocab(self, tensor: int) -> int:
        multiple = self.vocab_multiple * tensor
        return -(-self.vocab_size // multiple) * multiple

    def parameters(self) -> int:
        """Weights of the model without vocabulary padding; the tied embedding counts once."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return (self.vocab_size + self.sequence_length) * self.hidden + self.layers * layer + 2 * self.hidden
