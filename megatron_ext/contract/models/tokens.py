"""Families over tokens: an embedding, rows of layers and a head; and the layers of transformers.

Their operations are those of Narayanan et al. 2021, section 5.1: two for each weight of a matrix, and the products of
queries, keys and values.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from megatron_ext.contract.models.keys import LAYER_NORM, LEARNED, NO_POSITIONS, ROTARY
from megatron_ext.contract.models.model import Family, ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Stack, Wire, linear_parameters

ONCE = ("pooler.", "binary.")
"""Parameters of the head that work on one token of a sample."""
OF_CONTEXT = ("cross_kv.", "memory.")
"""Parameters of a decoder's layer that work on the tokens it attends to."""


class TokenFamily(Family):
    """What transformers and LSTMs have in common."""

    def all_kinds(self, model: ModelConfig) -> Tuple[Tuple[str, int], ...]:
        if not self.decoder:
            return (("embedding", 1), *model.kinds(), ("head", 1))
        encoder, decoder = (
            tuple((stack.kind, stack.layers) for stack in model.stacks() if stack.causal is causal)
            for causal in (False, True)
        )
        normed = (("encoder_norm", 1),) if self.has_norms else ()
        return (("embedding", 1), *encoder, *normed, ("decoder_embedding", 1), *decoder, ("head", 1))

    def parameters(self, model: ModelConfig, kind: str) -> Parameters:
        if kind in ("embedding", "decoder_embedding"):
            return {"word": word(model, model.word_width), **self.added_embeddings(model)}
        if kind == "encoder_norm":
            return norm(model, "norm")
        if kind == "head":
            normed = norm(model, "norm") if self.has_norms else {}
            logits = {"word": word(model, model.head_inputs)}
            return {**normed, **self.before_logits(model), **logits, **self.beside_logits(model)}
        return self.layer(model, next(stack for stack in model.stacks() if stack.kind == kind))

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        """The parameters of a layer."""
        raise NotImplementedError

    def added_embeddings(self, model: ModelConfig) -> Parameters:
        """What is added to the words."""
        return {}

    def before_logits(self, model: ModelConfig) -> Parameters:
        """What stands between the final norm and the logits."""
        return {}

    def beside_logits(self, model: ModelConfig) -> Parameters:
        """The logits' bias, and what else the head gives."""
        return {}

    def tied(self, model: ModelConfig) -> Dict[str, str]:
        copies = {} if model.untie_embeddings_and_output_weights else {"head.word": "embedding.word"}
        if self.decoder:
            shared = self.parameters(model, "embedding")
            copies.update({f"decoder_embedding.{name}": f"embedding.{name}" for name in shared})
        return copies

    def wires(self, model: ModelConfig) -> List[Wire]:
        first, last = model.stacks()[0], model.stacks()[-1]
        hidden, end = model.hidden, model.counted
        if not self.decoder:
            return [Wire(place, (place + 1,), hidden * first.tokens) for place in range(-1, end)]
        decoder = model.layers  # the number of its first block
        encoded = [Wire(place, (place + 1,), hidden * first.tokens) for place in range(-1, decoder)]
        others = tuple(range(decoder + 1, end))
        attended = Wire(decoder, others, hidden * self.attended_tokens(last))
        decoded = [Wire(place, (place + 1,), hidden * last.tokens) for place in range(decoder, end)]
        return [*encoded, *([attended] if others else []), *decoded]

    def attended_tokens(self, decoder: Stack) -> int:
        """Tokens of what all layers of a decoder take beside the result of the one before them."""
        return decoder.context

    def operations(self, model: ModelConfig, kind: str) -> int:
        parameters = self.parameters(model, kind)
        if kind == "head":
            once = {name: one for name, one in parameters.items() if name.startswith(ONCE)}
            each = {name: one for name, one in parameters.items() if name not in once}
            return 2 * (model.predicting * matrices(each) + matrices(once))
        for stack in model.stacks():
            if stack.kind == kind:
                context = {name: one for name, one in parameters.items() if name.startswith(OF_CONTEXT)}
                own = {name: one for name, one in parameters.items() if name not in context}
                products = stack.tokens * matrices(own) + stack.context * matrices(context)
                return 2 * products + self.attention_operations(model, kind)
        return 0


