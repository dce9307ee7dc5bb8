"""A model's sizes and options, and what follows from them: its parameters, how they are cut, its operations."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Dict, NamedTuple, Optional, Tuple

LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"
LEARNED, ROTARY, NO_POSITIONS = "learned_absolute", "rope", "none"


class Parameter(NamedTuple):
    """A parameter of the whole model."""

    shape: Tuple[int, ...]
    cut: Optional[int] = None
    """The dimension that a tensor group shares out; None: every rank has all of it."""
    pieces: Tuple[int, ...] = (1,)
    """Relative lengths of the pieces along `cut` that are each shared out."""

    def numel(self, tensor: int) -> int:
        """Of a rank's share in a tensor group of this size."""
        return math.prod(self.shape) // (1 if self.cut is None else tensor)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder that predicts the next token. The options are Megatron-LM's, and begin as GPT-2's."""

    layers: int
    hidden: int
    heads: int
    sequence_length: int
    vocab_size: int
    padded_vocab_size: int
    ffn_hidden: Optional[int] = None
    """Inner width of the MLP; None: 4 times the hidden size."""
    num_query_groups: Optional[int] = None
    """Heads of keys and values, each shared by as many query heads; None: one for each (Ainslie et al. 2023)."""
    normalization: str = LAYER_NORM
    norm_epsilon: float = 1e-5
    position_embedding_type: str = LEARNED
    rotary_base: float = 10000.0
    rope_scaling_factor: Optional[float] = None
    """How much longer sequences are than those of 8,192 tokens that Llama 3 was first trained with."""
    swiglu: bool = False
    """An MLP with a gate (Shazeer 2020) instead of GELU."""
    add_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.0
    """The part of an embedding's, an attention's and an MLP's results that training drops."""
    attention_dropout: float = 0.0
    """The part of the attention's weights that training drops."""

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def query_groups(self) -> int:
        return self.heads if self.num_query_groups is None else self.num_query_groups

    @property
    def inner(self) -> int:
        """Width of the MLP inside."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    def block(self, kind: str) -> Dict[str, Parameter]:
        """The parameters of a block, by name: of the `embedding`, a `layer`, or the `head`."""
        word = Parameter((self.padded_vocab_size, self.hidden), 0)
        if kind == "embedding":
            learned = self.position_embedding_type == LEARNED
            return {"word": word, **({"position": Parameter((self.sequence_length, self.hidden))} if learned else {})}
        if kind == "head":
            return {**self._norm("norm"), "word": word}
        return {**self._norm("attention_norm"), **self._attention(), **self._norm("mlp_norm"), **self._mlp()}

    def parameter(self, part: str, name: str) -> Parameter:
        """One of a part of a checkpoint: `embedding`, `head` or a layer's."""
        return self.block(part if part in ("embedding", "head") else "layer")[name]

    def parameters(self) -> int:
        """Of the whole model, without the vocabulary's padding; a tied embedding counts once."""
        unpadded = (self.padded_vocab_size - self.vocab_size) * self.hidden
        words = 2 if self.untie_embeddings_and_output_weights else 1
        embedding, layer, head = (self.numel(kind, 1) for kind in ("embedding", "layer", "head"))
        tied = (2 - words) * self.padded_vocab_size * self.hidden
        return embedding + self.layers * layer + head - tied - words * unpadded

    def numel(self, kind: str, tensor: int) -> int:
        """Parameters of a rank's share of a block, in a tensor group of this size."""
        return sum(parameter.numel(tensor) for parameter in self.block(kind).values())

    def identity(self) -> Dict[str, object]:
        """What two runs must have in common to train the same model: its sizes, and options other than GPT-2's.

        Not its dropout: training may go on with another one.
        """
        sizes = {key: getattr(self, key) for key in ("layers", "hidden", "heads", "sequence_length", "vocab_size")}
        return {**sizes, **{key: value for key, value in self.own_options().items() if not key.endswith("_dropout")}}

    def own_options(self) -> Dict[str, object]:
        """Options other than GPT-2's."""
        options = {key: getattr(self, key) for key in OPTIONS}
        options["num_query_groups"] = self.query_groups if self.query_groups != self.heads else None
        options["ffn_hidden"] = self.inner if self.inner != 4 * self.hidden else None
        return {key: value for key, value in options.items() if value != OPTIONS[key]}

    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward pass for one token, without recomputation.

        Narayanan et al. 2021, section 5.1, with 3 passes' worth of operations instead of 4: two for each weight of a
        matrix, and the products of queries, keys and values.
        """
        return 3.0 * (self.layers * self.layer_operations() + 2 * self.hidden * self.vocab_size)

    def layer_operations(self) -> int:
        """Floating-point operations of a layer's forward pass for one token."""
        matrices = sum(one.numel(1) for one in self.block("layer").values() if len(one.shape) > 1)
        return 2 * matrices + self.core_operations()

    def core_operations(self) -> int:
        """Of the attention's core alone: scores, and their product with the values."""
        return 4 * self.sequence_length * self.hidden

    def inside_activations(self) -> int:
        """Numbers that a layer's attention and MLP keep of a token until the backward pass, of all heads together.

        Queries, keys and values, and turned or repeated ones beside or instead of them; the attention's result; the
        MLP's inner tensors before and after GELU, or gate, its SiLU, the other half, and their product.
        """
        queries, groups = self.heads * self.head_width, self.query_groups * self.head_width
        repeated, turned = groups < queries, self.position_embedding_type == ROTARY
        kept = queries  # the result
        if repeated:
            kept += 2 * queries + (queries if turned else queries + 2 * groups)
        else:
            kept += queries + 2 * groups + (2 * queries if turned else 0)
        return kept + (4 if self.swiglu else 2) * self.inner

    def _norm(self, name: str) -> Dict[str, Parameter]:
        kinds = ("weight", "bias") if self.normalization == LAYER_NORM else ("weight",)
        return {f"{name}.{kind}": Parameter((self.hidden,)) for kind in kinds}

    def _attention(self) -> Dict[str, Parameter]:
        width = (self.heads + 2 * self.query_groups) * self.head_width
        pieces = (1, 1, 1) if self.query_groups == self.heads else (self.heads, self.query_groups, self.query_groups)
        return {
            **self._linear("qkv", Parameter((width, self.hidden), 0, pieces)),
            **self._linear("attention_out", Parameter((self.hidden, self.hidden), 1)),
        }

    def _mlp(self) -> Dict[str, Parameter]:
        pieces = (1, 1) if self.swiglu else (1,)
        return {
            **self._linear("mlp_in", Parameter((len(pieces) * self.inner, self.hidden), 0, pieces)),
            **self._linear("mlp_out", Parameter((self.hidden, self.inner), 1)),
        }

    def _linear(self, name: str, weight: Parameter) -> Dict[str, Parameter]:
        """A bias is cut as the outputs are; one of outputs that are summed is whole."""
        bias = Parameter(weight.shape[:1], *((0, weight.pieces) if weight.cut == 0 else ()))
        return {f"{name}.weight": weight, **({f"{name}.bias": bias} if self.add_bias_linear else {})}


OPTIONS = {field.name: field.default for field in fields(ModelConfig) if field.default is not MISSING}
"""As they are for GPT-2."""
