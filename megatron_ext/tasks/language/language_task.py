"""What models over tokens have in common: layers in a row, weights, their names; and what is common to those that
predict the next token, and to those with an encoder and a decoder."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor

from megatron_ext.contract.models.pieces import Parameter, Stack
from megatron_ext.contract.plan import Plan
from megatron_ext.data import documents
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.documents import DocumentSamples
from megatron_ext.data.gpt_samples import GptSamples, samples_in_epoch
from megatron_ext.data.samples import Samples, Split
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy, vocab_losses
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup
from megatron_ext.tasks.cut import block_of
from megatron_ext.tasks.language.transformer import TransformerLayer
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Block, Micro, Task, Tensors, Wire

# Initial weights: normal numbers that follow from a parameter's name and the seed, whoever holds which part of it.
#
# torch's generator takes one uniform number for each normal one, in their order, and turns 16 at a time into normal
# ones. So a matrix can be drawn in pieces of 16 numbers or more. It cannot jump: the uniform numbers before a rank's
# share are drawn and dropped, but nothing is made of them, no memory holds them, and what comes after the share is not
# drawn.

BLOCK = 16
"""Numbers that torch turns into normal ones at a time."""
PIECE = 2**18
"""Numbers in a piece, about: few enough to stay in memory just used."""


class Rows(NamedTuple):
    """Rows of a whole matrix that a share has, and where they begin in it."""

    first: int
    last: int
    begin: int


def draw(
    share: Tensor,
    whole: List[int],
    filled: int,
    shard: Optional[Shard],
    size: int,
    rank: int,
    std: float,
    generator: torch.Generator,
) -> None:
    """Fills the share of `rank` out of `size` of a matrix of the shape `whole`; rows from `filled` on are zero.

    The numbers are those that `torch.empty(filled, columns).normal_(0.0, std, generator=generator)` has there.
    """
    if share.is_meta:  # a model that is only looked at has shapes and no values
        return
    columns = whole[1]
    if filled * columns % BLOCK:  # torch then draws the last 16 numbers anew
        matrix = torch.zeros(whole, device=share.device)
        matrix[:filled] = torch.empty(filled, columns, device=share.device).normal_(0.0, std, generator=generator)
        share.copy_(matrix if shard is None else shard.part(matrix, size, rank))
        return
    held = _rows(whole[0], shard, size, rank)
    width = share.shape[1]
    left = rank * width if width < columns else 0
    for rows in held:
        share[rows.begin + max(0, min(rows.last, filled) - rows.first) : rows.begin + rows.last - rows.first].zero_()
    end = min(filled, held[-1].last)
    unit = BLOCK // math.gcd(columns, BLOCK)
    step = max(unit, PIECE // columns // unit * unit)
    scratch = torch.empty(step, columns, device=share.device)
    for first in range(0, end, step):
        last = min(first + step, filled)
        parts = [rows for rows in held if rows.first < last and rows.last > first]
        piece = scratch[: last - first]
        if not parts:
            piece.uniform_(generator=generator)
        elif width == columns and parts[0].first <= first and parts[0].last >= last:
            begin = parts[0].begin + first - parts[0].first
            share[begin : begin + last - first].normal_(0.0, std, generator=generator)
        else:
            piece.normal_(0.0, std, generator=generator)
            for rows in parts:
                low, high = max(first, rows.first), min(last, rows.last)
                begin = rows.begin + low - rows.first
                share[begin : begin + high - low] = piece[low - first : high - first, left : left + width]


def _rows(rows: int, shard: Optional[Shard], size: int, rank: int) -> List[Rows]:
    """List the rows by place in the whole matrix."""
    if shard is None or shard.dim == 1:
        return [Rows(0, rows, 0)]
    found, first, begin = [], 0, 0
    for length in shard.lengths(rows):
        own = length // size
        found.append(Rows(first + rank * own, first + (rank + 1) * own, begin))
        first, begin = first + length, begin + own
    return found


_LARGEST_EXPONENT = 700.0
"""The largest exponent of e that gives a number."""


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

    def layers(
        self,
        stack: Stack,
        wires: str,
        sequence: str,
        taken: Tuple[str, ...],
        layer: Type[TransformerLayer] = TransformerLayer,
    ) -> Tuple[List[Block], List[Wire]]:
        """The blocks of a stack, and the wires between them: `wires.0` goes into the first, and so on.

        `taken` is what each block takes after its wire (the forward pass of `layer`).
        """
        names = [f"{wires}.{number}" for number in range(stack.layers + 1)]
        blocks = [
            Block(
                name,
                stack.kind,
                (names[number], *taken),
                (names[number + 1],),
                partial(
                    layer,
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

    def adopt(self, name: str, shape: Sequence[int]) -> None:
        block = block_of(self.blocks, name)
        self._parameters[block.kind][name[len(block.name) + 1 :]] = Parameter(tuple(shape))

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

    def _draw(self, name: str, parameter: Tensor, limit: float, tensor: TensorGroup) -> None:
        """Gives a rank its share of a parameter whose values are uniform, up to `limit` on both sides of 0."""
        rows = self.rows(name)
        shape = list(parameter.shape) if rows is None else [rows, *parameter.shape[1:]]
        whole = torch.empty(shape).uniform_(-limit, limit, generator=self._source(name))
        self._fill(name, parameter, whole, tensor)

    def _fill(self, name: str, parameter: Tensor, whole: Tensor, tensor: TensorGroup) -> None:
        """Gives a rank its share of a parameter whose values, without the vocabulary's padding, are `whole`."""
        shard = self.shard(name)
        shape = list(parameter.shape)
        if shard is not None:
            shape[shard.dim] *= tensor.size
        if shape[0] > len(whole):
            whole = torch.cat([whole, whole.new_zeros(shape[0] - len(whole), *shape[1:])])
        parameter.copy_(whole if shard is None else shard.part(whole, tensor.size, tensor.rank))

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
    """Return the perplexity from the mean negative logarithm of the probabilities; infinite where no number is as
    large."""
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf


