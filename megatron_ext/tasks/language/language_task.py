"""What models over tokens have in common: layers in a row, weights, their names; and what is common to those that
predict the next token, and to those with an encoder and a decoder."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.models.pieces import Parameter, Stack
from megatron_ext.contract.plan import Plan
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.gpt_samples import GptSamples, samples_in_epoch
from megatron_ext.data.samples import Samples
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup
from megatron_ext.tasks.cut import block_of
from megatron_ext.tasks.initial_weights import draw
from megatron_ext.tasks.language.transformer import TransformerLayer
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Block, Micro, Task, Tensors, Wire

_LARGEST_EXPONENT = 700.0
"""Of e, for a number."""


class LanguageTask(Task):
    """A family of `ModelConfig`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._model = plan.model
        self._seed = plan.train.seed
        self.tied: Mapping[str, str] = plan.model.traits.tied(plan.model)
        self._stacks = {stack.kind: stack for stack in plan.model.stacks()}
        self._parameters = {kind: plan.model.traits.parameters(plan.model, kind) for kind, _ in plan.model.all_kinds()}

    def sizes(self, micro_batch_size: int) -> Dict[str, int]:
        model = self._model
        return {"batch": micro_batch_size, SEQUENCE: model.sequence_length, DECODER_SEQUENCE: model.decoder_tokens}

    def layers(self, stack: Stack, wires: str, sequence: str, taken: Tuple[str, ...]) -> Tuple[List[Block], List[Wire]]:
        """The blocks of a stack, and the wires between them: `wires.0` goes into the first, and so on.

        `taken` is what each block takes after its wire (`TransformerLayer.forward`).
        """
        names = [f"{wires}.{number}" for number in range(stack.layers + 1)]
        blocks = [
            Block(
                name,
                stack.kind,
                (names[number], *taken),
                (names[number + 1],),
                partial(
                    TransformerLayer,
                    self._model,
                    stack=stack,
                    recompute=self._plan.recompute,
                    name=name,
                    seed=self._seed,
                ),
            )
            for number, name in enumerate(f"{stack.name}.{number}" for number in range(stack.layers))
        ]
        return blocks, [Wire(name, ("batch", sequence, self._model.hidden)) for name in names]

    def shard(self, name: str) -> Optional[Shard]:
        parameter = self._parameter(name)
        return None if parameter.cut is None else Shard(parameter.cut, parameter.pieces)

    def rows(self, name: str) -> Optional[int]:
        return self._parameter(name).rows

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Normal(0, 0.02), the layers' output projections scaled by 1/sqrt(2 layers) (GPT-2, section 2.3)."""
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        shard = self.shard(name)
        whole = list(parameter.shape)
        if shard is not None:
            whole[shard.dim] *= tensor.size
        # The vocabulary's padding, which depends on the tensor size, must not shift the numbers drawn.
        filled = self.rows(name) or whole[0]
        std = 0.02
        if "_out." in name:
            std /= math.sqrt(2 * self._stacks[block_of(self.blocks, name).kind].layers)
        draw(parameter, whole, filled, shard, tensor.size, tensor.rank, std, self._source(name))

    def _source(self, name: str) -> torch.Generator:
        """The random numbers of a parameter of the whole model; a tied one has its owner's."""
        return torch.Generator().manual_seed(_seed(self._seed, self.tied.get(name, name)))

    def _parameter(self, name: str) -> Parameter:
        block = block_of(self.blocks, name)
        return self._parameters[block.kind][name[len(block.name) + 1 :]]


def _seed(seed: int, name: str) -> int:
    """One random stream per parameter of the whole model.

    Of 32 bits, for torch's generator on the CPU drops all above. Of one name no two seeds have the same.
    """
    return zlib.crc32(name.encode(), seed)


def perplexity(loss: float) -> float:
    """Of the mean negative logarithm of the probabilities; infinite where no number is as large."""
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf


class NextTokenTask(LanguageTask):
    """A family that takes `tokens` and the samples' `number`, and gives `logits`."""

    inputs: Tuple[str, ...] = ("tokens", "number")
    outputs = ("logits",)

    def samples(self, split: str, count: int) -> Samples:
        make = partial(GptSamples, sequence_length=self._model.sequence_length, vocab_size=self._model.vocab_size)
        return samples_of_plan(self._plan, split, count, make)

    def micro(self, sample: Tensors) -> Micro:
        """`tokens` [micro-batch size, sequence + 1]: inputs and, shifted, labels; and the samples' `number`."""
        tokens = sample["tokens"]
        return Micro({"tokens": tokens[:, :-1], "number": sample["number"]}, {"labels": tokens[:, 1:]})

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        shape = (micro_batch_size, self._model.sequence_length + 1)
        tokens = torch.randint(self._model.vocab_size, shape, generator=source)
        return self.micro({"tokens": tokens, "number": torch.arange(micro_batch_size)})

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The mean over the tokens; every micro-batch has as many."""
        return vocab_cross_entropy(left["logits"], micro.targets["labels"], self._model.vocab_size, tensor)

    def epoch(self, split: str) -> Optional[int]:
        plan = self._plan
        if plan.data_blend:
            return None
        return samples_in_epoch(plan.data_prefix, plan.data_split, split, self._model.sequence_length)

    def evaluated(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return {**means, "perplexity": perplexity(means["loss"])}


class EncoderDecoderTask(LanguageTask):
    """Reads `text_enc`, `enc_mask` and `text_dec`, and is asked for `labels` where `loss_mask` is 1."""

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        model = self._model
        encoder, decoder = (micro_batch_size, model.sequence_length), (micro_batch_size, model.decoder_tokens)
        return self.micro(
            {
                "text_enc": torch.randint(model.vocab_size, encoder, generator=source),
                "text_dec": torch.randint(model.vocab_size, decoder, generator=source),
                "labels": torch.randint(model.vocab_size, decoder, generator=source),
                "loss_mask": torch.ones(decoder, dtype=torch.int64),
                "enc_mask": torch.ones(encoder, dtype=torch.int64),
                "number": torch.arange(micro_batch_size),
            }
        )
