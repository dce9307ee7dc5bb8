"""How many weights a rank holds of a model's parts (megatron_ext/families/gpt/task.py), and what a message weighs."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from conf.schema.model import Model
from fasop.costs.blocks import Kinds, blocks_of
from fasop.costs.measured_module import MeasuredModule
from megatron_ext.contract.models.counts import block_numel
from megatron_ext.contract.train_config import Precision

BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp16: 2}
"""Bytes of a weight or an activation."""

ADAM_BYTES = {Precision.fp32: 40, Precision.bf16: 46, Precision.fp16: 46}
"""Memory traffic of an update by Adam per parameter: the gradient read for its norm; weight, gradient and two moments
read and, clipped and updated, written; a 16-bit weight made of that in fp32; the gradient zeroed. Counted in the engine
(tests/cuda/test_optimizer.py)."""


@lru_cache(maxsize=4096)
def layer_parameters(model: Model, tensor: int, kind: int = 0) -> int:
    """Count the parameters of a layer of one of the kinds (`Blocks.kinds`): matrices, and biases of their inner width,
    are shared; norms and outer biases are not."""
    return _parameters(model, tensor, blocks_of(model).kinds[kind])


def word_parameters(model: Model, tensor: int) -> int:
    """Count the parameters of the word embedding, which the head has too; the vocabulary is shared."""
    return model.padded_vocab(tensor) // tensor * model.sized(tensor).word_width


@lru_cache(maxsize=4096)
def embedding_parameters(model: Model, tensor: int) -> int:
    """Count the parameters of the first stage's word and position embeddings."""
    return _parameters(model, tensor, blocks_of(model).first)


@lru_cache(maxsize=4096)
def head_parameters(model: Model, tensor: int, *, own_word: bool) -> int:
    """Count the parameters of the last stage's norm and, where the first stage is another one or the model has two, of
    a word embedding."""
    last = blocks_of(model).last
    return _parameters(model, tensor, last) - (0 if own_word else _copies(model, tensor, last))


@lru_cache(maxsize=4096)
def kind_parameters(model: Model, tensor: int, *, own_word: bool) -> tuple[int, ...]:
    """Count the parameters of a layer of each kind; a T5's decoder embedding is the encoder's if it lies on the same
    stage."""
    kinds = blocks_of(model).kinds
    copies = [0 if own_word else _copies(model, tensor, kind) for kind in kinds]
    return tuple(_parameters(model, tensor, kind) - copied for kind, copied in zip(kinds, copies, strict=True))


@lru_cache(maxsize=4096)
def shared_parameters(model: Model, tensor: int) -> tuple[int, int]:
    """Parameters that several blocks have copies of, and by how many blocks, at most."""
    if isinstance(model, MeasuredModule):
        return model.of_rank(tensor).tied_parameters, max(1, model.tied_blocks)
    sized = model.sized(tensor)
    copies = sized.traits.tied(sized)
    owners = Counter(copies.values())
    of_kind = {kind: sized.traits.parameters(sized, kind) for kind in {name.split(".")[0] for name in owners}}
    size = sum(of_kind[name.split(".")[0]][name.partition(".")[2]].numel(tensor) for name in owners)
    return size, 1 + max(owners.values(), default=0)


def _parameters(model: Model, tensor: int, kinds: Kinds) -> int:
    if isinstance(model, MeasuredModule):
        return sum(model.of_rank(tensor).block(name).parameters for name in kinds)
    sized = model.sized(tensor)
    return sum(block_numel(sized, kind, tensor) for kind in kinds)


def _copies(model: Model, tensor: int, kinds: Kinds) -> int:
    """Count the parameters that are another block's, too."""
    sized = model.sized(tensor)
    tied = sized.traits.tied(sized)
    return sum(
        parameter.numel(tensor)
        for kind in kinds
        for name, parameter in sized.traits.parameters(sized, kind).items()
        if f"{kind}.{name}" in tied
    )


def longest_message(model: Model) -> int:
    """Numbers of a sample that cross a cut, at most."""
    return max(blocks_of(model).crossing)


def activation_bytes(model: Model, samples: float, precision: Precision) -> float:
    """Count the bytes of the largest message between stages for a micro-batch. Every rank of a tensor group has, and
    sends, all of it."""
    return samples * longest_message(model) * BYTES[precision]
