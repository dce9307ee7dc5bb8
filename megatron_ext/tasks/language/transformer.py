"""The modules of a transformer, of which a tensor group shares the heads, the inner width and the vocabulary."""

from __future__ import annotations

import math
from functools import partial
from typing import Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.keys import ROTARY, SINUSOIDAL
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Stack
from megatron_ext.parallel.fused import Fused
from megatron_ext.parallel.tensor_parallel import TensorGroup, numbers, vocab_embedding
from megatron_ext.tasks.dropout import dropout, key_of, rows_of
from megatron_ext.tasks.language.attention import Dropped, attend, holds_weights, mean_weights
from megatron_ext.tasks.language.norms import norm
from megatron_ext.tasks.language.positions import rotary, rotated, sinusoids
from megatron_ext.tasks.linear import WeightGradients, embedding, linear
from megatron_ext.tasks.repeatable import passed

Kept = Dict[str, Tensor]
"""What goes on with the hypotheses of a search, by name, [hypotheses, …] each."""


class Dropout:
    """Drops numbers of a tensor [batch, sequence, hidden], of which a rank may hold its share of the sequence.

    Not a module: calling one costs more than everything else where nothing is dropped.
    """

    def __init__(self, rate: float, key: Tensor, tensor: TensorGroup) -> None:
        self.rate = rate
        self.key = key
        self.tensor = tensor

    def __call__(self, x: Tensor, number: Optional[Tensor], training: bool, onto: Optional[Tensor] = None) -> Tensor:
        """`number` [batch] are the samples' numbers in the run; what is left is added `onto` another tensor."""
        if not self.rate or number is None or not training:
            return x if onto is None else onto + x
        positions = self.tensor.places(x.shape[1], x.device)
        return dropout(x, self.rate, rows_of(self.key, number, positions), onto)


class Embedding(nn.Module):
    """Token embedding and, where the model learns them, positions and types of tokens."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, seed: int, name: str = "embedding") -> None:
        super().__init__()
        self.tensor = tensor
        self.later: Optional[WeightGradients] = None
        self.begins_at = 0
        """Where the first token stands, for a search that has computed those before it."""
        self.factor: Optional[float] = None
        """What the words' vectors are multiplied by; None: nothing."""
        self.dropout = Dropout(config.hidden_dropout, key_of(seed, name), tensor)
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size // tensor.size, config.hidden))
        added = config.traits.parameters(config, "embedding")
        self.waves = config.position_embedding_type == SINUSOIDAL
        self.position: Optional[nn.Parameter] = None
        if "position" in added:
            self.position = nn.Parameter(torch.empty(added["position"].shape))
        self.types: Optional[nn.Parameter] = None
        if "types" in added:
            self.types = nn.Parameter(torch.empty(added["types"].shape))

    def forward(self, tokens: Tensor, number: Optional[Tensor] = None, types: Optional[Tensor] = None) -> Tensor:
        """tokens and types [batch, sequence] -> [batch, sequence, hidden]; `number` [batch] is of the samples, for
        dropout."""
        return self.embedded(tokens, number, types)

    def embedded(
        self,
        tokens: Tensor,
        number: Optional[Tensor],
        types: Optional[Tensor] = None,
        positions: Optional[Tensor] = None,
    ) -> Tensor:
        """The same; `positions` [batch, sequence], where they are not those of the sequence."""
        x = vocab_embedding(tokens, self.word, self.tensor, partial(embedding, later=self.later))
        here = self.tensor.positions(tokens.shape[1])
        if self.factor is not None:
            x = x * self.factor
        if self.waves:
            waves = sinusoids(self.begins_at + tokens.shape[1], x.shape[-1], x.device)[self.begins_at :]
            placed = waves[here] if positions is None else waves[positions[:, here]]
            x = x * math.sqrt(x.shape[-1]) + placed.to(x.dtype)
        if self.position is not None:
            x = x + (self.position[here] if positions is None else F.embedding(positions[:, here], self.position))
        if self.types is not None and types is not None:
            x = x + F.embedding(types[:, here], self.types)
        return self.dropout(x, number, self.training)


