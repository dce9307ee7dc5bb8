"""What the families that translate have in common: pairs of sentences, a smoothed loss, how their weights begin, and
LSTMs as those of a GNMT, which are for a tensor group of one rank.

Padding stands behind a sentence. What runs forwards never sees it in time, and what runs backwards begins at the
sentence's own end, so that padding changes nothing of what comes before it, and nobody has to know lengths on the host.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.pairs import BatchAssignment, Bucketed, Pairs, PairSamples, Side
from megatron_ext.data.samples import SPLITS, Samples
from megatron_ext.parallel.cross_entropy import vocab_hits, vocab_losses
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.dropout import key_of
from megatron_ext.tasks.language.language_task import EncoderDecoderTask, perplexity
from megatron_ext.tasks.language.transformer import Dropout, Kept, empty_linear
from megatron_ext.tasks.linear import WeightGradients, linear
from megatron_ext.tasks.repeatable import passed
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
        assignment = None
        if split == SPLITS[0]:
            assignment = BatchAssignment(plan.data_bucketing, plan.global_batch_size, plan.train.seed)
        inner = samples_of_plan(plan, split, count if assignment is None else assignment.whole(count), make)
        return Bucketed(inner, count, split, sides, multiple, assignment)

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


class BidirectionalLayer(nn.Module):
    """The encoder's first layer: one LSTM forwards, one backwards."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, again: bool) -> None:
        super().__init__()
        self.again = again
        self.lstm = nn.LSTM(config.hidden, config.hidden, batch_first=True)
        self.reverse = nn.LSTM(config.hidden, config.hidden, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[batch, sequence, hidden] and, 0 where there is padding, [batch, sequence] -> [batch, sequence, 2 hidden]."""
        return passed(self._forward, self.again, x, mask)

    def _forward(self, x: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        mirrored = mask.sum(1, keepdim=True) - 1 - places
        order = torch.where(mirrored < 0, places, mirrored).unsqueeze(-1).expand_as(x)
        backwards = self.reverse(x.gather(1, order))[0].gather(1, order)
        return torch.cat([self.lstm(x)[0], backwards], -1)


class Layer(nn.Module):
    """An LSTM, whose input is dropped in part and, from the third layer of a stack on, added to its result."""

    def __init__(
        self,
        config: ModelConfig,
        inputs: int,
        tensor: TensorGroup,
        residual: bool,
        name: str,
        seed: int,
        again: bool,
    ) -> None:
        """`inputs` is the width of what goes in, with what the decoder attends to."""
        super().__init__()
        self.again = again
        self.residual = residual
        self.kept: Optional[Kept] = None
        """The same as in a `TransformerLayer`."""
        self.dropout = Dropout(config.hidden_dropout, key_of(seed, name), tensor)
        self.lstm = nn.LSTM(inputs, config.hidden, batch_first=True)

    def forward(self, x: Tensor, number: Optional[Tensor] = None, attended: Optional[Tensor] = None) -> Tensor:
        """[batch, sequence, width] and, of the decoder, [batch, sequence, hidden] -> [batch, sequence, hidden];
        `number` [batch] is of the samples, for dropout."""
        return passed(self._forward, self.again, x, number, attended)

    def _forward(self, x: Tensor, number: Optional[Tensor], attended: Optional[Tensor]) -> Tensor:
        joined = x if attended is None else torch.cat([x, attended], -1)
        y = _run(self.lstm, self.dropout(joined, number, self.training), self.kept)
        return y + x if self.residual else y


class AttentionLayer(nn.Module):
    """The decoder's first layer, and normalized additive attention of its result to the encoder's (Bahdanau et al.
    2015; Salimans and Kingma 2016).

    The embedding before it has dropped a part of its input.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup, recompute: str) -> None:
        """`recompute` is "none", "selective" (the attention) or "full"."""
        super().__init__()
        hidden = config.hidden
        self.recompute = recompute
        self.later: Optional[WeightGradients] = None
        self.kept: Optional[Kept] = None
        """The same as in a `TransformerLayer`."""
        self.watch: Optional[Callable[[Tensor], None]] = None
        """Is given how much tokens attend to the context's, [batch, sequence, context], where a search asks for it."""
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = empty_linear(hidden, hidden, False)
        self.memory = empty_linear(hidden, hidden, False)
        self.score = nn.Parameter(torch.empty(hidden))
        self.score_bias = nn.Parameter(torch.empty(hidden))
        self.score_scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
        """[batch, sequence, hidden], [batch, context, hidden] and, 0 where there is padding, [batch, context] -> the
        layer's result and what it attends to, [batch, sequence, hidden] both."""
        decoded = passed(lambda one: _run(self.lstm, one, self.kept), self.recompute == "full", x)
        return decoded, passed(self.attend, self.recompute != "none", decoded, encoded, mask)

    def attend(self, decoded: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        if self.kept is not None:
            encoded = self.kept.setdefault("context", encoded)
        weights = self.weights(decoded, encoded, mask)
        if self.watch is not None:
            self.watch(weights)
        return weights @ encoded

    def weights(self, decoded: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """How much each of the decoder's tokens attends to each of the encoder's: [batch, sequence, context]."""
        query = linear(decoded, self.query.weight, None, self.later)
        memory = None if self.kept is None else self.kept.get("memory")
        if memory is None:
            memory = linear(encoded, self.memory.weight, None, self.later) + self.score_bias
        if self.kept is not None:
            self.kept["memory"] = memory
        direction = self.score / self.score.norm() * self.score_scale
        scores = torch.tanh(query.unsqueeze(2) + memory.unsqueeze(1)) @ direction
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -torch.inf)
        return F.softmax(scores, -1, dtype=torch.float32).to(decoded.dtype)


def _run(lstm: nn.LSTM, x: Tensor, kept: Optional[Kept]) -> Tensor:
    """[batch, sequence, width] -> [batch, sequence, hidden]; goes on from what is `kept`, and keeps its own state."""
    if kept is None:
        return lstm(x)[0]
    before = (kept["h"].unsqueeze(0), kept["c"].unsqueeze(0)) if "h" in kept else None
    y, (h, c) = lstm(x, before)
    kept.update({"h": h[0], "c": c[0]})
    return y
