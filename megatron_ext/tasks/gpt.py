"""The GPT-2 family: an embedding, transformer layers, and a head with the final norm."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Callable, Dict, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from megatron_ext.contract.plan import ModelConfig, Plan
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup, vocab_cross_entropy, vocab_embedding
from megatron_ext.tasks.initial_weights import draw
from megatron_ext.tasks.linear import WeightGradients, linear
from megatron_ext.tasks.task import SEQUENCE, Block, Held, Micro, Task, Tensors, Wire


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size // tensor.size, config.hidden))
        self.position = nn.Parameter(torch.empty(config.sequence_length, config.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, sequence] -> [batch, sequence, hidden]."""
        return vocab_embedding(tokens, self.word, self.tensor) + self.position[self.tensor.positions(tokens.shape[1])]


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2; no dropout, so that a run does not depend on its layout.

    A tensor group shares the attention's heads and the MLP's inner width.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup, recompute: str) -> None:
        """`recompute` is "none", "selective" (the attention's core) or "full"."""
        super().__init__()
        self.tensor = tensor
        self.recompute = recompute
        self.later: Optional[WeightGradients] = None
        """Where weight gradients are put off to, under a schedule that splits the backward pass."""
        self.heads = config.heads // tensor.size
        width, inner = config.hidden // tensor.size, 4 * config.hidden // tensor.size
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.qkv = _linear(config.hidden, 3 * width)
        self.attention_out = _linear(width, config.hidden)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp_in = _linear(config.hidden, inner)
        self.mlp_out = _linear(inner, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        return _again(self._forward, x) if self.recompute == "full" else self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.tensor.enter(self.attention_norm(x)))
        return x + self._mlp(self.tensor.enter(self.mlp_norm(x)))

    def _attention(self, x: Tensor) -> Tensor:
        qkv = linear(x, self.qkv.weight, self.qkv.bias, self.later)
        attended = _again(self._core, qkv) if self.recompute == "selective" else self._core(qkv)
        return self._joined(self.attention_out, attended)

    def _core(self, qkv: Tensor) -> Tensor:
        """[batch, sequence, 3 x heads x width] -> [batch, sequence, heads x width]."""
        batch, sequence, _ = qkv.shape
        query, key, value = qkv.view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, sequence, -1)

    def _mlp(self, x: Tensor) -> Tensor:
        inner = linear(x, self.mlp_in.weight, self.mlp_in.bias, self.later)
        return self._joined(self.mlp_out, F.gelu(inner, approximate="tanh"))

    def _joined(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """A linear layer whose input is shared out: partial products are summed, then the bias added once."""
        if self.tensor.size == 1:
            return linear(x, layer.weight, layer.bias, self.later)
        return self.tensor.leave(linear(x, layer.weight, None, self.later)) + layer.bias


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Without weights: torch would draw some that are not used."""
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, device=torch.empty(0).device)  # type: ignore[no-untyped-call]
    return layer


def _again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, computed once more in the backward pass instead of kept."""
    y: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return y


class Head(nn.Module):
    """Final norm and logits, through the word embedding (tied)."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.later: Optional[WeightGradients] = None
        self.norm = nn.LayerNorm(config.hidden)
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size // tensor.size, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> logits [batch, sequence, padded vocabulary / tensor size]."""
        return linear(self.tensor.enter(self.norm(x)), self.word, None, self.later)


class GptTask(Task):
    """Predicts the next token. The head's matrix is the word embedding (tied)."""

    def __init__(self, plan: Plan) -> None:
        self.inputs = ("tokens",)
        self.outputs = ("logits",)
        self.tied = {"head.word": "embedding.word"}
        self._model = plan.model
        self._seed = plan.train.seed
        model, layers = plan.model, plan.model.layers
        names = [f"hidden.{number}" for number in range(layers + 1)]
        self.wires = {name: Wire(name, ("batch", SEQUENCE, model.hidden)) for name in names}
        self.wires["logits"] = Wire("logits", ("batch", model.sequence_length, model.padded_vocab_size))
        self.blocks = [
            Block("embedding", "embedding", ("tokens",), (names[0],), partial(Embedding, model), Held.FIRST),
            *(
                Block(
                    f"layers.{number}",
                    "layer",
                    (names[number],),
                    (names[number + 1],),
                    partial(TransformerLayer, model, recompute=plan.recompute),
                )
                for number in range(layers)
            ),
            Block("head", "head", (names[-1],), ("logits",), partial(Head, model), Held.LAST),
        ]

    def sizes(self, micro_batch_size: int) -> Dict[str, int]:
        return {"batch": micro_batch_size, SEQUENCE: self._model.sequence_length}

    def micro(self, sample: Tensors) -> Micro:
        """`tokens` [micro-batch size, sequence + 1]: inputs and, shifted, labels."""
        tokens = sample["tokens"]
        return Micro({"tokens": tokens[:, :-1]}, {"labels": tokens[:, 1:]})

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        shape = (micro_batch_size, self._model.sequence_length + 1)
        return self.micro({"tokens": torch.randint(self._model.vocab_size, shape, generator=source)})

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The mean over the tokens; every micro-batch has as many."""
        return vocab_cross_entropy(left["logits"], micro.targets["labels"], self._model.vocab_size, tensor)

    def shard(self, name: str) -> Optional[Shard]:
        parts = name.split(".")
        return _SHARDS.get(parts[-1]) or _SHARDS.get(".".join(parts[-2:]))

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


_SHARDS = {
    "word": Shard(0, 1),
    "qkv.weight": Shard(0, 3),
    "qkv.bias": Shard(0, 3),
    "attention_out.weight": Shard(1, 1),
    "mlp_in.weight": Shard(0, 1),
    "mlp_in.bias": Shard(0, 1),
    "mlp_out.weight": Shard(1, 1),
}
"""By the end of a parameter's name."""


def _seed(seed: int, name: str) -> int:
    """One random stream per parameter of the whole model.

    Of 32 bits, for torch's generator on the CPU drops all above. Of one name no two seeds have the same.
    """
    return zlib.crc32(name.encode(), seed)
