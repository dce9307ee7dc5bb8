"""Mamba: selective state spaces that predict the next token (Gu and Dao 2023)."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

from megatron_ext.contract.keys import left_out
from megatron_ext.contract.models.hf_config import HfConfig, unless
from megatron_ext.contract.models.keys import NO_POSITIONS
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Stack
from megatron_ext.contract.models.tokens import TokenFamily, norm
from megatron_ext.families.mamba.options import MambaOptions

USUAL_LENGTH = 2048
"""Tokens of a sample where nothing says how many: those of the paper's models. A Mamba has no positions."""
OF_A_STATE = 9
"""Operations of the scan for each number of a token's states: its decay, what is added, the update, what is read."""


class Widths(NamedTuple):
    """The sizes of a layer."""

    channels: int
    state: int
    """Numbers in the state of a channel."""
    kernel: int
    rank: int
    """Numbers from which the time steps of all channels are computed."""


def widths_of(model: ModelConfig) -> Widths:
    """The sizes of a model's layers."""
    own = model.own(MambaOptions)
    rank = -(-model.hidden // 16) if own.mamba_time_step_rank is None else own.mamba_time_step_rank
    return Widths(own.mamba_expand * model.hidden, own.mamba_state_dim, own.mamba_conv_kernel, rank)


class _Mamba(TokenFamily):
    name = "mamba"
    summary = "Selective state spaces that predict the next token, the Mamba."
    model_types = ("mamba",)
    running_text = True
    metrics = ("loss", "perplexity")
    one_head = "model.family=mamba has no attention"
    recurrent = True
    always_recomputes = True
    positions = (NO_POSITIONS,)
    options = (
        *("normalization", "position_embedding_type", "untie_embeddings_and_output_weights"),
        *left_out(MambaOptions),
    )

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        return (Stack("layer", "layers", model.layers, model.sequence_length, causal=True),)

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        channels, state, kernel, rank = widths_of(model)
        return {
            **norm(model, "norm"),
            "mixer_in.weight": Parameter((2 * channels, model.hidden)),
            "conv.weight": Parameter((channels, 1, kernel)),
            "conv.bias": Parameter((channels,)),
            "selection.weight": Parameter((rank + 2 * state, channels)),
            "time_step.weight": Parameter((channels, rank)),
            "time_step.bias": Parameter((channels,)),
            "log_decay": Parameter((channels, state)),
            "skip": Parameter((channels,)),
            "mixer_out.weight": Parameter((model.hidden, channels)),
        }

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        """Both halves of what goes into the mixer, the convolution's result and its SiLU, the selection, the time steps
        before and after their softplus, the scan's result, the gate's SiLU, and the product of both. The states are
        computed again in the backward pass, as in the paper."""
        channels, state, _, rank = widths_of(model)
        return model.sequence_length * (9 * channels + rank + 2 * state) if kind == "layer" else 0

    def outside_activations(self, model: ModelConfig, kind: str) -> int:
        """What goes into the norm, and what leaves it."""
        return 2 * model.sequence_length * model.hidden if kind == "layer" else 0

    def operations(self, model: ModelConfig, kind: str) -> int:
        products = super().operations(model, kind)
        if kind != "layer":
            return products
        channels, state, _, _ = widths_of(model)
        return products + (OF_A_STATE - 2) * model.sequence_length * channels * state  # 2 are of log_decay's shape

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        config.must("hidden_act", "silu", "tdpp's Mamba uses SiLU")
        config.must("use_bias", False, "the mixer of tdpp's Mamba has no biases")
        config.must("use_conv_bias", True, "the convolution of tdpp's Mamba has a bias")
        hidden, expand = config.size("hidden_size", 768), config.size("expand", 2)
        inner = config.size("intermediate_size", expand * hidden)
        if inner != expand * hidden:
            raise config.differs("intermediate_size", inner, f"must be expand={expand} times hidden_size={hidden}")
        automatic = -(-hidden // 16)
        given = config.given("time_step_rank", "auto")
        rank = automatic if given == "auto" else config.size("time_step_rank")
        if config.flag("residual_in_fp32", True):
            config.notes.append("residuals have the number format of the run (residual_in_fp32=true)")
        return {
            "layers": config.size("num_hidden_layers", 32),
            "hidden": hidden,
            "heads": 1,
            "sequence_length": config.length(USUAL_LENGTH, bounded=False),
            "vocab_size": config.size("vocab_size", 50280),
            "normalization": "RMSNorm",
            **unless({"norm_epsilon": config.number("layer_norm_epsilon", 1e-5)}, norm_epsilon=1e-5),
            "position_embedding_type": "none",
            **unless({"mamba_state_dim": config.size("state_size", 16)}, mamba_state_dim=16),
            **unless({"mamba_expand": expand}, mamba_expand=2),
            **unless({"mamba_conv_kernel": config.size("conv_kernel", 4)}, mamba_conv_kernel=4),
            **unless({"mamba_time_step_rank": rank}, mamba_time_step_rank=automatic),
            **config.untied(True),
        }


FAMILY = _Mamba()
