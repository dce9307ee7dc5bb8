"""Decoders that predict the next token: the GPT-2 family, and with other options Llama's."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Dict, Optional

import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Samples
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup, vocab_cross_entropy
from megatron_ext.tasks.cut import block_of
from megatron_ext.tasks.initial_weights import draw
from megatron_ext.tasks.task import SEQUENCE, Block, Held, Micro, Task, Tensors, Wire
from megatron_ext.tasks.transformer import Embedding, Head, TransformerLayer


class GptTask(Task):
    """Predicts the next token. Unless untied, the head's matrix is the word embedding."""

    def __init__(self, plan: Plan) -> None:
        self.inputs = ("tokens", "number")
        self.outputs = ("logits",)
        self.tied = {} if plan.model.untie_embeddings_and_output_weights else {"head.word": "embedding.word"}
        self._plan = plan
        self._model = plan.model
        self._seed = plan.train.seed
        model, layers = plan.model, plan.model.layers
        number = ("number",) if model.hidden_dropout or model.attention_dropout else ()
        seed = self._seed
        names = [f"hidden.{number}" for number in range(layers + 1)]
        self.wires = {name: Wire(name, ("batch", SEQUENCE, model.hidden)) for name in names}
        self.wires["logits"] = Wire("logits", ("batch", model.sequence_length, model.padded_vocab_size))
        self.blocks = [
            Block(
                "embedding",
                "embedding",
                ("tokens", *number),
                (names[0],),
                partial(Embedding, model, seed=seed),
                Held.FIRST,
            ),
            *(
                Block(
                    f"layers.{at}",
                    "layer",
                    (names[at], *number),
                    (names[at + 1],),
                    partial(TransformerLayer, model, recompute=plan.recompute, name=f"layers.{at}", seed=seed),
                )
                for at in range(layers)
            ),
            Block("head", "head", (names[-1],), ("logits",), partial(Head, model), Held.LAST),
        ]

    def samples(self, split: str, count: int) -> Samples:
        make = partial(GptSamples, sequence_length=self._model.sequence_length, vocab_size=self._model.vocab_size)
        return samples_of_plan(self._plan, split, count, make)

    def sizes(self, micro_batch_size: int) -> Dict[str, int]:
        return {"batch": micro_batch_size, SEQUENCE: self._model.sequence_length}

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

    def shard(self, name: str) -> Optional[Shard]:
        block = block_of(self.blocks, name)
        parameter = self._model.block(block.kind)[name[len(block.name) + 1 :]]
        return None if parameter.cut is None else Shard(parameter.cut, parameter.pieces)

    def rows(self, name: str) -> Optional[int]:
        return self._model.vocab_size if name.endswith(".word") else None

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
        std = 0.02 / math.sqrt(2 * self._model.layers) if "_out." in name else 0.02
        source = torch.Generator().manual_seed(_seed(self._seed, self.tied.get(name, name)))
        draw(parameter, whole, filled, shard, tensor.size, tensor.rank, std, source)


def _seed(seed: int, name: str) -> int:
    """One random stream per parameter of the whole model.

    Of 32 bits, for torch's generator on the CPU drops all above. Of one name no two seeds have the same.
    """
    return zlib.crc32(name.encode(), seed)
