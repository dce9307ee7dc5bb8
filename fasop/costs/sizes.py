"""How many weights a rank holds of the parts of a model (megatron_ext/tasks/gpt.py), and what a message weighs."""

from __future__ import annotations

from functools import lru_cache

from conf.schema.experiment import Model, Precision

BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp16: 2}
"""Of a weight or an activation."""

ADAM_BYTES = 28
"""Memory traffic of an Adam step per parameter: weight, gradient and two moments read, all but the gradient written."""

LOGITS_AT_ONCE = 2**22
"""Of which the engine has fp32 copies when it computes the loss (megatron_ext/parallel/tensor_parallel.py)."""


@lru_cache(maxsize=4096)
def layer_parameters(model: Model, tensor: int) -> int:
    """Of a transformer layer: matrices, and biases of their inner width, are shared; norms and outer biases are not."""
    return model.sized(tensor).numel("layer", tensor)


def word_parameters(model: Model, tensor: int) -> int:
    """Of the word embedding, which the head has too; the vocabulary is shared."""
    return model.padded_vocab(tensor) // tensor * model.hidden


@lru_cache(maxsize=4096)
def embedding_parameters(model: Model, tensor: int) -> int:
    """Of the first stage's word and position embeddings."""
    return model.sized(tensor).numel("embedding", tensor)


@lru_cache(maxsize=4096)
def head_parameters(model: Model, tensor: int, *, own_word: bool) -> int:
    """Of the last stage's norm and, where the first stage is another one or the model has two, a word embedding."""
    both = model.sized(tensor).numel("head", tensor)
    return both if own_word or model.untie_embeddings_and_output_weights else both - word_parameters(model, tensor)


def activation_bytes(model: Model, micro_batch_size: int, precision: Precision) -> int:
    """Of what a stage hands to the next for a micro-batch. Every rank of a tensor group has, and sends, all of it."""
    return micro_batch_size * model.sequence_length * model.hidden * BYTES[precision]
