"""The AWD-LSTM: LSTMs that predict the next token (Merity et al. 2018)."""

from __future__ import annotations

from typing import List, Tuple

from megatron_ext.contract.keys import left_out
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Stack, Wire, present
from megatron_ext.contract.models.tokens import LstmFamily
from megatron_ext.families.awd_lm.options import AwdLmOptions


class _AwdLm(LstmFamily):
    name = "awd_lm"
    summary = "LSTMs that predict the next token, the AWD-LSTM."
    running_text = True
    metrics = ("loss", "perplexity")
    fewest_layers = 2
    why_layers = "model.family=awd_lm needs a first and a last layer, which have their own widths"
    one_head = "model.family=awd_lm has no attention"
    options = (
        *("position_embedding_type", "untie_embeddings_and_output_weights", "hidden_dropout", "embedding_width"),
        *left_out(AwdLmOptions),
    )

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        """The first and the last layer have other widths than those between them."""
        layers, tokens = model.layers, model.sequence_length
        return present(
            Stack("layer_first", "layers", 1, tokens, causal=True),
            Stack("layer", "layers", layers - 2, tokens, causal=True, first=1),
            Stack("layer_last", "layers", 1, tokens, causal=True, first=layers - 1),
        )

    def head_inputs(self, model: ModelConfig) -> int:
        return model.hidden if model.untie_embeddings_and_output_weights else model.word_width

    def widths(self, model: ModelConfig, kind: str) -> Tuple[int, int]:
        inputs = model.word_width if kind == "layer_first" else model.hidden
        return inputs, model.head_inputs if kind == "layer_last" else model.hidden

    def wires(self, model: ModelConfig) -> List[Wire]:
        widths = [model.word_width, *[model.hidden] * (model.counted - 1), model.head_inputs]
        return [Wire(place, (place + 1,), width * model.sequence_length) for place, width in enumerate(widths, -1)]

    def weights_kept(self, model: ModelConfig, kind: str) -> int:
        if not model.own(AwdLmOptions).weight_dropout or not kind.startswith("layer"):
            return 0
        return 4 * self.widths(model, kind)[1] ** 2


FAMILY = _AwdLm()
