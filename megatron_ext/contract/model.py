"""A model's sizes and options, and what follows from them: its parameters, how they are cut, its operations."""

from __future__ import annotations

import math
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


class Parameter(NamedTuple):
    """A parameter of the whole model."""

    shape: Tuple[int, ...]
    cut: Optional[int] = None
    """The dimension that a tensor group shares out; None: every rank has all of it."""
    pieces: Tuple[int, ...] = (1,)
    """Relative lengths of the pieces along `cut` that are each shared out."""
    rows: Optional[int] = None
    """How many rows count, if the others only pad it; None: all do."""

    def numel(self, tensor: int) -> int:
        """Of a rank's share in a tensor group of this size."""
        return math.prod(self.shape) // (1 if self.cut is None else tensor)

    def unpadded(self) -> int:
        """Of the rows that count."""
        return math.prod(self.shape[1:]) * (self.shape[0] if self.rows is None else self.rows)


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

    def block(self, kind: str) -> Dict[str, Parameter]:
        """The parameters of a block, by name: of one of the kinds that `all_kinds` says."""
        if self.family == MODULE:
            return {}
        word = Parameter((self.padded_vocab_size, self.hidden), 0, rows=self.vocab_size)
        if kind in ("embedding", "decoder_embedding"):
            return {"word": word, **self._added_embeddings()}
        if kind == "encoder_norm":
            return self._norm("norm")
        if kind == "head":
            return {**self._norm("norm"), **self._before_logits(), "word": word, **self._beside_logits()}
        stack = next(stack for stack in self.stacks() if stack.kind == kind)
        return {
            **self._norm("attention_norm"),
            **self._attention(),
            **(self._cross_attention() if stack.context else {}),
            **self._norm("mlp_norm"),
            **self._mlp(),
        }

    def tied(self) -> Dict[str, str]:
        """Parameters that are equal to others: by the copy's name in the whole model, that of the owner."""
        copies = {} if self.untie_embeddings_and_output_weights else {"head.word": "embedding.word"}
        if self.family == T5:
            copies.update({f"decoder_embedding.{name}": f"embedding.{name}" for name in self.block("embedding")})
        return copies

    def parameter(self, part: str, name: str) -> Parameter:
        """One of a part of a checkpoint of gpt: `embedding`, `head` or a layer's."""
        return self.block(part if part in ("embedding", "head") else "layer")[name]

    def parameters(self) -> int:
        """Of the whole model, without the vocabulary's padding; a tied one counts once."""
        copies = self.tied()
        return sum(
            count * parameter.unpadded()
            for kind, count in self.all_kinds()
            for name, parameter in self.block(kind).items()
            if f"{kind}.{name}" not in copies
        )

    def numel(self, kind: str, tensor: int) -> int:
        """Parameters of a rank's share of a block, in a tensor group of this size."""
        return sum(parameter.numel(tensor) for parameter in self.block(kind).values())

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

    def flops_per_sample(self) -> float:
        """Floating-point operations of forward and backward pass for one sample, without recomputation.

        Narayanan et al. 2021, section 5.1, with 3 passes' worth of operations instead of 4: two for each weight of a
        matrix, and the products of queries, keys and values.
        """
        return 3.0 * sum(count * self.operations(kind) for kind, count in self.all_kinds())

    def flops_per_token(self) -> float:
        """The same for one of the sample's tokens, of encoder and decoder together; 0 where there are none."""
        return self.flops_per_sample() / self.tokens if self.tokens else 0.0

    def operations(self, kind: str) -> int:
        """Floating-point operations of a block's forward pass for one sample; lookups and norms count nothing."""
        if kind == "head":
            matrices = self._matrices(self._before_logits()) * self.predicting
            pooled = sum(math.prod(one.shape) for one in self._beside_logits().values() if len(one.shape) > 1)
            return 2 * (matrices + self.predicting * self.hidden * self.vocab_size + pooled)
        for stack in self.stacks():
            if stack.kind == kind:
                cross = self._cross_attention() if stack.context else {}
                own = {name: one for name, one in cross.items() if not name.startswith("cross_kv.")}
                context = {name: one for name, one in cross.items() if name.startswith("cross_kv.")}
                each = self._matrices({**self._attention(), **own, **self._mlp()})
                products = stack.tokens * each + stack.context * self._matrices(context)
                return 2 * products + self.core_operations(kind)
        return 0

    def core_operations(self, kind: str) -> int:
        """Of these, attention's cores: scores, and their product with the values."""
        width = self.heads * self.head_width
        return sum(
            4 * stack.tokens * (stack.tokens + stack.context) * width for stack in self.stacks() if stack.kind == kind
        )

    def inside_activations(self, kind: str) -> int:
        """Numbers that a layer keeps of a sample until the backward pass and that a tensor group shares out.

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
        kept += (4 if self.swiglu else 2) * self.inner
        found = 0
        for stack in self.stacks():
            if stack.kind == kind:
                cross = 2 * queries * (stack.tokens + stack.context) if repeated else 0
                cross = cross or 2 * (queries * stack.tokens + groups * stack.context)
                found = stack.tokens * kept + (cross if stack.context else 0)
        return found

    def outside_activations(self, kind: str) -> int:
        """Numbers that a layer keeps of a sample and that every rank of a tensor group has whole.

        The inputs of its norms, and of the linear layers after them; with sequence parallelism the group shares out
        the former. What a decoder attends to is a wire, kept once for all layers of a stage.
        """
        found = 0
        for stack in self.stacks():
            if stack.kind == kind:
                found = (6 if stack.context else 4) * stack.tokens * self.hidden
        return found

    def crossing(self, after: int) -> int:
        """Numbers of a sample that cross a cut behind so many counted blocks."""
        *before, last = self.stacks()
        encoder = sum(stack.layers for stack in before)
        if before and after <= encoder:
            return self.hidden * before[0].tokens
        return self.hidden * (last.tokens + (last.context if after < encoder + last.layers else 0))

    def _matrices(self, parameters: Dict[str, Parameter]) -> int:
        """Numbers of those that are matrices."""
        return sum(math.prod(one.shape) for one in parameters.values() if len(one.shape) > 1)

    def _added_embeddings(self) -> Dict[str, Parameter]:
        """What is added to the words."""
        found = {}
        if self.position_embedding_type == LEARNED:
            found["position"] = Parameter((self.positions, self.hidden))
        if self.family == BERT and self.bert_binary_head:
            found["types"] = Parameter((TOKEN_TYPES, self.hidden))
        return found

    def _before_logits(self) -> Dict[str, Parameter]:
        """Between the final norm and the logits."""
        if self.family != BERT:
            return {}
        dense = {"dense.weight": Parameter((self.hidden, self.hidden)), "dense.bias": Parameter((self.hidden,))}
        return {**dense, **self._norm("dense_norm")}

    def _beside_logits(self) -> Dict[str, Parameter]:
        """The logits' bias, and the binary head."""
        found = {}
        if self.family == BERT or (self.family == T5 and not self.untie_embeddings_and_output_weights):
            found["bias"] = Parameter((self.padded_vocab_size,), 0, rows=self.vocab_size)
        if self.family == BERT and self.bert_binary_head:
            found["pooler.weight"] = Parameter((self.hidden, self.hidden))
            found["pooler.bias"] = Parameter((self.hidden,))
            found["binary.weight"] = Parameter((2, self.hidden))
            found["binary.bias"] = Parameter((2,))
        return found

    def _norm(self, name: str) -> Dict[str, Parameter]:
        kinds = ("weight", "bias") if self.normalization == LAYER_NORM else ("weight",)
        return {f"{name}.{kind}": Parameter((self.hidden,)) for kind in kinds}

    def _attention(self) -> Dict[str, Parameter]:
        width = (self.heads + 2 * self.query_groups) * self.head_width
        pieces = (1, 1, 1) if self.query_groups == self.heads else (self.heads, self.query_groups, self.query_groups)
        return {
            **self._linear("qkv", Parameter((width, self.hidden), 0, pieces)),
            **self._linear("attention_out", Parameter((self.hidden, self.heads * self.head_width), 1)),
        }

    def _cross_attention(self) -> Dict[str, Parameter]:
        width, groups = self.heads * self.head_width, self.query_groups * self.head_width
        return {
            **self._norm("cross_norm"),
            **self._linear("cross_query", Parameter((width, self.hidden), 0)),
            **self._linear("cross_kv", Parameter((2 * groups, self.hidden), 0, (1, 1))),
            **self._linear("cross_out", Parameter((self.hidden, width), 1)),
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
