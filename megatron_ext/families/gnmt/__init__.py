"""GNMT: LSTMs with attention, which translate sentences (Wu et al. 2016)."""

from __future__ import annotations

from typing import Dict, List, Tuple

from megatron_ext.contract.goal import OF_TRANSLATION
from megatron_ext.contract.models.model import PAIRS, ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Stack, Wire, present
from megatron_ext.contract.models.tokens import CELL_KEEPS, LstmFamily, lstm_parameters


class _Gnmt(LstmFamily):
    name = "gnmt"
    summary = "The same with LSTMs."
    pipedream_layers = ("LSTM", "EmuBidirLSTM", "RecurrentAttention")
    learns = PAIRS
    metrics = OF_TRANSLATION
    decoder = True
    attends = True
    one_head = "the attention of model.family=gnmt has a single head"
    fewest_layers = 2
    why_layers = "the encoder of model.family=gnmt has a bidirectional layer and at least one more"
    options = (
        *("decoder_layers", "decoder_sequence_length", "label_smoothing", "position_embedding_type"),
        *("untie_embeddings_and_output_weights", "hidden_dropout"),
    )

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        """The first layers differ from the others."""
        source, target = model.sequence_length, model.decoder_tokens
        decoder = model.layers if model.decoder_layers is None else model.decoder_layers
        return present(
            Stack("encoder_first", "encoder", 1, source),
            Stack("encoder_second", "encoder", 1, source, first=1),
            Stack("encoder", "encoder", model.layers - 2, source, first=2),
            Stack("decoder_first", "decoder", 1, target, source, causal=True),
            Stack("decoder", "decoder", decoder - 1, target, causal=True, first=1),
        )

    def directions(self, kind: str) -> int:
        return 2 if kind == "encoder_first" else 1

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        kind, hidden = stack.kind, model.hidden
        if kind == "encoder_first":
            return {**lstm_parameters("lstm", hidden, hidden), **lstm_parameters("reverse", hidden, hidden)}
        if kind != "decoder_first":
            return lstm_parameters("lstm", hidden if kind == "encoder" else 2 * hidden, hidden)
        attention = {
            "query.weight": Parameter((hidden, hidden)),
            "memory.weight": Parameter((hidden, hidden)),
            **dict.fromkeys(("score", "score_bias"), Parameter((hidden,))),
            "score_scale": Parameter((1,)),
        }
        return {**lstm_parameters("lstm", hidden, hidden), **attention}

    def tied(self, model: ModelConfig) -> Dict[str, str]:
        return {} if model.untie_embeddings_and_output_weights else super().tied(model)

    def wires(self, model: ModelConfig) -> List[Wire]:
        """Both directions of the encoder's first layer leave it."""
        found = super().wires(model)
        found[1] = found[1]._replace(numbers=2 * found[1].numbers)
        return found

    def attended_tokens(self, decoder: Stack) -> int:
        """The first layer's attention gives one vector for each of the decoder's tokens."""
        return decoder.tokens

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        """Count activations as other LSTMs do; the attention keeps a tanh for every two tokens, too."""
        found = 0
        for stack in model.stacks():
            if stack.kind == kind:
                inputs = 1 if kind in ("encoder_first", "encoder", "decoder_first") else 2
                found = stack.tokens * model.hidden * self.directions(kind) * (inputs + CELL_KEEPS)
                found += (stack.tokens + 1) * stack.context * model.hidden
        return found

    def attention_operations(self, model: ModelConfig, kind: str) -> int:
        """Only the first layer of the decoder has attention; additive scores take as many operations as products."""
        width = model.heads * model.head_width
        return sum(4 * stack.tokens * stack.context * width for stack in model.stacks() if stack.kind == kind)


FAMILY = _Gnmt()