class TransformerLayer(nn.Module):
    """Pre-norm attention, attention to another stack's result where there is one, and MLP."""

    def __init__(
        self, config: ModelConfig, tensor: TensorGroup, stack: Stack, recompute: str, name: str, seed: int
    ) -> None:
        """`recompute` is "none", "selective" (the attention's core) or "full"; dropout follows from name and seed."""
        super().__init__()
        if (experts := getattr(config, "experts", None)) is not None:
            raise EngineError(f"model.experts={experts}: tdpp's own layers have none; use engine=megatron_core")
        self.config = config
        self.causal = stack.causal
        self.tensor = tensor
        self.recompute = recompute
        self.later: Optional[WeightGradients] = None
        """Where weight gradients are put off to, under a schedule that splits the backward pass."""
        self.kept: Optional[Kept] = None
        """Where a search goes on token by token, what the layer keeps of those before."""
        self.heads, self.groups = config.heads // tensor.size, config.query_groups // tensor.size
        self.shares = [self.heads, self.groups, self.groups]
        """Heads of queries, keys and values."""
        width, inner = self.heads * config.head_width, config.inner // tensor.size
        bias, attention_bias = config.add_bias_linear, config.attention_bias
        self.relu = config.traits.relu
        """Instead of GELU, and dropped in training, as Vaswani et al. 2017's successors do."""
        self.window: Optional[int] = None
        """The tokens that one attends to at most, itself among them; None: all before it."""
        self.softcap: Optional[float] = None
        """Soft cap of the attention's scores; None: they have none."""
        self.gate: Callable[[Tensor], Tensor] = _gated
        """What a gated MLP makes of gate and input, which lie one after the other."""
        self.turned = config
        """The model whose angles its rotary positions have."""
        self.angles: Optional[Tuple[Tensor, Tensor]] = None
        """Angles of rotary positions, once the layer is where it stays."""
        self.holds_weights = True
        """Whether attention dropout needs all weights of the attention at once."""
        self.core_key = key_of(seed, f"{name}.core")
        self.attention_dropout = Dropout(config.hidden_dropout, key_of(seed, f"{name}.attention"), tensor)
        self.mlp_dropout = Dropout(config.hidden_dropout, key_of(seed, f"{name}.mlp"), tensor)
        self.attention_norm = norm(config)
        self.qkv = empty_linear(config.hidden, (self.heads + 2 * self.groups) * config.head_width, attention_bias)
        self.attention_out = empty_linear(width, config.hidden, attention_bias)
        self.crosses = stack.context > 0
        if self.crosses:
            self.watch: Optional[Callable[[Tensor], None]] = None
            """Is given how much tokens attend to the context's, [batch, sequence, context], the mean of the heads, if
            a search asks for it."""
            self.cross_core_key = key_of(seed, f"{name}.cross_core")
            self.cross_dropout = Dropout(config.hidden_dropout, key_of(seed, f"{name}.cross"), tensor)
            self.cross_norm = norm(config)
            self.cross_query = empty_linear(config.hidden, width, attention_bias)
            self.cross_kv = empty_linear(config.hidden, 2 * self.groups * config.head_width, attention_bias)
            self.cross_out = empty_linear(width, config.hidden, attention_bias)
        self.relu_key = key_of(seed, f"{name}.relu")
        self.mlp_norm = norm(config)
        self.mlp_in = empty_linear(config.hidden, 2 * inner if config.swiglu else inner, bias)
        self.mlp_out = empty_linear(inner, config.hidden, bias)

    def forward(
        self,
        x: Tensor,
        number: Optional[Tensor] = None,
        mask: Optional[Tensor] = None,
        context: Optional[Tensor] = None,
    ) -> Tensor:
        """[batch, sequence, hidden] -> the same; `number` [batch] is of the samples, for dropout.

        `mask` [batch, tokens] is 0 where no token stands: of the sequence itself or, of a layer that attends to
        `context` [batch, tokens, hidden], of that one.
        """
        return self.passed(x, number, mask, context)

    def passed(
        self,
        x: Tensor,
        number: Optional[Tensor],
        mask: Optional[Tensor] = None,
        context: Optional[Tensor] = None,
        positions: Optional[Tensor] = None,
    ) -> Tensor:
        """The same; `positions` [batch, sequence], which restart with each document, where several share a sequence."""
        return passed(self._forward, self.recompute == "full", x, number, mask, context, positions)

    def _forward(
        self,
        x: Tensor,
        number: Optional[Tensor],
        mask: Optional[Tensor],
        context: Optional[Tensor],
        positions: Optional[Tensor],
    ) -> Tensor:
        mask_of_own = None if self.crosses else mask
        attended = self._attention(self.tensor.enter(self.attention_norm(x)), number, mask_of_own, positions)
        attended = self.given(attended, "attention")
        x = self.attention_dropout(attended, number, self.training, x)
        if context is not None:
            crossed = self._cross(self.tensor.enter(self.cross_norm(x)), self.tensor.enter(context), number, mask)
            x = self.cross_dropout(crossed, number, self.training, x)
        given = self.given(self._mlp(self.tensor.enter(self.mlp_norm(x)), number), "mlp")
        return self.mlp_dropout(given, number, self.training, x)

    def given(self, y: Tensor, part: str) -> Tensor:
        """What the attention or MLP adds to its input."""
        return y

    def _attention(
        self, x: Tensor, number: Optional[Tensor], mask: Optional[Tensor], positions: Optional[Tensor]
    ) -> Tensor:
        qkv = linear(x, self.qkv.weight, self.qkv.bias, self.later)
        return self._joined(self.attention_out, passed(self._core, self._core_again, qkv, number, mask, positions))

    def _cross(self, x: Tensor, context: Tensor, number: Optional[Tensor], mask: Optional[Tensor]) -> Tensor:
        query = linear(x, self.cross_query.weight, self.cross_query.bias, self.later)
        kv = None if self.kept is None else self.kept.get("context")
        if kv is None:
            kv = linear(context, self.cross_kv.weight, self.cross_kv.bias, self.later)
        if self.kept is not None:
            self.kept["context"] = kv
        return self._joined(self.cross_out, passed(self._cross_core, self._core_again, query, kv, number, mask))

    @property
    def _drops(self) -> bool:
        return self.training and self.config.attention_dropout > 0

    @property
    def _core_again(self) -> bool:
        """Whether the attention's core is computed again: weights that dropout or a cap holds are too large to keep."""
        held = self.training if self.softcap is not None else self._drops and self.holds_weights
        return self.recompute == "selective" or held

    def _core(
        self, qkv: Tensor, number: Optional[Tensor], mask: Optional[Tensor], positions: Optional[Tensor]
    ) -> Tensor:
        """[batch, sequence, queries, keys and values of the heads] -> [batch, sequence, heads x width]."""
        batch, sequence, _ = qkv.shape
        width = self.config.head_width
        # Cut before the heads come forward: the backward pass then joins their gradients in place, with no copy.
        parts = qkv.split_with_sizes([share * width for share in self.shares], -1)  # torch.split itself is slow Python
        query, key, value = (part.view(batch, sequence, -1, width).transpose(1, 2) for part in parts)
        query, key = self.normalized(query, key)
        if self.config.position_embedding_type == ROTARY:
            cos, sin = self._angles(sequence, qkv)
            if positions is not None:
                cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
            query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        if self.kept is not None:
            if self.kept:
                key, value = torch.cat([self.kept["key"], key], 2), torch.cat([self.kept["value"], value], 2)
            if self.window is not None:
                key, value = key[:, :, -self.window :], value[:, :, -self.window :]
            self.kept.update({"key": key, "value": value})
        causal = self.causal and self.kept is None  # the one token that goes on sees all before it
        return self._attended(query, key, value, causal, self.core_key, number, mask, positions)

    def normalized(self, query: Tensor, key: Tensor) -> Tuple[Tensor, Tensor]:
        """Return the queries and keys [batch, heads, sequence, width] before they are turned."""
        return query, key

    def place_constants(self, device: torch.device, dtype: torch.dtype) -> None:
        """Works out once what torch.compile would have each layer's graph do."""
        if self.config.attention_dropout:
            self.holds_weights = holds_weights(device, self.config.head_width)
        if self.config.position_embedding_type == ROTARY:
            longest = max(self.config.sequence_length, self.config.decoder_tokens)
            self.angles = rotary(self.turned, longest, device, dtype)

    def _angles(self, sequence: int, like: Tensor) -> Tuple[Tensor, Tensor]:
        """Cosines and sines of at least so many places."""
        if self.angles is not None and len(self.angles[0]) >= sequence and self.angles[0].dtype == like.dtype:
            return self.angles
        return rotary(self.turned, sequence, like.device, like.dtype)

    def _cross_core(self, query: Tensor, kv: Tensor, number: Optional[Tensor], mask: Optional[Tensor]) -> Tensor:
        """query [batch, sequence, heads x width], kv [batch, context, keys and values of the heads]."""
        width = self.config.head_width
        queries = query.view(*query.shape[:2], -1, width).transpose(1, 2)
        key, value = kv.view(*kv.shape[:2], -1, width).transpose(1, 2).chunk(2, 1)
        if self.watch is not None:
            self.watch(mean_weights(queries, key, mask))
        return self._attended(queries, key, value, False, self.cross_core_key, number, mask)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        dropout_key: Tensor,
        number: Optional[Tensor],
        mask: Optional[Tensor],
        positions: Optional[Tensor] = None,
    ) -> Tensor:
        """query [batch, heads, sequence, width], the others [batch, groups, tokens, width] and mask [batch, tokens] ->
        [batch, sequence, heads x width]."""
        dropped: Optional[Dropped] = None
        if number is not None and self._drops:
            first, device = self.tensor.rank * self.heads, query.device
            heads = numbers(first, first + self.heads, device)
            rows = rows_of(dropout_key, number, heads, numbers(0, query.shape[-2], device))
            restricted = positions is not None or self.window is not None or self.softcap is not None
            holding = self.holds_weights or restricted
            dropped = Dropped(self.config.attention_dropout, rows, holding)
        window = self.window if causal else None
        return attend(query, key, value, causal, mask, dropped, positions, window, self.softcap).flatten(2)

    def _mlp(self, x: Tensor, number: Optional[Tensor]) -> Tensor:
        inner = linear(x, self.mlp_in.weight, self.mlp_in.bias, self.later)
        if self.relu:
            return self._joined(self.mlp_out, self._inner_dropped(F.relu(inner), number))
        if not self.config.swiglu:
            return self._joined(self.mlp_out, F.gelu(inner, approximate="tanh"))
        return self._joined(self.mlp_out, self.gate(inner))

    def _inner_dropped(self, x: Tensor, number: Optional[Tensor]) -> Tensor:
        """x [batch, sequence, inner width / tensor size], of which every rank drops what one rank alone would."""
        rate = self.config.hidden_dropout
        if not rate or number is None or not self.training:
            return x
        groups = math.gcd(self.config.inner, self.config.heads) // self.tensor.size
        places, first = numbers(0, x.shape[1], x.device), self.tensor.rank * groups
        rows = rows_of(self.relu_key, number, places, numbers(first, first + groups, x.device))
        return dropout(x.view(*x.shape[:2], groups, -1), rate, rows).flatten(2)

    def _joined(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """A linear layer whose input is shared out: partial products are summed, then the bias added once."""
        if self.tensor.size == 1:
            return linear(x, layer.weight, layer.bias, self.later)
        y = self.tensor.leave(linear(x, layer.weight, None, self.later))
        return y if layer.bias is None else y + layer.bias


class Head(nn.Module):
    """Final norm and logits, with a bias where the model's family has one."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.later: Optional[WeightGradients] = None
        self.norm = norm(config)
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size // tensor.size, config.hidden))
        self.bias: Optional[nn.Parameter] = None
        if "bias" in config.traits.parameters(config, "head"):
            self.bias = nn.Parameter(torch.empty(config.padded_vocab_size // tensor.size))

    def forward(self, x: Tensor) -> Union[Tensor, Tuple[Tensor, ...]]:
        """[batch, sequence, hidden] -> logits [batch, sequence, padded vocabulary / tensor size]."""
        return self.logits(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of what is normalized."""
        return linear(self.tensor.enter(x), self.word, self.bias, self.later)


@Fused
def _gated(inner: Tensor) -> Tensor:
    """[…, 2 x width] -> [..., width]: SwiGLU (Shazeer 2020)."""
    gate, up = inner.chunk(2, -1)
    return F.silu(gate) * up


@Fused
def gelu_gated(inner: Tensor) -> Tensor:
    """[…, 2 x width] -> [..., width]: GEGLU, with the tanh GELU."""
    gate, up = inner.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def empty_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Without weights: torch would draw some that are not used."""
    return skip_init(nn.Linear, inputs, outputs, bias=bias, device=torch.empty(0).device)  # type: ignore[no-untyped-call]


class Logits(nn.Module):
    """A matrix and a bias for the vocabulary."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.later: Optional[WeightGradients] = None
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size, config.head_inputs))
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, inputs] -> logits [batch, sequence, padded vocabulary]."""
        return linear(x, self.word, self.bias, self.later)
