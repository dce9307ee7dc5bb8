"""A model's parameters by block, how a tensor group cuts them, and how many there are."""

from __future__ import annotations

import math
from typing import Dict, NamedTuple, Optional, Tuple

from megatron_ext.contract.models.images import image_parameters
from megatron_ext.contract.models.model import (
    BERT,
    GNMT,
    IMAGES,
    LAYER_NORM,
    LEARNED,
    MEASURED,
    PAIRED,
    RECURRENT,
    S2VT,
    T5,
    TOKEN_TYPES,
    TRANSLATION,
    WITHOUT_ATTENTION,
    ModelConfig,
)


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


def block_parameters(model: ModelConfig, kind: str) -> Dict[str, Parameter]:
    """The parameters of a block, by name: of one of the kinds that `all_kinds` says; of a family whose blocks are
    measured, none."""
    if model.family in MEASURED:
        return {}
    if model.family == S2VT and kind == "embedding":
        assert model.features is not None
        return _linear("frame", Parameter((model.word_width, model.features)), True)
    if kind in ("embedding", "decoder_embedding"):
        return {"word": _word(model, model.word_width), **_added_embeddings(model)}
    if kind == "encoder_norm":
        return _norm(model, "norm")
    if kind == "head":
        normed = {} if model.family in RECURRENT else _norm(model, "norm")
        return {
            **normed,
            **_before_logits(model),
            "word": _word(model, model.head_inputs),
            **_beside_logits(model),
        }
    stack = next(stack for stack in model.stacks() if stack.kind == kind)
    if model.family == GNMT:
        return _recurrent(model, kind)
    if model.family in WITHOUT_ATTENTION:
        return _lstm("lstm", *lstm_widths(model, kind))
    return {
        **_norm(model, "attention_norm"),
        **_attention(model),
        **(_cross_attention(model) if stack.context else {}),
        **_norm(model, "mlp_norm"),
        **_mlp(model),
    }


def tied_parameters(model: ModelConfig) -> Dict[str, str]:
    """Parameters that are equal to others: by the copy's name in the whole model, that of the owner."""
    if model.family in MEASURED or model.family == S2VT:
        return {}
    copies = {} if model.untie_embeddings_and_output_weights else {"head.word": "embedding.word"}
    if model.family in TRANSLATION and model.untie_embeddings_and_output_weights:
        return {}
    if model.family in PAIRED:
        shared = block_parameters(model, "embedding")
        copies.update({f"decoder_embedding.{name}": f"embedding.{name}" for name in shared})
    return copies


def checkpoint_parameter(model: ModelConfig, part: str, name: str) -> Parameter:
    """One of a part of a checkpoint of gpt: `embedding`, `head` or a layer's."""
    return block_parameters(model, part if part in ("embedding", "head") else "layer")[name]


def parameter_count(model: ModelConfig) -> int:
    """Of the whole model, without the vocabulary's padding; a tied one counts once."""
    if model.family in IMAGES:
        return image_parameters(model)
    copies = tied_parameters(model)
    return sum(
        count * parameter.unpadded()
        for kind, count in model.all_kinds()
        for name, parameter in block_parameters(model, kind).items()
        if f"{kind}.{name}" not in copies
    )


def block_numel(model: ModelConfig, kind: str, tensor: int) -> int:
    """Parameters of a rank's share of a block, in a tensor group of this size."""
    return sum(parameter.numel(tensor) for parameter in block_parameters(model, kind).values())


def lstm_widths(model: ModelConfig, kind: str) -> Tuple[int, int]:
    """Of a layer of awd_lm or s2vt: the width of what goes in, and of what leaves it."""
    inputs = model.word_width if kind in ("layer_first", "encoder_first") else model.hidden
    if kind == "decoder_first":
        inputs += model.word_width
    return inputs, model.head_inputs if kind == "layer_last" else model.hidden


def _word(model: ModelConfig, width: int) -> Parameter:
    return Parameter((model.padded_vocab_size, width), 0, rows=model.vocab_size)


def _added_embeddings(model: ModelConfig) -> Dict[str, Parameter]:
    """What is added to the words."""
    found = {}
    if model.position_embedding_type == LEARNED:
        found["position"] = Parameter((model.positions, model.hidden))
    if model.family == BERT and model.bert_binary_head:
        found["types"] = Parameter((TOKEN_TYPES, model.hidden))
    return found


