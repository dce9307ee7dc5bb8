"""Families of LSTMs over tokens."""

from __future__ import annotations

from typing import Tuple

from megatron_ext.contract.models.keys import NO_POSITIONS
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Stack
from megatron_ext.contract.models.tokens import TokenFamily, logits_bias

CELL_KEEPS = 7
"""Numbers of a cell that an LSTM keeps beside its inputs: four gates, the cell, its tanh, and the result."""


class LstmFamily(TokenFamily):
    """Layers of one LSTM each, without attention. They keep what goes in, the gates, and the cells before and after
    their tanh."""

    recurrent = True
    has_norms = False
    positions = (NO_POSITIONS,)
    without = ("norm_epsilon",)

    def widths(self, model: ModelConfig, kind: str) -> Tuple[int, int]:
        """The width of what goes into a layer, and of what leaves it."""
        return model.hidden, model.hidden

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        return lstm_parameters("lstm", *self.widths(model, stack.kind))

    def beside_logits(self, model: ModelConfig) -> Parameters:
        return logits_bias(model)

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        inputs, outputs = self.widths(model, kind)
        return sum(stack.tokens * (inputs + CELL_KEEPS * outputs) for stack in model.stacks() if stack.kind == kind)


def lstm_parameters(name: str, inputs: int, hidden: int) -> Parameters:
    """An LSTM with two biases for each gate, as torch's."""
    gates = 4 * hidden
    return {
        f"{name}.weight_ih_l0": Parameter((gates, inputs)),
        f"{name}.weight_hh_l0": Parameter((gates, hidden)),
        f"{name}.bias_ih_l0": Parameter((gates,)),
        f"{name}.bias_hh_l0": Parameter((gates,)),
    }
