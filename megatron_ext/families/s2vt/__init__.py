"""S2VT: LSTMs that read the frames of a video and describe it (Venugopalan et al. 2015)."""

from __future__ import annotations

from typing import Dict, List, Tuple

from megatron_ext.contract.models.model import VIDEOS, ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Stack, Wire, linear_parameters, present
from megatron_ext.contract.models.tokens import LstmFamily, matrices


class _S2vt(LstmFamily):
    name = "s2vt"
    summary = "LSTMs that read the frames of a video and describe it (docs/videos.md)."
    learns = VIDEOS
    metrics = ("loss", "nll", "accuracy", "perplexity")
    decoder = True
    needs = ("features",)
    one_head = "model.family=s2vt has no attention"
    options = (
        *("decoder_layers", "decoder_sequence_length", "label_smoothing", "position_embedding_type"),
        *("hidden_dropout", "embedding_width", "features"),
    )

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        """All layers see both the steps of the frames and those of the words."""
        steps = model.tokens
        decoder = model.layers if model.decoder_layers is None else model.decoder_layers
        return present(
            Stack("encoder_first", "encoder", 1, steps),
            Stack("encoder", "encoder", model.layers - 1, steps, first=1),
            Stack("decoder_first", "decoder", 1, steps, causal=True),
            Stack("decoder", "decoder", decoder - 1, steps, causal=True, first=1),
        )

    def parameters(self, model: ModelConfig, kind: str) -> Parameters:
        if kind != "embedding":
            return super().parameters(model, kind)
        assert model.features is not None
        return linear_parameters("frame", Parameter((model.word_width, model.features)), True)

    def tied(self, model: ModelConfig) -> Dict[str, str]:
        return {}

    def widths(self, model: ModelConfig, kind: str) -> Tuple[int, int]:
        inputs = model.word_width if kind == "encoder_first" else model.hidden
        return inputs + (model.word_width if kind == "decoder_first" else 0), model.hidden

    def wires(self, model: ModelConfig) -> List[Wire]:
        frames = Wire(-1, (0,), model.word_width * model.sequence_length)
        hidden = model.hidden * model.tokens
        return [frames, *(Wire(place, (place + 1,), hidden) for place in range(model.counted))]

    def operations(self, model: ModelConfig, kind: str) -> int:
        if kind == "embedding":
            return 2 * model.sequence_length * matrices(self.parameters(model, kind))
        return super().operations(model, kind)


FAMILY = _S2vt()
