"""A model's sizes and options, and the rows of layers that follow from them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Dict, List, NamedTuple, Optional, Tuple

GPT, BERT, T5, MODULE = "gpt", "bert", "t5", "module"
LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"
LEARNED, ROTARY, NO_POSITIONS = "learned_absolute", "rope", "none"

ONLY_OF = {
    "bert_binary_head": (BERT,),
    "decoder_layers": (T5,),
    "decoder_sequence_length": (T5,),
    **dict.fromkeys(("code", "code_digest", "capture"), (MODULE,)),
}
"""Options that other families do not have, and those that do."""
SIZES = ("hidden", "heads", "sequence_length", "vocab_size", "padded_vocab_size")
"""Of a transformer; a user's module has none of them: here 0, and not in a plan."""
TOKEN_TYPES = 2
"""Of BERT with a binary head: which of two sentences a token belongs to."""


class Stack(NamedTuple):
    """Layers of one kind in a row. A partition counts them."""

    kind: str
    name: str
    """The layers are `name.0`, `name.1`, …"""
    layers: int
    tokens: int
    """That pass through it, of a sample."""
    context: int = 0
    """Tokens of another stack's result that its layers attend to, too."""
    causal: bool = False
    """Whether a token attends to itself and those before it alone."""


@dataclass(frozen=True)
class ModelConfig:
    """A transformer of one of the families. The options are Megatron-LM's, and begin as GPT-2's.

    gpt: a decoder that predicts the next token. bert: an encoder that predicts masked tokens and, with a binary head,
    whether two sentences follow each other. t5: an encoder, and a decoder that attends to its result. module: what a
    user's file defines, of which only the number of blocks is known here.
    """

    layers: int
    """Of t5, the encoder's."""
    hidden: int
    heads: int
    sequence_length: int
    """Of t5, the encoder's."""
    vocab_size: int
    padded_vocab_size: int
    family: str = GPT
    ffn_hidden: Optional[int] = None
    """Inner width of the MLP; None: 4 times the hidden size."""
    num_query_groups: Optional[int] = None
    """Heads of keys and values, each shared by as many query heads; None: one for each (Ainslie et al. 2023)."""
    kv_channels: Optional[int] = None
    """Width of a head; None: hidden / heads."""
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
    bert_binary_head: bool = True
    """Of bert: token types, and a head that says whether the second sentence follows the first."""
    decoder_layers: Optional[int] = None
    """Of t5; None: as many as the encoder has."""
    decoder_sequence_length: Optional[int] = None
    """Of t5; None: the encoder's."""
    code: Optional[str] = None
    """Of a module: `FILE.py:NAME`, the file's path being absolute."""
    code_digest: Optional[str] = None
    """SHA-256 of the file when the run was launched."""
    capture: bool = False
    """Of a module: whether torch.fx cuts it into blocks."""

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads if self.kv_channels is None else self.kv_channels

    @property
    def query_groups(self) -> int:
        return self.heads if self.num_query_groups is None else self.num_query_groups

    @property
    def inner(self) -> int:
        """Width of the MLP inside."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def decoder_tokens(self) -> int:
        """Of a sample, that t5's decoder takes; 0 for other families."""
        if self.family != T5:
            return 0
        return self.sequence_length if self.decoder_sequence_length is None else self.decoder_sequence_length

    @property
    def tokens(self) -> int:
        """Of a sample, that the model takes."""
        return self.sequence_length + self.decoder_tokens

    @property
    def predicting(self) -> int:
        """Tokens of a sample for which the head gives logits."""
        return self.decoder_tokens if self.family == T5 else self.sequence_length

    @property
    def positions(self) -> int:
        """That the model knows; t5's decoder shares the encoder's."""
        return max(self.sequence_length, self.decoder_tokens)

    @property
    def counted(self) -> int:
        """Blocks that a partition counts."""
        return sum(stack.layers for stack in self.stacks())

    def stacks(self) -> Tuple[Stack, ...]:
        """The rows of layers, in order."""
        if self.family == MODULE:
            return (Stack("block", "blocks", self.layers, 0),)
        if self.family != T5:
            return (Stack("layer", "layers", self.layers, self.sequence_length, causal=self.family == GPT),)
        layers = self.layers if self.decoder_layers is None else self.decoder_layers
        return (
            Stack("encoder", "encoder", self.layers, self.sequence_length),
            Stack("decoder", "decoder", layers, self.decoder_tokens, self.sequence_length, causal=True),
        )

    def kinds(self) -> Tuple[Tuple[str, int], ...]:
        """The blocks that a partition counts, in order: their kinds, and how many."""
        return tuple((stack.kind, stack.layers) for stack in self.stacks())

    def all_kinds(self) -> Tuple[Tuple[str, int], ...]:
        """The kinds of all blocks in order, also of those that no partition counts, and how many."""
        if self.family == MODULE:
            return self.kinds()
        between = (("encoder_norm", 1), ("decoder_embedding", 1)) if self.family == T5 else ()
        first, *others = self.kinds()
        return (("embedding", 1), first, *between, *others, ("head", 1))

    def block_name(self, number: int) -> str:
        """Of a counted block, which are numbered over the whole model: `layers.7`, `decoder.3`."""
        for stack in self.stacks():
            if number < stack.layers:
                return f"{stack.name}.{number}"
            number -= stack.layers
        raise IndexError(number)

    def counted_name(self) -> str:
        """What the counted blocks are called together: `layers`, or `blocks` where not all are of one row of them."""
        first, *others = self.stacks()
        return "blocks" if others else first.name

    def spans(self, numbers: range) -> List[Tuple[Stack, range]]:
        """Neighbours among the counted blocks, by their rows of layers, in which they have these numbers."""
        found, start = [], 0
        for stack in self.stacks():
            held = range(max(numbers.start - start, 0), min(numbers.stop - start, stack.layers))
            if held:
                found.append((stack, held))
            start += stack.layers
        return found

    def before(self, kind: str) -> List[str]:
        """The kinds of the blocks that no partition counts and that the stage of the first one of this kind holds."""
        kinds = [each for each, _ in self.all_kinds()]
        counted = [each for each, _ in self.kinds()]
        place = counted.index(kind)
        return kinds[kinds.index(counted[place - 1]) + 1 : kinds.index(kind)] if place else []

    def identity(self) -> Dict[str, object]:
        """What two runs must have in common to train the same model: its sizes, and options other than GPT-2's.

        Not its dropout: training may go on with another one. Of a user's module, the number of its blocks.
        """
        if self.family == MODULE:
            return {"family": MODULE, "layers": self.layers}
        sizes = {key: getattr(self, key) for key in ("layers", "hidden", "heads", "sequence_length", "vocab_size")}
        return {**sizes, **{key: value for key, value in self.own_options().items() if not key.endswith("_dropout")}}

    def own_options(self) -> Dict[str, object]:
        """Options other than GPT-2's."""
        options = {key: getattr(self, key) for key in OPTIONS}
        if self.family == MODULE:
            return {key: value for key, value in options.items() if value != OPTIONS[key]}
        options["num_query_groups"] = self.query_groups if self.query_groups != self.heads else None
        options["ffn_hidden"] = self.inner if self.inner != 4 * self.hidden else None
        options["kv_channels"] = self.head_width if self.head_width * self.heads != self.hidden else None
        if self.family == T5:
            options.update(decoder_layers=self.stacks()[-1].layers, decoder_sequence_length=self.decoder_tokens)
        return {key: value for key, value in options.items() if value != OPTIONS[key]}


OPTIONS = {field.name: field.default for field in fields(ModelConfig) if field.default is not MISSING}
"""As they are for GPT-2."""
