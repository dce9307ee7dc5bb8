"""What is known of a family's models without torch, beside the blocks that torch makes of them."""

from __future__ import annotations

import math

from megatron_ext.contract.models.counts import crossing
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.task import Task


def assert_sizes_known(task: Task, model: ModelConfig) -> dict[str, int]:
    """Of all parameters, by name and shape, and of what crosses each cut; returns the numbers of each wire's tensor,
    for a micro-batch of one sample."""
    for block in task.blocks:
        made = {name: tuple(one.shape) for name, one in block.make(TensorGroup()).named_parameters()}
        assert made == {name: one.shape for name, one in model.traits.parameters(model, block.kind).items()}
    sizes = task.sizes(1)
    numbers = {
        name: math.prod(size if isinstance(size, int) else sizes[size] for size in wire.dims)
        for name, wire in task.wires.items()
    }
    for after in range(model.counted + 1):
        leaves = cut(task, [after, model.counted - after])[0].leaves
        assert sum(numbers[name] for name in leaves) == crossing(model, after), after
    return numbers
