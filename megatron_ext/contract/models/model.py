"""A model's sizes and options, and the rows of layers that follow from them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Dict, List, Optional, Tuple

from megatron_ext.contract.models.stacks import Stack, awd_lm_stacks, gnmt_stacks, s2vt_stacks

GPT, BERT, T5, MODULE = "gpt", "bert", "t5", "module"
TRANSFORMER, GNMT = "transformer", "gnmt"
TRANSLATION = (TRANSFORMER, GNMT)
"""Families that learn from pairs of sentences."""
S2VT = "s2vt"
PAIRED = (T5, *TRANSLATION, S2VT)
"""Those of an encoder, and of a decoder that takes its result."""
AWD_LM = "awd_lm"
RECURRENT = (GNMT, AWD_LM, S2VT)
"""Families of LSTMs."""
WITHOUT_ATTENTION = (AWD_LM, S2VT)
CAPTIONS = (S2VT,)
"""Families that learn to describe videos."""
NEXT_TOKEN = (GPT, AWD_LM)
"""Families that learn the next token of running text."""
VIT, T2T_VIT, RESNET, VGG, ALEXNET = "vit", "t2t_vit", "resnet", "vgg", "alexnet"
IMAGES = (VIT, T2T_VIT, RESNET, VGG, ALEXNET)
"""Families that learn the classes of images."""
ALL_COUNTED = (MODULE, RESNET, VGG, ALEXNET)
"""Families of whose blocks a partition counts every one."""
MEASURED = (MODULE, *IMAGES)
"""Families of which no formula says what a block takes: a profile has its blocks. Nothing cuts these over a tensor
group."""
LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"
LEARNED, ROTARY, NO_POSITIONS, SINUSOIDAL = "learned_absolute", "rope", "none", "sinusoidal"

ONLY_OF = {
    "bert_binary_head": (BERT,),
    **dict.fromkeys(("decoder_layers", "decoder_sequence_length"), PAIRED),
    "label_smoothing": (*TRANSLATION, S2VT, *IMAGES),
    **dict.fromkeys(("code", "code_digest", "capture"), (MODULE,)),
    **dict.fromkeys(("image_size", "channels", "classes"), IMAGES),
    **dict.fromkeys(("patch_size", "class_token"), (VIT,)),
    "drop_path": (VIT, T2T_VIT),
    "width": (T2T_VIT, RESNET, VGG, ALEXNET),
    "depths": (RESNET, VGG),
    **dict.fromkeys(
        (
            *("num_query_groups", "kv_channels", "normalization", "rotary_base"),
            *("rope_scaling_factor", "swiglu", "add_bias_linear"),
        ),
        (GPT, BERT, T5, *TRANSLATION),
    ),
    "position_embedding_type": (GPT, BERT, T5, *TRANSLATION, AWD_LM, S2VT),
    "untie_embeddings_and_output_weights": (GPT, BERT, T5, *TRANSLATION, AWD_LM),
    "attention_dropout": (GPT, BERT, T5, *TRANSLATION, VIT, T2T_VIT),
    "ffn_hidden": (GPT, BERT, T5, *TRANSLATION, VIT, T2T_VIT, VGG, ALEXNET),
    "hidden_dropout": (GPT, BERT, T5, *TRANSLATION, AWD_LM, S2VT, VIT, T2T_VIT, VGG, ALEXNET),
    "embedding_width": (AWD_LM, S2VT),
    **dict.fromkeys(("embedding_dropout", "input_dropout", "output_dropout", "weight_dropout"), (AWD_LM,)),
    "features": (S2VT,),
}
"""Options that other families do not have, and those that do."""
OF_TRANSFORMERS = (
    *("ffn_hidden", "num_query_groups", "kv_channels", "normalization", "norm_epsilon", "swiglu", "add_bias_linear"),
    "attention_dropout",
)
"""Options that families of LSTMs do not have."""
POSITIONS_OF = {TRANSFORMER: (SINUSOIDAL,), **dict.fromkeys(RECURRENT, (NO_POSITIONS,))}
"""The position embeddings of a family; of others `POSITIONS`."""
POSITIONS = (LEARNED, ROTARY, NO_POSITIONS)
OF_TRAINING = (
    *("hidden_dropout", "attention_dropout", "drop_path", "label_smoothing"),
    *("embedding_dropout", "input_dropout", "output_dropout", "weight_dropout"),
)
"""Options that training may change on the way."""
SIZES = ("hidden", "heads", "sequence_length", "vocab_size", "padded_vocab_size")
"""Of a transformer over tokens. A family that lacks some of them (`lacking`) has 0 there, and none in a plan."""
DEPTHS = r"[1-9][0-9]{0,3}(-[1-9][0-9]{0,3}){0,4}"
"""A regular expression for `depths`: of one to five stages."""
TOKEN_TYPES = 2
"""Of BERT with a binary head: which of two sentences a token belongs to."""


def lacking(family: str) -> Tuple[str, ...]:
    """The sizes that a family does not have."""
    if family in ALL_COUNTED:
        return SIZES
    return ("sequence_length", "vocab_size", "padded_vocab_size") if family in IMAGES else ()


def needed(family: str) -> Tuple[str, ...]:
    """The options that a family cannot do without."""
    found = ["image_size", "classes"] if family in IMAGES else ["features"] if family == S2VT else []
    found += ["patch_size"] if family == VIT else []
    found += ["depths"] if family in (RESNET, VGG) else []
    return (*found, "ffn_hidden") if family in (VGG, ALEXNET) else tuple(found)


@dataclass(frozen=True)
class ModelConfig:
    """A transformer of one of the families. The options are Megatron-LM's, and begin as GPT-2's.

    gpt: a decoder that predicts the next token. bert: an encoder that predicts masked tokens and, with a binary head,
    whether two sentences follow each other. t5: an encoder, and a decoder that attends to its result. transformer and
    gnmt: the same for translation, of attention or of LSTMs. awd_lm: LSTMs that predict the next token. s2vt: LSTMs
    that describe videos. vit, t2t_vit, resnet, vgg, alexnet: classes of images (`megatron_ext.contract.models.images`).
    module: what a user's file defines, of which only the number of blocks is known here.
    """

    layers: int
    """With a decoder, the encoder's; where all blocks are counted, their number."""
    hidden: int
    heads: int
    """Of gnmt 1: its attention has one. Of awd_lm and s2vt 1: they have no attention."""
    sequence_length: int
    """With a decoder, the encoder's. Of s2vt, the frames of a video that it sees."""
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
    """Of families with a decoder; None: as many as the encoder has."""
    decoder_sequence_length: Optional[int] = None
    """Of families with a decoder; None: the encoder's."""
    label_smoothing: float = 0.0
    """Of translation and images: the part of a label's probability that is shared out to all words or classes."""
    code: Optional[str] = None
    """Of a module: `FILE.py:NAME`, the file's path being absolute."""
    code_digest: Optional[str] = None
    """SHA-256 of the file when the run was launched."""
    capture: bool = False
    """Of a module: whether torch.fx cuts it into blocks."""
    image_size: Optional[int] = None
    """Of images: pixels of a side."""
    channels: int = 3
    """Of images."""
    classes: Optional[int] = None
    """Of images."""
    patch_size: Optional[int] = None
    """Of vit: pixels of a patch's side."""
    class_token: bool = True
    """Of vit: the head sees a token of its own; else the mean of all."""
    drop_path: float = 0.0
    """Of vit and t2t_vit: how often a sample skips the last layer's attention or MLP; earlier layers in proportion."""
    width: int = 64
    """Of resnet, vgg and alexnet: channels of the first convolution; of t2t_vit: of tokens while they are joined."""
    depths: Optional[str] = None
    """Of resnet and vgg: blocks of each stage, `3-4-6-3`."""
    embedding_width: Optional[int] = None
    """Of awd_lm and s2vt: width of a word's vector, and of a frame's; None: hidden."""
    embedding_dropout: float = 0.0
    """Of awd_lm: the part of the vocabulary whose vectors are 0 throughout a sample."""
    input_dropout: float = 0.0
    """Of awd_lm: as hidden_dropout, of what goes into the first layer."""
    output_dropout: float = 0.0
    """Of awd_lm: as hidden_dropout, of what leaves the last layer."""
    weight_dropout: float = 0.0
    """Of awd_lm: the part of the weights between an LSTM's steps that is 0 throughout a micro-batch."""
    features: Optional[int] = None
    """Of s2vt: numbers that describe a frame."""

    @property
    def word_width(self) -> int:
        """Of a word's vector."""
        return self.hidden if self.embedding_width is None else self.embedding_width

    @property
    def head_inputs(self) -> int:
        """Width of what the head takes: where its matrix is the embedding, that of a word's vector."""
        tied = self.family == AWD_LM and not self.untie_embeddings_and_output_weights
        return self.word_width if tied else self.hidden

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
    def attention_bias(self) -> bool:
        """Whether the linear layers of an attention have biases; those of a transformer have none."""
        return self.add_bias_linear and self.family != TRANSFORMER

    @property
    def decoder_tokens(self) -> int:
        """Of a sample, that the decoder takes; 0 for families without one."""
        if self.family not in PAIRED:
            return 0
        return self.sequence_length if self.decoder_sequence_length is None else self.decoder_sequence_length

    @property
    def decoder_count(self) -> int:
        """Layers of the decoder; 0 for families without one."""
        return sum(stack.layers for stack in self.stacks() if stack.causal) if self.family in PAIRED else 0

    @property
    def tokens(self) -> int:
        """Of a sample, that the model takes."""
        return self.sequence_length + self.decoder_tokens

    @property
    def predicting(self) -> int:
        """Tokens of a sample for which the head gives logits."""
        return self.decoder_tokens if self.family in PAIRED else self.sequence_length

    @property
    def positions(self) -> int:
        """That the model knows; a decoder shares the encoder's."""
        return max(self.sequence_length, self.decoder_tokens)

    @property
    def counted(self) -> int:
        """Blocks that a partition counts."""
        return sum(stack.layers for stack in self.stacks())

    def stacks(self) -> Tuple[Stack, ...]:
        """The rows of layers, in order."""
        if self.family in ALL_COUNTED:
            return (Stack("block", "blocks", self.layers, 0),)
        if self.family == AWD_LM:
            return awd_lm_stacks(self.layers, self.sequence_length)
        if self.family not in PAIRED:
            return (Stack("layer", "layers", self.layers, self.sequence_length, causal=self.family == GPT),)
        layers = self.layers if self.decoder_layers is None else self.decoder_layers
        if self.family == S2VT:
            return s2vt_stacks(self.layers, layers, self.tokens)
        if self.family == GNMT:
            return gnmt_stacks(self.layers, layers, self.sequence_length, self.decoder_tokens)
        return (
            Stack("encoder", "encoder", self.layers, self.sequence_length),
            Stack("decoder", "decoder", layers, self.decoder_tokens, self.sequence_length, causal=True),
        )

    def kinds(self) -> Tuple[Tuple[str, int], ...]:
        """The blocks that a partition counts, in order: their kinds, and how many."""
        return tuple((stack.kind, stack.layers) for stack in self.stacks())

    def all_kinds(self) -> Tuple[Tuple[str, int], ...]:
        """The kinds of all blocks in order, also of those that no partition counts, and how many."""
        if self.family in ALL_COUNTED:
            return self.kinds()
        if self.family not in PAIRED:
            return (("embedding", 1), *self.kinds(), ("head", 1))
        encoder, decoder = (
            tuple((stack.kind, stack.layers) for stack in self.stacks() if stack.causal is causal)
            for causal in (False, True)
        )
        normed = () if self.family in RECURRENT else (("encoder_norm", 1),)
        return (("embedding", 1), *encoder, *normed, ("decoder_embedding", 1), *decoder, ("head", 1))

    def block_name(self, number: int) -> str:
        """Of a counted block, which are numbered over the whole model: `layers.7`, `decoder.3`."""
        for stack in self.stacks():
            if number < stack.layers:
                return f"{stack.name}.{stack.first + number}"
            number -= stack.layers
        raise IndexError(number)

    def counted_name(self) -> str:
        """What the counted blocks are called together: `layers`, or `blocks` where not all are of one row of them."""
        names = {stack.name for stack in self.stacks()}
        return "blocks" if len(names) > 1 else names.pop()

    def spans(self, numbers: range) -> List[Tuple[Stack, range]]:
        """Neighbours among the counted blocks, by their rows of layers, with the numbers in their names."""
        found, start = [], 0
        for stack in self.stacks():
            held = range(max(numbers.start - start, 0), min(numbers.stop - start, stack.layers))
            if held:
                found.append((stack, range(stack.first + held.start, stack.first + held.stop)))
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

        Not `OF_TRAINING`, in which training may go on differently. Of a user's module, the number of its blocks.
        """
        if self.family == MODULE:
            return {"family": MODULE, "layers": self.layers}
        sizes = {
            key: getattr(self, key)
            for key in ("layers", "hidden", "heads", "sequence_length", "vocab_size")
            if key not in lacking(self.family)
        }
        return {**sizes, **{key: value for key, value in self.own_options().items() if key not in OF_TRAINING}}

    def own_options(self) -> Dict[str, object]:
        """Options other than GPT-2's."""
        options = {key: getattr(self, key) for key in OPTIONS}
        if self.family in ALL_COUNTED:
            return {key: value for key, value in options.items() if value != OPTIONS[key]}
        options["num_query_groups"] = self.query_groups if self.query_groups != self.heads else None
        options["ffn_hidden"] = self.inner if self.inner != 4 * self.hidden else None
        options["kv_channels"] = self.head_width if self.head_width * self.heads != self.hidden else None
        if self.family in PAIRED:
            options.update(decoder_layers=self.decoder_count, decoder_sequence_length=self.decoder_tokens)
        return {key: value for key, value in options.items() if value != OPTIONS[key]}


OPTIONS = {field.name: field.default for field in fields(ModelConfig) if field.default is not MISSING}
"""As they are for GPT-2."""
