"""A model's sizes and options, and the description of its family, which says what follows from them.

Every folder of `megatron_ext/families` is a family. Its `__init__.py` describes it without torch, as the variable
`FAMILY`; its `task.py` trains it. Nothing else names a family, but for the order of lists: whoever needs to know
something of one asks its description here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Type, TypeVar

from megatron_ext.contract.keys import COUNT, NOT_NEGATIVE, about, left_out
from megatron_ext.contract.models.hf_config import HfConfig
from megatron_ext.contract.models.keys import OF_TRAINING, POSITIONS, Model, Sizes
from megatron_ext.contract.models.pieces import ImageBlock, Parameters, Stack, Wire

T = TypeVar("T")
TEXT, PAIRS, IMAGES, VIDEOS = "text", "pairs", "images", "videos"
"""What a family learns from."""
_ORDER = (
    *("gpt", "bert", "t5", "transformer", "gnmt", "awd_lm", "mamba", "s2vt"),
    *("vit", "t2t_vit", "resnet", "vgg", "alexnet", "huggingface", "module"),
)
"""How lists of families begin; one that is not named here comes last."""
CHATS = "chats"
"""Text that is conversations; for families of running text."""
SIZES = ("hidden", "heads", "sequence_length", "vocab_size", "padded_vocab_size")
"""Sizes of a transformer over tokens. A family that lacks some of them has 0 there, and none in a plan."""
TOKEN_TYPES = 2
"""Token types of BERT with a binary head: which of two sentences a token belongs to."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _PaddedSizes(Sizes):
    """The sizes of a model, and what its vocabulary is padded to."""

    padded_vocab_size: int = field(metadata=about(COUNT))


