"""Attention alone (Vaswani et al. 2017) as OpenSeq2Seq builds it: norms before attention and MLP and behind both
stacks, positions as sines and cosines, and one embedding for both languages and the head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.families.t5.task import T5Task
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.translation import TranslationTask


class TransformerTask(TranslationTask, T5Task):
    """The blocks and wires are those of a T5."""

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Embeddings normal with the standard deviation 1/sqrt(hidden); matrices uniform after Glorot and Bengio 2010,
        each of those that are joined in one parameter by itself."""
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        if parameter.is_meta:
            return
        known, source = self._parameter(name), self._source(name)
        rows, columns = known.shape[0] if known.rows is None else known.rows, known.shape[1]
        if name.endswith(".word"):
            whole = torch.empty(rows, columns).normal_(0.0, columns**-0.5, generator=source)
        else:
            limit = math.sqrt(6.0 / (rows // len(known.pieces) + columns))
            whole = torch.empty(rows, columns).uniform_(-limit, limit, generator=source)
        self._fill(name, parameter, whole, tensor)


TASK = TransformerTask