def _before_logits(model: ModelConfig) -> Dict[str, Parameter]:
    """Between the final norm and the logits."""
    if model.family != BERT:
        return {}
    dense = {"dense.weight": Parameter((model.hidden, model.hidden)), "dense.bias": Parameter((model.hidden,))}
    return {**dense, **_norm(model, "dense_norm")}


def _beside_logits(model: ModelConfig) -> Dict[str, Parameter]:
    """The logits' bias, and the binary head."""
    found = {}
    if model.family in (BERT, *RECURRENT) or (model.family == T5 and not model.untie_embeddings_and_output_weights):
        found["bias"] = Parameter((model.padded_vocab_size,), 0, rows=model.vocab_size)
    if model.family == BERT and model.bert_binary_head:
        found["pooler.weight"] = Parameter((model.hidden, model.hidden))
        found["pooler.bias"] = Parameter((model.hidden,))
        found["binary.weight"] = Parameter((2, model.hidden))
        found["binary.bias"] = Parameter((2,))
    return found


def _norm(model: ModelConfig, name: str) -> Dict[str, Parameter]:
    kinds = ("weight", "bias") if model.normalization == LAYER_NORM else ("weight",)
    return {f"{name}.{kind}": Parameter((model.hidden,)) for kind in kinds}


def _attention(model: ModelConfig) -> Dict[str, Parameter]:
    width = (model.heads + 2 * model.query_groups) * model.head_width
    pieces = (1, 1, 1) if model.query_groups == model.heads else (model.heads, model.query_groups, model.query_groups)
    bias = model.attention_bias
    return {
        **_linear("qkv", Parameter((width, model.hidden), 0, pieces), bias),
        **_linear("attention_out", Parameter((model.hidden, model.heads * model.head_width), 1), bias),
    }


def _cross_attention(model: ModelConfig) -> Dict[str, Parameter]:
    width, groups = model.heads * model.head_width, model.query_groups * model.head_width
    bias = model.attention_bias
    return {
        **_norm(model, "cross_norm"),
        **_linear("cross_query", Parameter((width, model.hidden), 0), bias),
        **_linear("cross_kv", Parameter((2 * groups, model.hidden), 0, (1, 1)), bias),
        **_linear("cross_out", Parameter((model.hidden, width), 1), bias),
    }


def _mlp(model: ModelConfig) -> Dict[str, Parameter]:
    pieces = (1, 1) if model.swiglu else (1,)
    bias = model.add_bias_linear
    return {
        **_linear("mlp_in", Parameter((len(pieces) * model.inner, model.hidden), 0, pieces), bias),
        **_linear("mlp_out", Parameter((model.hidden, model.inner), 1), bias),
    }


def _recurrent(model: ModelConfig, kind: str) -> Dict[str, Parameter]:
    """A layer of gnmt. Its LSTMs have two biases for each gate, as torch's."""
    hidden = model.hidden
    if kind == "encoder_first":
        return {**_lstm("lstm", hidden, hidden), **_lstm("reverse", hidden, hidden)}
    if kind != "decoder_first":
        return _lstm("lstm", hidden if kind == "encoder" else 2 * hidden, hidden)
    attention = {
        "query.weight": Parameter((hidden, hidden)),
        "memory.weight": Parameter((hidden, hidden)),
        **dict.fromkeys(("score", "score_bias"), Parameter((hidden,))),
        "score_scale": Parameter((1,)),
    }
    return {**_lstm("lstm", hidden, hidden), **attention}


def _lstm(name: str, inputs: int, hidden: int) -> Dict[str, Parameter]:
    gates = 4 * hidden
    return {
        f"{name}.weight_ih_l0": Parameter((gates, inputs)),
        f"{name}.weight_hh_l0": Parameter((gates, hidden)),
        f"{name}.bias_ih_l0": Parameter((gates,)),
        f"{name}.bias_hh_l0": Parameter((gates,)),
    }


def _linear(name: str, weight: Parameter, bias: bool) -> Dict[str, Parameter]:
    """A bias is cut as the outputs are; one of outputs that are summed is whole."""
    of_outputs = Parameter(weight.shape[:1], *((0, weight.pieces) if weight.cut == 0 else ()))
    return {f"{name}.weight": weight, **({f"{name}.bias": of_outputs} if bias else {})}
