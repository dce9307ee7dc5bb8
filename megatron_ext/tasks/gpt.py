"""The GPT-2 family, cut into pipeline stages and, inside a stage, over a tensor group.

A stage is [embedding] + transformer layers + [final norm and head]; it may have no layer at all. Parameters
are named and initialised by their place in the whole model, so every cut gives the same weights.

Another family, such as BERT or T5, is another `Stage`. The engine asks of it: `first` and `last`; `forward`, from
tokens or the one tensor that the stage before sent, to the next one's or to what the loss takes; `parameters_by_name`;
`put_off`; `tied_word`. All stages of a model send tensors of one shape: T5's decoder would be sent the encoder's output
along the sequence, beside its own. What else is GPT's: the next token as label (`Executor._forward`), the samples
(`data.gpt_samples`), the loss (`Engine`), and which parameters are cut (`tensor_parallel._SHARDS`) and saved together
(`checkpoints.tensors.place_of`, `checkpoints.meta.part_names`).
"""

from __future__ import annotations

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from megatron_ext.contract.plan import ModelConfig, Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup, shard_of, vocab_embedding
from megatron_ext.tasks.initial_weights import draw
from megatron_ext.tasks.linear import WeightGradients, linear

MOST_THREADS = 8
"""That draw a stage's weights, where a rank has as many cores."""


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
    """Final norm and logits, through the word embedding of the first stage (tied)."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, word: Optional[nn.Parameter]) -> None:
        super().__init__()
        self.tensor = tensor
        self.later: Optional[WeightGradients] = None
        self.norm = nn.LayerNorm(config.hidden)
        if word is None:
            word = nn.Parameter(torch.empty(config.padded_vocab_size // tensor.size, config.hidden))
        self.word = word

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> logits [batch, sequence, padded vocabulary / tensor size]."""
        return linear(self.tensor.enter(self.norm(x)), self.word, None, self.later)


class Stage(nn.Module):
    """The part of the model that one virtual pipeline stage holds, or a rank's share of it.

    Virtual stage `c * pipeline + s` is chunk `c` of stage `s`.
    """

    def __init__(self, plan: Plan, virtual_stage: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.first = virtual_stage == 0
        self.last = virtual_stage == plan.pipeline * plan.chunks - 1
        self.embedding = Embedding(plan.model, tensor) if self.first else None
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(plan.model, tensor, plan.recompute) for i in plan.layers_of(virtual_stage)}
        )
        own_word = self.embedding.word if self.embedding is not None else None
        self.head = Head(plan.model, tensor, own_word) if self.last else None
        self._initialise(plan, tensor)
        if plan.train.compile:
            for layer in self.layers.values():
                layer.forward = torch.compile(layer.forward)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (first stage) or activations in; activations or (last stage) logits out."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def parameters_by_name(self) -> List[Tuple[str, nn.Parameter]]:
        """Every parameter once, first to last layer, under its name in the whole model.

        The head's copy of the embedding is called `head.word`; where the stage has the embedding itself, the
        shared one is `embedding.word`.
        """
        return list(self.named_parameters())

    def put_off(self, later: WeightGradients) -> None:
        """Lets a backward pass leave weight gradients to `later`: the layers', and the head's if the weight is its own.

        A weight that the embedding uses too gets both gradients at once, as one.
        """
        for layer in self.layers.values():
            assert isinstance(layer, TransformerLayer)
            layer.later = later
        if self.head is not None and self.embedding is None:
            self.head.later = later

    @property
    def tied_word(self) -> Optional[nn.Parameter]:
        """The word embedding, where this stage shares it with another one."""
        if self.first == self.last:
            return None
        holder = self.embedding if self.first else self.head
        return None if holder is None else holder.word

    def _initialise(self, plan: Plan, tensor: TensorGroup) -> None:
        """Normal(0, 0.02), the layers' output projections scaled by 1/sqrt(2 layers) (GPT-2, section 2.3)."""
        scaled = 0.02 / math.sqrt(2 * plan.model.layers)

        def fill(named: Tuple[str, nn.Parameter]) -> None:
            name, weight = named[0], named[1].detach()
            if weight.dim() == 1:
                weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                return
            shard = shard_of(name)
            whole = list(weight.shape)
            if shard is not None:
                whole[shard.dim] *= tensor.size
            # The vocabulary's padding, which depends on the tensor size, must not shift the numbers drawn.
            filled = plan.model.vocab_size if name.endswith("word") else whole[0]
            std = scaled if "_out." in name else 0.02
            source = torch.Generator().manual_seed(_seed(plan.train.seed, name))
            draw(weight, whole, filled, shard, tensor.size, tensor.rank, std, source)

        # Each parameter has a generator of its own, and torch draws in one thread.
        threads = len(os.sched_getaffinity(0)) // max(len(node.ranks) for node in plan.nodes)
        if threads > 1:
            with ThreadPoolExecutor(min(threads, MOST_THREADS)) as pool:
                list(pool.map(fill, self.parameters_by_name()))
        else:
            for named in self.parameters_by_name():
                fill(named)


def _seed(seed: int, name: str) -> int:
    """One random stream per parameter of the whole model; both copies of the tied embedding share one.

    Of 32 bits, for torch's generator on the CPU drops all above. Of one name no two seeds have the same.
    """
    whole = "embedding.word" if name == "head.word" else name
    return zlib.crc32(whole.encode(), seed)
