"""Sequence to sequence, video to text (Venugopalan et al. 2015): LSTMs read the frames of a video, then write words.

All layers go through the steps of the frames and then through those of the words. The first stack of them sees frames,
and nothing in the steps of the words; the second one sees the first one's result and, in the steps of the words, those.
"""

from __future__ import annotations

import math
from functools import partial
from typing import List, Optional, Type

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.samples import Samples
from megatron_ext.data.vision.videos import VideoSamples, fitting, open_videos
from megatron_ext.families.s2vt import FAMILY
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.transformer import Logits
from megatron_ext.tasks.linear import WeightGradients, embedding, linear
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Block, Micro, Placement, Wire
from megatron_ext.tasks.translation import Layer, TranslationTask

RANGE = 0.1
"""The range of the initial weights of words and head, on both sides of 0."""
GATES = 4
"""Gates of an LSTM."""


class S2vtTask(TranslationTask):
    """Every word of a caption counts the same, as in translation."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        self.inputs = ("frames", "text_dec", "number")
        self.outputs = ("logits",)
        encoding = [f"encoding.{number}" for number in range(model.layers + 1)]
        decoding = [encoding[-1], *(f"decoding.{number}" for number in range(1, model.decoder_count + 1))]

        def layer(name: str, number: int, wires: List[str], first: Type[Layer], *beside: str) -> Block:
            kind = name if number else f"{name}_first"
            make = partial(
                Layer if number else first,
                model,
                FAMILY.widths(model, kind)[0],
                residual=False,
                name=f"{name}.{number}",
                seed=self._seed,
                again=plan.recompute == "full",
            )
            takes = (wires[number], "number", *(() if number else beside))
            return Block(f"{name}.{number}", kind, takes, (wires[number + 1],), make)

        self.blocks = [
            Block(
                "embedding", "embedding", ("frames",), (encoding[0],), partial(FrameEmbedding, model), Placement.FIRST
            ),
            *(layer("encoder", number, encoding, FrameLayer) for number in range(model.layers)),
            Block(
                *("decoder_embedding", "decoder_embedding", ("text_dec",), ("words",), partial(WordEmbedding, model)),
                Placement.NEXT,
            ),
            *(layer("decoder", number, decoding, WordLayer, "words") for number in range(model.decoder_count)),
            Block("head", "head", (decoding[-1],), self.outputs, partial(CaptionLogits, model), Placement.LAST),
        ]
        wires = [
            Wire(encoding[0], ("batch", SEQUENCE, model.word_width)),
            *(Wire(name, ("batch", model.tokens, model.hidden)) for name in (*encoding[1:], *decoding[1:])),
            Wire("words", ("batch", DECODER_SEQUENCE, model.word_width)),
            Wire("logits", ("batch", DECODER_SEQUENCE, model.padded_vocab_size)),
        ]
        self.wires = {wire.name: wire for wire in wires}

    def samples(self, split: str, count: int) -> Samples:
        return samples_of_plan(self._plan, split, count, partial(VideoSamples, model=self._model))

    def epoch(self, split: str) -> Optional[int]:
        plan = self._plan
        return len(fitting(open_videos(plan.data_prefix, split), plan.model, plan.data_prefix))

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        model = self._model
        assert model.features is not None
        words = (micro_batch_size, model.decoder_tokens)
        return self.micro(
            {
                "frames": torch.randn(micro_batch_size, model.sequence_length, model.features, generator=source),
                "text_dec": torch.randint(model.vocab_size, words, generator=source),
                "labels": torch.randint(model.vocab_size, words, generator=source),
                "loss_mask": torch.ones(words, dtype=torch.int64),
                "number": torch.arange(micro_batch_size),
            }
        )

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Words and head uniform, as `RANGE` says; LSTMs and the frames' matrix as torch's; the head's bias 0."""
        if name == "head.bias":
            parameter.zero_()
        elif not parameter.is_meta:
            inputs = len(parameter) // GATES if ".lstm." in name else self._model.features or 1
            of_torch = ".lstm." in name or ".frame." in name
            self._draw(name, parameter, 1 / math.sqrt(inputs) if of_torch else RANGE, tensor)


class FrameEmbedding(nn.Module):
    """What describes a frame, made as wide as a word's vector."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        assert config.features is not None
        self.later: Optional[WeightGradients] = None
        self.frame = nn.Linear(config.features, config.word_width)

    def forward(self, frames: Tensor) -> Tensor:
        """[batch, frames, features] -> [batch, frames, width]."""
        return linear(frames.to(self.frame.weight.dtype), self.frame.weight, self.frame.bias, self.later)


class WordEmbedding(nn.Module):
    """The vectors of words."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.later: Optional[WeightGradients] = None
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size, config.word_width))

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, words] -> [batch, words, width]."""
        return embedding(tokens, self.word, self.later)


class FrameLayer(Layer):
    """The first layer, which sees frames, and then zeros in the steps of the words."""

    def __init__(self, config: ModelConfig, inputs: int, tensor: TensorGroup, **others: object) -> None:
        super().__init__(config, inputs, tensor, **others)  # type: ignore[arg-type]
        self.words = config.decoder_tokens

    def forward(self, x: Tensor, number: Optional[Tensor] = None, attended: Optional[Tensor] = None) -> Tensor:
        """[batch, frames, width] -> [batch, frames + words, hidden]."""
        return super().forward(F.pad(x, (0, 0, 0, self.words)), number)


class WordLayer(Layer):
    """The layer that sees what the frames have become, and zeros and then words beside it."""

    def forward(self, x: Tensor, number: Optional[Tensor] = None, attended: Optional[Tensor] = None) -> Tensor:
        """[batch, frames + words, hidden] and the words' vectors [batch, words, width] -> as the former."""
        assert attended is not None
        return super().forward(x, number, F.pad(attended, (0, 0, x.shape[1] - attended.shape[1], 0)))


class CaptionLogits(Logits):
    """A matrix and a bias for the vocabulary, in the steps of the words."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        self.words = config.decoder_tokens

    def forward(self, x: Tensor) -> Tensor:
        """[batch, frames + words, hidden] -> logits [batch, words, padded vocabulary]."""
        return super().forward(x[:, -self.words :])


TASK = S2vtTask
