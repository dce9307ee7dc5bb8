"""An encoder, and a decoder that attends to its result and predicts what was cut out of the encoder's tokens (Raffel
et al. 2020), as Megatron-LM builds them: learned positions, and one embedding for encoder, decoder and head."""

from __future__ import annotations

from functools import partial
from typing import Mapping

from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.masked.masked_samples import masking_of
from megatron_ext.data.masked.t5_samples import T5Samples
from megatron_ext.data.samples import Samples
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.language_task import EncoderDecoderTask, perplexity
from megatron_ext.tasks.language.norms import Norm
from megatron_ext.tasks.language.transformer import Embedding, Head
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Block, Micro, Placement, Tensors, Wire


class T5Task(EncoderDecoderTask):
    """Predicts the decoder's next token. The encoder's result is a wire that every decoder layer takes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        self.inputs = ("text_enc", "text_dec", "enc_mask", "number")
        self.outputs = ("logits",)
        encoder, decoder = model.stacks()
        # Padding stands behind the decoder's tokens, which see nothing behind them.
        masked = ("number", "enc_mask")
        encoders, encoding = self.layers(encoder, "encoding", SEQUENCE, masked)
        decoders, decoding = self.layers(decoder, "decoding", DECODER_SEQUENCE, (*masked, "encoded"))
        embedding = partial(Embedding, model, seed=self._seed)
        second = partial(embedding, name="decoder_embedding")
        first = (decoding[0].name,)
        self.blocks = [
            Block("embedding", "embedding", ("text_enc", "number"), (encoding[0].name,), embedding, Placement.FIRST),
            *encoders,
            Block(
                "encoder_norm", "encoder_norm", (encoding[-1].name,), ("encoded",), partial(Norm, model), Placement.NEXT
            ),
            Block("decoder_embedding", "decoder_embedding", ("text_dec", "number"), first, second, Placement.NEXT),
            *decoders,
            Block("head", "head", (decoding[-1].name,), self.outputs, partial(Head, model), Placement.LAST),
        ]
        encoded = Wire("encoded", ("batch", SEQUENCE, model.hidden))
        logits = Wire("logits", ("batch", model.decoder_tokens, model.padded_vocab_size))
        self.wires = {wire.name: wire for wire in (*encoding, encoded, *decoding, logits)}

    def samples(self, split: str, count: int) -> Samples:
        model = self._model
        make = partial(
            T5Samples,
            sequence_length=model.sequence_length,
            decoder_sequence_length=model.decoder_tokens,
            vocab_size=model.vocab_size,
            masking=masking_of(self._plan),
        )
        return samples_of_plan(self._plan, split, count, make)

    def micro(self, sample: Tensors) -> Micro:
        """[micro-batch size, encoder's sequence]: `text_enc` and `enc_mask`, 0 where no token stands; [micro-batch
        size, decoder's sequence]: `text_dec`, `labels`, and `loss_mask`, 1 where a label counts; [micro-batch size]:
        the samples' `number`."""
        targets = {name: sample[name] for name in ("labels", "loss_mask")}
        return Micro({name: sample[name] for name in self.inputs}, targets)

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The mean over the labels that count."""
        labels, mask = micro.targets["labels"], micro.targets["loss_mask"]
        return vocab_cross_entropy(left["logits"], labels, self._model.vocab_size, tensor, mask)

    def evaluated(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return {**means, "perplexity": perplexity(means["loss"])}


TASK = T5Task
