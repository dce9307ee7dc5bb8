"""A task made of any blocks, for tests of what does not depend on a family of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.data.samples import Samples
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import SEQUENCE, Block, Micro, Task, Tensors, Wire

WIDTH = 4


class GraphTask(Task):
    """Blocks with one input x and one output, [batch, WIDTH] all; the loss is the sum of squares."""

    def __init__(
        self,
        blocks: Sequence[Block],
        x: str,
        y: str,
        tied: Mapping[str, str] | None = None,
        wires: Sequence[Wire] | None = None,
    ) -> None:
        self.blocks = blocks
        self.inputs = (x,)
        self.outputs = (y,)
        self.tied = {} if tied is None else tied
        given = [Wire(name, ("batch", WIDTH)) for block in blocks for name in block.gives] if wires is None else wires
        self.wires = {wire.name: wire for wire in given}

    def samples(self, split: str, count: int) -> Samples:
        raise NotImplementedError  # it trains on what a test makes

    def sizes(self, micro_batch_size: int) -> dict[str, int]:
        return {"batch": micro_batch_size, SEQUENCE: 8}

    def micro(self, sample: Tensors) -> Micro:
        return Micro({self.inputs[0]: sample["x"]}, {})

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        return self.micro({"x": torch.randn(micro_batch_size, WIDTH, generator=source)})

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        return left[self.outputs[0]].square().sum()

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        source = torch.Generator().manual_seed(hash(self.tied.get(name, name)) % 2**31)
        parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=parameter.dtype))
