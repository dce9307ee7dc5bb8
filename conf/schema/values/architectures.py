"""What a model can be made of: its family, its normalization, its position embedding."""

from __future__ import annotations

from enum import StrEnum

from megatron_ext.contract.models.model import (
    ALEXNET,
    AWD_LM,
    BERT,
    GNMT,
    GPT,
    LAYER_NORM,
    LEARNED,
    MODULE,
    NO_POSITIONS,
    RESNET,
    RMS_NORM,
    ROTARY,
    S2VT,
    SINUSOIDAL,
    T2T_VIT,
    T5,
    TRANSFORMER,
    VGG,
    VIT,
)


class Family(StrEnum):
    """What a model is made of, and what it learns (docs/models.md)."""

    gpt = GPT
    """A decoder that predicts the next token; with Llama's options, a Llama."""
    bert = BERT
    """An encoder that predicts masked tokens, and whether two sentences follow each other."""
    t5 = T5
    """An encoder and a decoder, which predicts the spans that were cut out of the encoder's tokens."""
    transformer = TRANSFORMER
    """An encoder and a decoder of attention, which translates sentences (docs/translation.md)."""
    gnmt = GNMT
    """The same with LSTMs."""
    awd_lm = AWD_LM
    """LSTMs that predict the next token, the AWD-LSTM."""
    s2vt = S2VT
    """LSTMs that read the frames of a video and describe it (docs/videos.md)."""
    vit = VIT
    """A transformer over the patches of an image that classifies it (docs/images.md), like the next four."""
    t2t_vit = T2T_VIT
    """The same over tokens that are joined step by step (Tokens-to-Token ViT)."""
    resnet = RESNET
    """Bottlenecks of convolutions with batch norms, such as ResNet-50."""
    vgg = VGG
    """Stages of convolutions and three linear layers, such as VGG-16."""
    alexnet = ALEXNET
    """Five convolutions and three linear layers."""
    module = MODULE
    """A module from your own Python file (docs/your-model.md)."""


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
