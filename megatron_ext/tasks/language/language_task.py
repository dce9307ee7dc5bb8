"""What transformers over tokens have in common, whatever they predict: layers in a row, weights, their names."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.models.counts import block_parameters, tied_parameters
from megatron_ext.contract.models.pieces import Parameter, Stack
from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup
from megatron_ext.tasks.cut import block_of
from megatron_ext.tasks.initial_weights import draw
from megatron_ext.tasks.language.transformer import TransformerLayer
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE, Block, Task, Wire

_LARGEST_EXPONENT = 700.0
"""Of e, for a number."""


class LanguageTask(Task):
    """A family of `ModelConfig`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._model = plan.model
        self._seed = plan.train.seed
        self.tied: Mapping[str, str] = tied_parameters(plan.model)
        self._stacks = {stack.kind: stack for stack in plan.model.stacks()}
        self._parameters = {kind: block_parameters(plan.model, kind) for kind, _ in plan.model.all_kinds()}

    def sizes(self, micro_batch_size: int) -> Dict[str, int]:
        model = self._model
        return {"batch": micro_batch_size, SEQUENCE: model.sequence_length, DECODER_SEQUENCE: model.decoder_tokens}

    def layers(self, stack: Stack, wires: str, sequence: str, taken: Tuple[str, ...]) -> Tuple[List[Block], List[Wire]]:
        """The blocks of a stack, and the wires between them: `wires.0` goes into the first, and so on.

        `taken` is what each block takes after its wire (`TransformerLayer.forward`).
        """
        names = [f"{wires}.{number}" for number in range(stack.layers + 1)]
        blocks = [
            Block(
                name,
                stack.kind,
                (names[number], *taken),
                (names[number + 1],),
                partial(
                    TransformerLayer,
                    self._model,
                    stack=stack,
                    recompute=self._plan.recompute,
                    name=name,
                    seed=self._seed,
                ),
            )
            for number, name in enumerate(f"{stack.name}.{number}" for number in range(stack.layers))
        ]
        return blocks, [Wire(name, ("batch", sequence, self._model.hidden)) for name in names]

    def shard(self, name: str) -> Optional[Shard]:
        parameter = self._parameter(name)
        return None if parameter.cut is None else Shard(parameter.cut, parameter.pieces)

    def rows(self, name: str) -> Optional[int]:
        return self._parameter(name).rows

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
        std = 0.02
        if "_out." in name:
            std /= math.sqrt(2 * self._stacks[block_of(self.blocks, name).kind].layers)
        draw(parameter, whole, filled, shard, tensor.size, tensor.rank, std, self._source(name))

    def _source(self, name: str) -> torch.Generator:
        """The random numbers of a parameter of the whole model; a tied one has its owner's."""
        return torch.Generator().manual_seed(_seed(self._seed, self.tied.get(name, name)))

    def _parameter(self, name: str) -> Parameter:
        block = block_of(self.blocks, name)
        return self._parameters[block.kind][name[len(block.name) + 1 :]]


def _seed(seed: int, name: str) -> int:
    """One random stream per parameter of the whole model.

    Of 32 bits, for torch's generator on the CPU drops all above. Of one name no two seeds have the same.
    """
    return zlib.crc32(name.encode(), seed)


def perplexity(loss: float) -> float:
    """Of the mean negative logarithm of the probabilities; infinite where no number is as large."""
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
