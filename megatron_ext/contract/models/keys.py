"""The keys of a model, which have Megatron-LM's names and begin as GPT-2's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Tuple

from megatron_ext.contract.keys import FRACTION, Range, Word, about, option, positive

DEFAULT = "gpt"
"""The family of a model that names none."""


class Normalization(Word):
    """How the inputs of attention, MLP and head are normalized."""

    LayerNorm = "LayerNorm"
    RMSNorm = "RMSNorm"


class PositionEmbedding(Word):
    """How a model knows where a token stands."""

    learned_absolute = "learned_absolute"
    rope = "rope"
    """Rotary: queries and keys are rotated by an angle."""
    none = "none"
    sinusoidal = "sinusoidal"
    """For transformer only: sines and cosines, added to embeddings that are scaled by the square root of hidden."""


LAYER_NORM, RMS_NORM = tuple(Normalization)
LEARNED, ROTARY, NO_POSITIONS, SINUSOIDAL = tuple(PositionEmbedding)
POSITIONS = (LEARNED, ROTARY, NO_POSITIONS)
OF_TRAINING = (
    *("hidden_dropout", "attention_dropout", "drop_path", "label_smoothing"),
    *("embedding_dropout", "input_dropout", "output_dropout", "weight_dropout", "config", "code_digest"),
)
"""Options that training may change on the way; the file of `config` may lie elsewhere, and be written anew."""
DEPTHS = r"[1-9][0-9]{0,3}(-[1-9][0-9]{0,3}){0,4}"
"""A regular expression for `depths`: of one to five stages."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Sizes:
    """The sizes of a model, as a user gives them."""

    layers: int = field(metadata=about(Range(1, 10_000)))
    """Number of layers. With a decoder (t5, transformer, gnmt, s2vt): the encoder's. For module, resnet, vgg and
    alexnet: the number of blocks, counted if you leave it out."""
    hidden: int = field(metadata=about(Range(1, 2**20)))
    """Width of a token's vector between layers."""
    heads: int = field(metadata=about(Range(1, 2**16)))
    """Attention heads, which share hidden."""
    sequence_length: int = field(metadata=about(Range(1, 2**24)))
    """Tokens per sample, and positions of the model. With a decoder: the encoder's. For s2vt: the frames of a video."""
    vocab_size: int = field(metadata=about(Range(1, 2**27)))
    """Tokens of the tokenizer, before padding."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class SharedOptions(Sizes):
    """The keys of a model that no family declares by itself."""

    family: str = DEFAULT
    ffn_hidden: Optional[int] = option(None, Range(1, 2**22))
    """Inner width of the MLP; null: 4 times hidden."""
    num_query_groups: Optional[int] = option(None, Range(1, 2**16))
    """Heads of keys and values, each shared by several query heads; null: one for each query head."""
    kv_channels: Optional[int] = option(None, Range(1, 2**16))
    """Width of a head; null: hidden / heads."""
    normalization: Normalization = Normalization.LayerNorm
    norm_epsilon: float = option(1e-5, positive(1.0))
    """Added to a variance before its root is taken."""
    position_embedding_type: PositionEmbedding = PositionEmbedding.learned_absolute
    rotary_base: float = option(10000.0, positive(1e12))
    """With rope, the base of the angles' wavelengths."""
    rotary_percent: float = option(1.0, Range(0.0, 1.0, above=True, ends_matter=True))
    """With rope, the part of each head that is rotated: its first numbers."""
    rope_scaling_factor: Optional[float] = option(None, positive(1e6))
    """With rope: the factor by which sequences are longer than the 8,192 tokens of Llama 3's first training."""
    swiglu: bool = False
    """Use a gated MLP, with a third matrix, instead of GELU."""
    add_bias_linear: bool = True
    """Linear layers have biases."""
    untie_embeddings_and_output_weights: bool = False
    """Give the head its own matrix instead of the word embedding's; for translation, the decoder too."""
    hidden_dropout: float = option(0.0, FRACTION)
    """Dropout after the embedding, attention and MLP."""
    attention_dropout: float = option(0.0, FRACTION)
    """Dropout of the attention weights."""
    bert_binary_head: bool = True
    """For bert: token types, and a head that predicts whether the second sentence follows the first."""
    decoder_layers: Optional[int] = option(None, Range(1, 10_000))
    """For t5, transformer, gnmt and s2vt: layers of the decoder; null: as many as the encoder."""
    decoder_sequence_length: Optional[int] = option(None, Range(1, 2**24))
    """For t5, transformer, gnmt and s2vt: tokens of the decoder; null: as many as the encoder."""
    label_smoothing: float = option(0.0, FRACTION)
    """For translation and images: label smoothing, the probability spread over all words or classes."""
    code: Optional[str] = None
    """For module: FILE.py:NAME, the model to train, in a file with its loss and its data (docs/your-model.md)."""
    capture: bool = False
    """For module: let torch.fx cut the model into blocks, one for each layer that its forward pass calls."""
    config: Optional[str] = None
    """For huggingface: the config.json of a model of transformers, or its folder (docs/models.md)."""
    image_size: Optional[int] = option(None, Range(1, 2**14))
    """For image models: side length of the images, in pixels."""
    channels: int = option(3, Range(1, 2**10))
    """For image models: channels of the images, 3 for colour, 1 for grey."""
    classes: Optional[int] = option(None, Range(2, 2**24))
    """For image models: number of classes."""
    patch_size: Optional[int] = option(None, Range(1, 2**14))
    """For vit: side length of a patch, in pixels."""
    class_token: bool = True
    """For vit: the head reads a class token; otherwise the mean of all tokens."""
    drop_path: float = option(0.0, FRACTION)
    """For vit and t2t_vit: stochastic depth, the probability that a sample skips the last layer's attention or MLP;
    earlier layers in proportion."""
    width: int = option(64, Range(1, 2**14))
    """For resnet, vgg and alexnet: channels of the first convolution; for t2t_vit: channels of tokens while they are
    joined."""
    depths: Optional[str] = None
    """For resnet and vgg: blocks of each stage, such as 3-4-6-3."""
    embedding_width: Optional[int] = option(None, Range(1, 2**20))
    """For awd_lm and s2vt: width of a word's and a frame's vector; null: hidden."""
    features: Optional[int] = option(None, Range(1, 2**20))
    """For s2vt: numbers that describe a frame, such as 4096."""


def _own_options() -> Tuple[Any, ...]:
    """The classes in the `options.py` of families, each named `OPTIONS` there. A file is loaded without its package,
    which describes a model that already has these options."""
    found = []
    for path in sorted((Path(__file__).parents[2] / "families").glob("*/options.py")):
        name = f"megatron_ext.families.{path.parent.name}.options"
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        found.append(sys.modules[name].OPTIONS)
    return tuple(found)


if TYPE_CHECKING:
    Model = SharedOptions
else:

    @dataclass(frozen=True, init=False, repr=False, eq=False)
    class Model(*_own_options(), SharedOptions):
        """A model of one of the families, as a user describes it; `ModelConfig.own` has a family's own options."""
