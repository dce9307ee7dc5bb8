"""What the families that translate have in common: pairs of sentences, a smoothed loss, and how their weights begin."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Dict, Mapping, Optional

import torch
from torch import Tensor

from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.bucketing import Bucketed, Dealing, Side
from megatron_ext.data.pairs import Pairs, PairSamples
from megatron_ext.data.samples import SPLITS, Samples
from megatron_ext.parallel.cross_entropy import vocab_hits, vocab_losses
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.encoder_decoder import EncoderDecoderTask
from megatron_ext.tasks.language.language_task import perplexity
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Micro, Tensors

GPU_MULTIPLE = 8
"""Tokens that a GPU's matrix units take at once."""


class TranslationTask(EncoderDecoderTask):
    """Every target token counts the same, wherever it lies: the loss of a micro-batch is a sum over its tokens."""

    def samples(self, split: str, count: int) -> Samples:
        plan, model = self._plan, self._model
        make = partial(
            PairSamples,
            sequence_length=model.sequence_length,
            decoder_sequence_length=model.decoder_tokens,
            vocab_size=model.vocab_size,
        )
        if plan.data_bucketing is None:
            return samples_of_plan(plan, split, count, make)
        sides = (
            Side(SEQUENCE, ("text_enc", "enc_mask"), model.sequence_length),
            Side(DECODER_SEQUENCE, ("text_dec", "labels", "loss_mask"), model.decoder_tokens),
        )
        multiple = GPU_MULTIPLE if plan.device == "cuda" else 1
        for share in plan.layout.tensors if plan.sequence_parallel else ():
            multiple *= share // gcd(multiple, share)
        dealing = None
        if split == SPLITS[0]:
            dealing = Dealing(plan.data_bucketing, plan.global_batch_size, plan.train.seed)
        inner = samples_of_plan(plan, split, count if dealing is None else dealing.whole(count), make)
        return Bucketed(inner, count, split, sides, multiple, dealing)

    def micro(self, sample: Tensors) -> Micro:
        """[micro-batch size, encoder's sequence]: `text_enc` and `enc_mask`, 0 where no token stands; [micro-batch
        size, decoder's sequence]: `text_dec`, `labels`, and `loss_mask`, 1 where a label counts; [micro-batch size]:
        the samples' `number`."""
        targets = {name: sample[name] for name in ("labels", "loss_mask")}
        inputs = {name: sample[name] for name in self.inputs if name in sample}  # a rank may take targets alone
        return Micro(inputs, targets, weight=sample["loss_mask"].sum())

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The sum over the labels that count, smoothed."""
        losses = self._losses(left, micro, tensor, self._model.label_smoothing)
        return (losses * micro.targets["loss_mask"].flatten()).sum()

    def metrics(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Dict[str, Tensor]:
        """Sums over the labels that count: `nll`, of which exp is the perplexity, and `accuracy`."""
        mask = micro.targets["loss_mask"]
        hits = vocab_hits(left["logits"], self._labels(micro), self._model.vocab_size, tensor)
        losses = self._losses(left, micro, tensor, 0.0)
        return {"nll": (losses * mask.flatten()).sum(), "accuracy": (hits * mask).sum()}

    def epoch(self, split: str) -> Optional[int]:
        plan, model = self._plan, self._model
        if plan.data_blend:
            return None
        return len(Pairs(plan.data_prefix, split, model.sequence_length, model.decoder_tokens).kept)

    def evaluated(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return {**means, "perplexity": perplexity(means["nll"])}

    def _losses(self, left: Tensors, micro: Micro, tensor: TensorGroup, smoothing: float) -> Tensor:
        return vocab_losses(left["logits"], self._labels(micro), self._model.vocab_size, tensor, smoothing)

    def _labels(self, micro: Micro) -> Tensor:
        """Where none counts, any."""
        return micro.targets["labels"].masked_fill(micro.targets["loss_mask"] == 0, 0)

    def _fill(self, name: str, parameter: Tensor, whole: Tensor, tensor: TensorGroup) -> None:
        """Gives a rank its share of a parameter whose values, without the vocabulary's padding, are `whole`."""
        shard = self.shard(name)
        shape = list(parameter.shape)
        if shard is not None:
            shape[shard.dim] *= tensor.size
        if shape[0] > len(whole):
            whole = torch.cat([whole, whole.new_zeros(shape[0] - len(whole), *shape[1:])])
        parameter.copy_(whole if shard is None else shard.part(whole, tensor.size, tensor.rank))
