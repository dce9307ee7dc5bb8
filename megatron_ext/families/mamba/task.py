"""Mamba's blocks in plain torch: a token's state is that before it, decayed, and what the token adds (Gu and Dao 2023).

What decays, what is added and what is read depends on the token (the selection). Every sample begins with a state of
zeros.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.families.mamba import widths_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.language_task import NextTokenTask
from megatron_ext.tasks.language.norms import norm
from megatron_ext.tasks.language.transformer import Embedding, Head, empty_linear
from megatron_ext.tasks.linear import WeightGradients, linear
from megatron_ext.tasks.repeatable import passed
from megatron_ext.tasks.task import SEQUENCE, Block, Placement, Wire

TIME_STEPS = (0.001, 0.1)
"""Between these lie the time steps of a new model, evenly in their logarithms."""


class MambaTask(NextTokenTask):
    """Predicts the next token. Unless untied, the head's matrix is the word embedding."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        names = [f"hidden.{number}" for number in range(model.layers + 1)]
        layer = partial(MambaLayer, model, again=plan.recompute == "full")
        embedding = partial(Embedding, model, seed=self._seed)
        self.blocks = [
            Block("embedding", "embedding", ("tokens",), (names[0],), embedding, Placement.FIRST),
            *(
                Block(f"layers.{number}", "layer", (names[number],), (names[number + 1],), layer)
                for number in range(model.layers)
            ),
            Block("head", "head", (names[-1],), self.outputs, partial(Head, model), Placement.LAST),
        ]
        wires = [Wire(name, ("batch", SEQUENCE, model.hidden)) for name in names]
        logits = Wire("logits", ("batch", SEQUENCE, model.padded_vocab_size))
        self.wires = {wire.name: wire for wire in (*wires, logits)}

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """States decay at rates from 1 up (S4D-Real), time steps are as `TIME_STEPS` says, a channel's input is added
        whole; convolutions and the time steps' matrix are uniform, as torch's; the rest as in GPT-2."""
        _, state, kernel, rank = widths_of(self._model)
        kind = name.split(".", 2)[-1] if name.startswith("layers.") else ""
        if parameter.is_meta:
            return
        if kind == "log_decay":
            parameter.copy_(torch.arange(1.0, state + 1).log().expand(parameter.shape))
        elif kind == "skip":
            parameter.fill_(1.0)
        elif kind in ("conv.weight", "time_step.weight"):
            self._draw(name, parameter, 1 / math.sqrt(kernel if kind == "conv.weight" else rank), tensor)
        elif kind == "time_step.bias":
            low, high = map(math.log, TIME_STEPS)
            steps = torch.empty(parameter.shape).uniform_(low, high, generator=self._source(name)).exp()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # of which softplus makes the steps
        else:
            super().initialise(name, parameter, tensor)


class MambaLayer(nn.Module):
    """A norm and a mixer: every channel's tokens are convolved and scanned, and what comes out is gated."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, again: bool) -> None:
        """`again` has the backward pass compute the layer once more."""
        super().__init__()
        self.again = again
        self.later: Optional[WeightGradients] = None
        channels, state, kernel, rank = widths_of(config)
        self.sizes = [rank, state, state]
        self.norm = norm(config)
        self.mixer_in = empty_linear(config.hidden, 2 * channels, False)
        self.conv = _empty_convolution(channels, kernel)
        self.selection = empty_linear(channels, sum(self.sizes), False)
        self.time_step = empty_linear(rank, channels, True)
        self.log_decay = nn.Parameter(torch.empty(channels, state))
        self.skip = nn.Parameter(torch.empty(channels))
        self.mixer_out = empty_linear(channels, config.hidden, False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        return passed(self._forward, self.again, x)

    def _forward(self, x: Tensor) -> Tensor:
        inner, gate = linear(self.norm(x), self.mixer_in.weight, None, self.later).chunk(2, -1)
        convolved = self.conv(inner.transpose(1, 2))[..., : x.shape[1]]  # a token sees none behind it
        inner = F.silu(convolved).transpose(1, 2).contiguous()
        step, write, read = linear(inner, self.selection.weight, None, self.later).split_with_sizes(self.sizes, -1)
        step = F.softplus(linear(step, self.time_step.weight, self.time_step.bias, self.later))
        scanned = passed(scan, True, inner, step, write, read, self.log_decay, self.skip)
        return x + linear(scanned * F.silu(gate), self.mixer_out.weight, None, self.later)


def scan(x: Tensor, step: Tensor, write: Tensor, read: Tensor, log_decay: Tensor, skip: Tensor) -> Tensor:
    """The selective scan, in fp32: equation 2 of Gu and Dao 2023, with `step` as its Δ, `write` B, `read` C, `skip` D.

    x, step [batch, sequence, channels]; write, read [batch, sequence, state]; log_decay [channels, state], skip
    [channels] -> [batch, sequence, channels].
    """
    wide, steps = x.float(), step.float()
    kept = torch.exp(steps.unsqueeze(-1) * -log_decay.float().exp())
    added = (steps * wide).unsqueeze(-1) * write.float().unsqueeze(-2)
    state = torch.zeros_like(added[:, 0])
    states = []
    for keep, add in zip(kept.unbind(1), added.unbind(1)):
        state = torch.addcmul(add, keep, state)
        states.append(state)
    seen = (torch.stack(states, 1) @ read.float().unsqueeze(-1)).squeeze(-1)
    return (seen + wide * skip.float()).to(x.dtype)


def _empty_convolution(channels: int, kernel: int) -> nn.Conv1d:
    """A convolution of every channel by itself, whose weights are not drawn."""
    return skip_init(  # type: ignore[no-untyped-call]
        *(nn.Conv1d, channels, channels, kernel),
        **{"groups": channels, "padding": kernel - 1, "device": torch.empty(0).device},
    )


TASK = MambaTask
