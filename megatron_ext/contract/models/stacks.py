"""The rows of layers of which a model is made, as a partition counts them."""

from __future__ import annotations

from typing import NamedTuple, Tuple


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
    """Whether a token attends to itself and those before it alone, as in a decoder."""
    first: int = 0
    """The number of its first layer, if the layers are called as those of a stack before it."""


def gnmt_stacks(encoder: int, decoder: int, source: int, target: int) -> Tuple[Stack, ...]:
    """Of so many layers and tokens; the first layers differ from the others."""
    return _there(
        Stack("encoder_first", "encoder", 1, source),
        Stack("encoder_second", "encoder", 1, source, first=1),
        Stack("encoder", "encoder", encoder - 2, source, first=2),
        Stack("decoder_first", "decoder", 1, target, source, causal=True),
        Stack("decoder", "decoder", decoder - 1, target, causal=True, first=1),
    )


def awd_lm_stacks(layers: int, tokens: int) -> Tuple[Stack, ...]:
    """The first and the last layer have other widths than those between them."""
    return _there(
        Stack("layer_first", "layers", 1, tokens, causal=True),
        Stack("layer", "layers", layers - 2, tokens, causal=True, first=1),
        Stack("layer_last", "layers", 1, tokens, causal=True, first=layers - 1),
    )


def s2vt_stacks(encoder: int, decoder: int, steps: int) -> Tuple[Stack, ...]:
    """Of so many layers; all of them see both the steps of the frames and those of the words."""
    return _there(
        Stack("encoder_first", "encoder", 1, steps),
        Stack("encoder", "encoder", encoder - 1, steps, first=1),
        Stack("decoder_first", "decoder", 1, steps, causal=True),
        Stack("decoder", "decoder", decoder - 1, steps, causal=True, first=1),
    )


def _there(*stacks: Stack) -> Tuple[Stack, ...]:
    return tuple(stack for stack in stacks if stack.layers > 0)