class NextTokenTask(LanguageTask):
    """A family that takes `tokens` and the samples' `number`, and gives `logits`.

    Where samples are documents, the loss is the mean over the tokens that are to be learned.
    """

    inputs: Tuple[str, ...] = ("tokens", "number")
    outputs: Tuple[str, ...] = ("logits",)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._documents = plan.data_documents
        self.packs = plan.data_documents is not None and plan.data_documents.packing
        """Whether blocks take `positions` [batch, sequence], which restart with each document."""
        if self.packs:
            self.inputs = (*self.inputs, "positions")

    def samples(self, split: str, count: int) -> Samples:
        length, vocab_size = self._model.sequence_length, self._model.vocab_size
        if self._documents is not None:
            make = partial(DocumentSamples, sequence_length=length, vocab_size=vocab_size, packing=self.packs)
            return samples_of_plan(self._plan, split, count, make)
        running = partial(GptSamples, sequence_length=length, vocab_size=vocab_size)
        return samples_of_plan(self._plan, split, count, running)

    def micro(self, sample: Tensors) -> Micro:
        """`tokens` [micro-batch size, sequence + 1]: inputs and, shifted, labels; and the samples' `number`. Of
        documents, what `Documents.sample` gives."""
        if "labels" in sample:
            targets = {name: sample[name] for name in ("labels", "loss_mask")}
            rest = {name: one for name, one in sample.items() if name not in targets}
            return Micro(rest, targets, weight=sample["loss_mask"].sum())
        tokens = sample["tokens"]
        inputs: Tensors = {"tokens": tokens[:, :-1], "number": sample["number"]}
        if self.packs:
            inputs["positions"] = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
        return Micro(inputs, {"labels": tokens[:, 1:]})

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        shape = (micro_batch_size, self._model.sequence_length + 1)
        tokens = torch.randint(self._model.vocab_size, shape, generator=source)
        micro = self.micro({"tokens": tokens, "number": torch.arange(micro_batch_size)})
        if self._documents is None:
            return micro
        mask = torch.ones_like(micro.targets["labels"])
        return micro._replace(targets={**micro.targets, "loss_mask": mask}, weight=mask.sum())

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The mean over the tokens, of which every micro-batch has as many; of documents, the sum over those that are
        to be learned."""
        labels, vocab_size = micro.targets["labels"], self._model.vocab_size
        if micro.weight is None:
            return vocab_cross_entropy(left["logits"], labels, vocab_size, tensor)
        losses = vocab_losses(left["logits"], labels, vocab_size, tensor)
        return (losses * micro.targets["loss_mask"].flatten()).sum()

    def epoch(self, split: str) -> Optional[int]:
        plan, length = self._plan, self._model.sequence_length
        if plan.data_blend:
            return None
        if self._documents is not None:
            one = Split(1, plan.train.seed, name=split)
            return documents.samples_in_epoch(plan.data_prefix, plan.data_split, one, length, self.packs)
        return samples_in_epoch(plan.data_prefix, plan.data_split, split, length)

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