class TransformerFamily(TokenFamily):
    """Layers of attention and MLP."""

    attends = True
    options: Tuple[str, ...] = (
        *("num_query_groups", "kv_channels", "normalization", "rotary_base", "rotary_percent", "rope_scaling_factor"),
        *("swiglu", "add_bias_linear", "position_embedding_type", "untie_embeddings_and_output_weights"),
        *("attention_dropout", "hidden_dropout", "ffn_hidden"),
    )

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        if not self.decoder:
            return (Stack("layer", "layers", model.layers, model.sequence_length, causal=self.running_text),)
        layers = model.layers if model.decoder_layers is None else model.decoder_layers
        return (
            Stack("encoder", "encoder", model.layers, model.sequence_length),
            Stack("decoder", "decoder", layers, model.decoder_tokens, model.sequence_length, causal=True),
        )

    def added_embeddings(self, model: ModelConfig) -> Parameters:
        learned = model.position_embedding_type == LEARNED
        return {"position": Parameter((model.positions, model.hidden))} if learned else {}

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        return {
            **norm(model, "attention_norm"),
            **_attention(model),
            **(_cross_attention(model) if stack.context else {}),
            **norm(model, "mlp_norm"),
            **_mlp(model),
        }

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        """Queries, keys and values, and turned or repeated ones beside or instead of them; the attention's result; the
        MLP's inner tensors before and after GELU, or gate, its SiLU (unless fused), the other half, and their
        product."""
        queries, groups = model.heads * model.head_width, model.query_groups * model.head_width
        repeated, turned = groups < queries, model.position_embedding_type == ROTARY
        kept = queries  # the result
        if repeated:
            kept += 2 * queries + (queries if turned else queries + 2 * groups)
        else:
            kept += queries + 2 * groups + (2 * queries if turned else 0)
        kept += ((3 if fused else 4) if model.swiglu else 2) * model.inner
        found = 0
        for stack in model.stacks():
            if stack.kind == kind:
                cross = 2 * queries * (stack.tokens + stack.context) if repeated else 0
                cross = cross or 2 * (queries * stack.tokens + groups * stack.context)
                found = stack.tokens * kept + (cross if stack.context else 0)
        return found

    def outside_activations(self, model: ModelConfig, kind: str) -> int:
        """The inputs of its norms, and of the linear layers after them; with sequence parallelism the group shares out
        the former. What a decoder attends to is a wire, kept once for all layers of a stage."""
        found = 0
        for stack in model.stacks():
            if stack.kind == kind:
                found = (6 if stack.context else 4) * stack.tokens * model.hidden
        return found

    def attention_operations(self, model: ModelConfig, kind: str) -> int:
        width = model.heads * model.head_width
        return sum(
            4 * stack.tokens * (stack.tokens + stack.context) * width for stack in model.stacks() if stack.kind == kind
        )


def word(model: ModelConfig, width: int) -> Parameter:
    """The matrix of the words' vectors, or of the logits."""
    return Parameter((model.padded_vocab_size, width), 0, rows=model.vocab_size)


def logits_bias(model: ModelConfig) -> Parameters:
    return {"bias": Parameter((model.padded_vocab_size,), 0, rows=model.vocab_size)}


def norm(model: ModelConfig, name: str, width: Optional[int] = None) -> Parameters:
    """The parameters of a normalization of so many numbers; None: of a token's vector."""
    kinds = ("weight", "bias") if model.normalization == LAYER_NORM else ("weight",)
    return {f"{name}.{kind}": Parameter((width or model.hidden,)) for kind in kinds}


def matrices(parameters: Parameters) -> int:
    """Numbers of those that are matrices, without the vocabulary's padding."""
    return sum(one.unpadded() for one in parameters.values() if len(one.shape) > 1)


def _attention(model: ModelConfig) -> Parameters:
    width = (model.heads + 2 * model.query_groups) * model.head_width
    pieces = (1, 1, 1) if model.query_groups == model.heads else (model.heads, model.query_groups, model.query_groups)
    bias = model.attention_bias
    return {
        **linear_parameters("qkv", Parameter((width, model.hidden), 0, pieces), bias),
        **linear_parameters("attention_out", Parameter((model.hidden, model.heads * model.head_width), 1), bias),
    }


def _cross_attention(model: ModelConfig) -> Parameters:
    width, groups = model.heads * model.head_width, model.query_groups * model.head_width
    bias = model.attention_bias
    return {
        **norm(model, "cross_norm"),
        **linear_parameters("cross_query", Parameter((width, model.hidden), 0), bias),
        **linear_parameters("cross_kv", Parameter((2 * groups, model.hidden), 0, (1, 1)), bias),
        **linear_parameters("cross_out", Parameter((model.hidden, width), 1), bias),
    }


def _mlp(model: ModelConfig) -> Parameters:
    pieces = (1, 1) if model.swiglu else (1,)
    bias = model.add_bias_linear
    return {
        **linear_parameters("mlp_in", Parameter((len(pieces) * model.inner, model.hidden), 0, pieces), bias),
        **linear_parameters("mlp_out", Parameter((model.hidden, model.inner), 1), bias),
    }


CELL_KEEPS = 7
"""Numbers of a cell that an LSTM keeps beside its inputs: four gates, the cell, its tanh, and the result."""


class LstmFamily(TokenFamily):
    """Layers of one LSTM each, without attention. They keep what goes in, the gates, and the cells before and after
    their tanh."""

    recurrent = True
    has_norms = False
    positions = (NO_POSITIONS,)
    without = ("norm_epsilon",)

    def widths(self, model: ModelConfig, kind: str) -> Tuple[int, int]:
        """The width of what goes into a layer, and of what leaves it."""
        return model.hidden, model.hidden

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        return lstm_parameters("lstm", *self.widths(model, stack.kind))

    def beside_logits(self, model: ModelConfig) -> Parameters:
        return logits_bias(model)

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        inputs, outputs = self.widths(model, kind)
        return sum(stack.tokens * (inputs + CELL_KEEPS * outputs) for stack in model.stacks() if stack.kind == kind)


def lstm_parameters(name: str, inputs: int, hidden: int) -> Parameters:
    """An LSTM with two biases for each gate, as torch's."""
    gates = 4 * hidden
    return {
        f"{name}.weight_ih_l0": Parameter((gates, inputs)),
        f"{name}.weight_hh_l0": Parameter((gates, hidden)),
        f"{name}.bias_ih_l0": Parameter((gates,)),
        f"{name}.bias_hh_l0": Parameter((gates,)),
    }
