"""How many weights a rank holds of the parts of a model (megatron_ext/tasks/gpt.py), and what a message weighs."""

from __future__ import annotations

from conf.schema.experiment import Model, Precision

BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp16: 2}
"""Of a weight or an activation."""

ADAM_BYTES = 28
"""Memory traffic of an Adam step per parameter: weight, gradient and two moments read, all but the gradient written."""

LOGITS_AT_ONCE = 2**22
"""Of which the engine has fp32 copies when it computes the loss (megatron_ext/parallel/tensor_parallel.py)."""


def layer_parameters(model: Model, tensor: int) -> int:
    """Of a transformer layer: matrices, and biases of their inner width, are shared; norms and outer biases are not."""
    h = model.hidden
    return (12 * h * h + 7 * h) // tensor + 6 * h


def word_parameters(model: Model, tensor: int) -> int:
    """Of the word embedding, which the head has too; the vocabulary is shared."""
    return model.padded_vocab(tensor) // tensor * model.hidden


def embedding_parameters(model: Model, tensor: int) -> int:
    """Of the first stage's word and position embeddings."""
    return word_parameters(model, tensor) + model.sequence_length * model.hidden


def head_parameters(model: Model, tensor: int, *, own_word: bool) -> int:
    """Of the last stage's norm and, where the first stage is another one, its copy of the word embedding."""
    return 2 * model.hidden + (word_parameters(model, tensor) if own_word else 0)


def activation_bytes(model: Model, micro_batch_size: int, precision: Precision) -> int:
    """Of what a stage hands to the next for a micro-batch. Every rank of a tensor group has, and sends, all of it."""
    return micro_batch_size * model.sequence_length * model.hidden * BYTES[precision]