@dataclass(frozen=True)
class ModelConfig(Model, _PaddedSizes):
    """What a plan says of a model: the keys with what a launch has found."""

    layers: int = field(metadata=about(NOT_NEGATIVE))
    code_digest: Optional[str] = None
    """SHA-256 of the file of `code` or `config` when the run was launched."""

    @property
    def traits(self) -> Family:
        """The description of its family."""
        return family_named(self.family)

    @property
    def word_width(self) -> int:
        """Width of a word's vector."""
        return self.hidden if self.embedding_width is None else self.embedding_width

    @property
    def head_inputs(self) -> int:
        """Width of what the head takes."""
        return self.traits.head_inputs(self)

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads if self.kv_channels is None else self.kv_channels

    @property
    def rotated_width(self) -> int:
        """Numbers of a head that rotary positions rotate."""
        return int(self.head_width * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        return self.heads if self.num_query_groups is None else self.num_query_groups

    @property
    def inner(self) -> int:
        """Width of the MLP inside."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def attention_bias(self) -> bool:
        """Whether the linear layers of an attention have biases."""
        return self.add_bias_linear and self.traits.attention_bias

    @property
    def decoder_tokens(self) -> int:
        """Tokens of a sample that the decoder takes; 0 for families without one."""
        if not self.traits.decoder:
            return 0
        return self.sequence_length if self.decoder_sequence_length is None else self.decoder_sequence_length

    @property
    def decoder_count(self) -> int:
        """Layers of the decoder; 0 for families without one."""
        return sum(stack.layers for stack in self.stacks() if stack.causal) if self.traits.decoder else 0

    @property
    def tokens(self) -> int:
        """Tokens of a sample that the model takes."""
        return self.sequence_length + self.decoder_tokens

    @property
    def predicting(self) -> int:
        """Tokens of a sample for which the head gives logits."""
        return self.decoder_tokens if self.traits.decoder else self.sequence_length

    @property
    def positions(self) -> int:
        """Positions that the model knows; a decoder shares the encoder's."""
        return max(self.sequence_length, self.decoder_tokens)

    @property
    def counted(self) -> int:
        """Blocks that a partition counts."""
        return sum(stack.layers for stack in self.stacks())

    def own(self, options: Type[T]) -> T:
        """The options that a family declares by itself: `options` is the class in the `options.py` of its folder."""
        return options(**{key: getattr(self, key) for key in left_out(options)})

    def stacks(self) -> Tuple[Stack, ...]:
        """The rows of layers, in order."""
        return self.traits.stacks(self)

    def kinds(self) -> Tuple[Tuple[str, int], ...]:
        """The blocks that a partition counts, in order: their kinds, and how many."""
        return tuple((stack.kind, stack.layers) for stack in self.stacks())

    def all_kinds(self) -> Tuple[Tuple[str, int], ...]:
        """The kinds of all blocks in order, also of those that no partition counts, and how many."""
        return self.traits.all_kinds(self)

    def block_name(self, number: int) -> str:
        """Name a counted block, which are numbered over the whole model: `layers.7`, `decoder.3`."""
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
        if self.traits.user_code:
            return {"family": self.family, "layers": self.layers}
        sizes = {
            key: getattr(self, key)
            for key in ("layers", "hidden", "heads", "sequence_length", "vocab_size")
            if key not in self.traits.lacks
        }
        return {**sizes, **{key: value for key, value in self.own_options().items() if key not in OF_TRAINING}}

    def own_options(self) -> Dict[str, object]:
        """Options other than GPT-2's."""
        options = {key: getattr(self, key) for key in OPTIONS}
        if self.traits.counts_all:
            return {key: value for key, value in options.items() if value != OPTIONS[key]}
        options["num_query_groups"] = self.query_groups if self.query_groups != self.heads else None
        options["ffn_hidden"] = self.inner if self.inner != 4 * self.hidden else None
        options["kv_channels"] = self.head_width if self.head_width * self.heads != self.hidden else None
        if self.traits.decoder:
            options.update(decoder_layers=self.decoder_count, decoder_sequence_length=self.decoder_tokens)
        return {key: value for key, value in options.items() if value != OPTIONS[key]}


OPTIONS = left_out(ModelConfig)
"""Options with GPT-2's values."""


class Family:
    """What the rooms ask of a family without torch. What stands here is true of a module that nobody has looked into.

    `megatron_ext.contract.models.tokens` describes transformers over tokens, `lstms` LSTMs, `images` models of images.
    """

    name: str
    summary: str
    """What it is made of and what it learns, in a sentence of docs/reference.md."""
    model_types: Tuple[str, ...] = ()
    """The `model_type`s of Hugging Face's config.json that `from_hf` reads."""

    learns = TEXT
    running_text = False
    """Whether it learns the next token of running text."""
    packs = False
    """Whether documents that share a sample can be kept from seeing each other."""
    masking_ngram: Optional[int] = None
    """The most words masked in a row, unless data.masking_max_ngram says so; None: it has no masked tokens."""
    masking_geometric = False
    """Whether the lengths of masked runs are drawn from a geometric distribution, unless the data say so."""
    metrics: Optional[Tuple[str, ...]] = None
    """What an evaluation gives, where it is known without a look at the model."""

    options: Tuple[str, ...] = ()
    """Options that it has and other families lack."""
    needs: Tuple[str, ...] = ()
    """Options that it cannot do without."""
    without: Tuple[str, ...] = ()
    """Options that all other families have."""
    lacks: Tuple[str, ...] = ()
    """Those of `SIZES` that it does not have."""
    positions: Tuple[str, ...] = POSITIONS
    """The position embeddings that it may have."""
    fewest_layers = 1
    why_layers = ""
    """Why it cannot have fewer."""
    one_head = ""
    """Why it has no more than one attention head; empty: it may."""

    published = False
    """Whether transformers loads and saves its weights: `train.load` may be a folder of them, and exports are such."""
    adapters = False
    """Whether adapters can be trained instead of its own weights (`train.lora_rank`)."""
    user_code = False
    """Whether a user's file defines it."""
    decoder = False
    """Whether it has an encoder, and a decoder that takes its result."""
    recurrent = False
    """Whether a layer takes its tokens one after another, as LSTMs do, and mostly computes the gradients of weights and
    inputs together."""
    always_recomputes = False
    """Whether a part of its layers is computed again in the backward pass, whatever `recompute` says."""
    attends = False
    """Whether anything is known of attention in it, of which a part could be computed again."""
    measured = False
    """Whether no formula says what a block takes: a profile has its blocks."""
    shares_layers = False
    """Whether a tensor group can share out its blocks though they are measured."""
    counts_all = False
    """Whether a partition counts every one of its blocks."""
    has_norms = True
    """Whether a norm stands before the head and behind an encoder."""
    attention_bias = True
    """Whether the linear layers of its attention may have biases."""
    relu = False
    """Whether its MLP has ReLU instead of GELU."""
    megatron_core = False
    """Whether megatron.core has a model of it."""
    megatron_lm = False
    """Whether Megatron-LM's pretrain_gpt.py trains it, and Hugging Face's layouts of GPT-2 and Llama can hold it."""

    pipedream_layers: Tuple[str, ...] = ()
    """The kinds of layers in PipeDream's stage modules of which every block has exactly one."""
    pipedream_kernel = 1
    """The smallest kernel of such a convolution."""

    @property
    def masks(self) -> bool:
        """Whether it learns tokens that are masked in its samples."""
        return self.masking_ngram is not None

    @property
    def splits_documents(self) -> bool:
        """Whether its data are documents that `data.split` shares out."""
        return self.running_text or self.masks

    @property
    def translates(self) -> bool:
        return self.learns == PAIRS

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        """The rows of layers, in order."""
        return (Stack("block", "blocks", model.layers, 0),)

    def all_kinds(self, model: ModelConfig) -> Tuple[Tuple[str, int], ...]:
        """The kinds of all blocks in order, also of those that no partition counts, and how many."""
        return model.kinds()

    def image_blocks(self, model: ModelConfig) -> Tuple[ImageBlock, ...]:
        """All blocks in order, where each is known by itself."""
        return ()

    def parameters(self, model: ModelConfig, kind: str) -> Parameters:
        """The parameters of a block of one of `all_kinds`; none where blocks are measured."""
        return {}

    def tied(self, model: ModelConfig) -> Dict[str, str]:
        """Parameters that are equal to others: by the copy's name in the whole model, that of the owner."""
        return {}

    def head_inputs(self, model: ModelConfig) -> int:
        """Width of what the head takes: where its matrix is the embedding, that of a word's vector."""
        return model.hidden

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        """Numbers of a sample that a layer keeps until the backward pass, and that a tensor group shares out."""
        return 0

    def outside_activations(self, model: ModelConfig, kind: str) -> int:
        """Numbers of a sample that a layer keeps and that every rank of a tensor group has whole."""
        return 0

    def weights_kept(self, model: ModelConfig, kind: str) -> int:
        """Numbers that a layer keeps of a micro-batch, whatever its size: weights of which a part is dropped."""
        return 0

    def wires(self, model: ModelConfig) -> List[Wire]:
        """What passes between blocks that a formula describes, in the order of their givers."""
        return []

    def directions(self, kind: str) -> int:
        """In how many directions a layer reads its tokens."""
        return 1

    def operations(self, model: ModelConfig, kind: str) -> int:
        """Floating-point operations of a block's forward pass for one sample; lookups and norms count nothing."""
        return 0

    def attention_operations(self, model: ModelConfig, kind: str) -> int:
        """Count those of these operations that are attention's scores and their product with the values."""
        return 0

    def sizes_of(self, config: str) -> Dict[str, int]:
        """The sizes that the file of `config` sets. Raises HfConfigError where it cannot be read, or lacks one."""
        raise NotImplementedError

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        """The keys of `model` other than `family`, without those that are as usual."""
        raise NotImplementedError


@lru_cache(maxsize=None)
def family_names() -> Tuple[str, ...]:
    """The names of all families, which are those of their folders; none of these is imported."""
    found = [path.parent.name for path in (Path(__file__).parents[2] / "families").glob("*/task.py")]
    return tuple(sorted(found, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)))


@lru_cache(maxsize=None)
def family_named(name: str) -> Family:
    """The description of a family; its folder is imported here, and no other one."""
    return import_module(f"megatron_ext.families.{name}").FAMILY


def sizes_lacked(name: str) -> Tuple[str, ...]:
    """Those of `SIZES` that a family does not have; none of what is no family."""
    return family_named(name).lacks if name in family_names() else ()


def defined_by_user(name: str) -> bool:
    """Whether a user's file defines the models of a family; not of what is no family."""
    return name in family_names() and family_named(name).user_code


@lru_cache(maxsize=None)
def families_with(option: str) -> Tuple[str, ...]:
    """The families that have an option which others lack; none where all have it."""
    return tuple(name for name in family_names() if option in family_named(name).options)
