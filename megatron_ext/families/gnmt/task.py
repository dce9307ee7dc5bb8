"""LSTMs with attention (Wu et al. 2016) as NVIDIA trains them: the encoder's first layer reads in both directions, and
what the decoder's first layer attends to goes into all later ones."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.transformer import Embedding, Logits
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Block, Placement, Wire
from megatron_ext.tasks.translation import AttentionLayer, BidirectionalLayer, Layer, TranslationTask

RANGE = 3.2
"""The range of initial weights, on both sides of 0, times the root of the hidden size: 0.1 at 1024, NVIDIA's. Narrower
models with 0.1 hardly learn, for what goes through their matrices shrinks."""


class GnmtTask(TranslationTask):
    """The encoder's result is a wire to the decoder's first layer, what that attends to one to all others."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        hidden = model.hidden
        self.inputs = ("text_enc", "text_dec", "enc_mask", "number")
        self.outputs = ("logits",)
        again = plan.recompute == "full"
        embedding = partial(Embedding, model, seed=self._seed)
        second = partial(embedding, name="decoder_embedding")
        encoders, decoders = model.layers, model.decoder_count
        widths = {"encoding.1": 2 * hidden}
        encoding = [f"encoding.{number}" for number in range(encoders)] + ["encoded"]
        decoding = [f"decoding.{number}" for number in range(decoders + 1)]
        begin = (decoding[0],)

        def layer(name: str, number: int, inputs: int) -> partial[Layer]:
            return partial(Layer, model, inputs, residual=number > 1, name=name, seed=self._seed, again=again)

        self.blocks = [
            Block("embedding", "embedding", ("text_enc", "number"), (encoding[0],), embedding, Placement.FIRST),
            Block(
                *("encoder.0", "encoder_first", (encoding[0], "enc_mask"), (encoding[1],)),
                partial(BidirectionalLayer, model, again=again),
            ),
            *(
                Block(
                    *(f"encoder.{number}", "encoder_second" if number == 1 else "encoder"),
                    *((encoding[number], "number"), (encoding[number + 1],)),
                    layer(f"encoder.{number}", number, 2 * hidden if number == 1 else hidden),
                )
                for number in range(1, encoders)
            ),
            Block("decoder_embedding", "decoder_embedding", ("text_dec", "number"), begin, second, Placement.NEXT),
            Block(
                *("decoder.0", "decoder_first", (decoding[0], "encoded", "enc_mask"), (decoding[1], "attended")),
                partial(AttentionLayer, model, recompute=plan.recompute),
            ),
            *(
                Block(
                    *(f"decoder.{number}", "decoder", (decoding[number], "number", "attended")),
                    *((decoding[number + 1],), layer(f"decoder.{number}", number, 2 * hidden)),
                )
                for number in range(1, decoders)
            ),
            Block("head", "head", (decoding[-1],), self.outputs, partial(Logits, model), Placement.LAST),
        ]
        wires = [
            *(Wire(name, ("batch", SEQUENCE, widths.get(name, hidden))) for name in encoding),
            *(Wire(name, ("batch", DECODER_SEQUENCE, hidden)) for name in (decoding[0], "attended", *decoding[1:])),
            Wire("logits", ("batch", DECODER_SEQUENCE, model.padded_vocab_size)),
        ]
        self.wires = {wire.name: wire for wire in wires}

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Uniform, as `RANGE` says; the second bias of an LSTM's gates and that of the attention begin as 0, the
        attention's scale as 1/sqrt(hidden)."""
        if name.endswith((".bias_hh_l0", ".score_bias")):
            parameter.zero_()
        elif name.endswith(".score_scale"):
            parameter.fill_(self._model.hidden**-0.5)
        elif not parameter.is_meta:
            self._draw(name, parameter, RANGE / math.sqrt(self._model.hidden), tensor)


TASK = GnmtTask
