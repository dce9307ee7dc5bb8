"""A micro-batch through all blocks of a user's own task, before the start: what is wrong with them is one message."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set

import torch
from torch import Tensor, nn

from megatron_ext.families.module.block import copied
from megatron_ext.families.module.code import (
    Randomness,
    UserCode,
    pass_back,
    require_gradients,
    require_loss,
    require_metrics,
)
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import Block, Micro, Task, Tensors, Wire

OF_ENGINE = ("first", "later")
"""Attributes that the engine sets in a block's module."""


class _Passed(NamedTuple):
    """A block after its forward pass."""

    block: Block
    module: nn.Module
    given: Tensors


class Walk:
    """One micro-batch through all blocks, cut off from each other as on stages."""

    def __init__(
        self, task: Task, code: UserCode, micro: Micro, sizes: Mapping[str, int], dtype: torch.dtype, device: str
    ) -> None:
        self._task = task
        self._code = code
        self._micro = micro.to(torch.device(device))
        self._sizes = sizes
        self._dtype = dtype
        self._device = device
        self._held: Tensors = dict(self._micro.inputs)
        """Each wire, cut off from the block that gave it."""
        self._parameters: Dict[str, nn.Parameter] = {}
        """Parameters by their names in the whole model."""
        self._name_of: Dict[int, str] = {}
        """Names of parameters, as the user's code made them."""
        self._made: List[nn.Module] = []
        """Kept, so that no two parameters have the same `id`."""

    def drawing(self) -> Set[str]:
        """The blocks that draw random numbers."""
        drawing = set()
        passed = []
        for block in self._task.blocks:
            module = self._module(block)
            with self._code.running(f"block {block.name}"), Randomness() as drawn:
                given = self._forward(block, module)
            passed.append(_Passed(block, module, given))
            if drawn.any:
                drawing.add(block.name)
        self._require_ties()
        self._backward(passed)
        return drawing

    def _module(self, block: Block) -> nn.Module:
        with self._code.running(f"making block {block.name}"):
            made = block.make(TensorGroup())
        if not isinstance(made, nn.Module):
            raise self._code.fault(
                f"make of block {block.name} returns a {type(made).__name__}, but must return a module"
            )
        for name in OF_ENGINE:
            if not isinstance(getattr(made, name, None), (int, type(None))):
                raise self._code.fault(
                    f"the module of block {block.name} has an attribute {name}, which the engine sets there; rename it"
                )
        self._made.append(made)
        module = copied(made, self._dtype, self._device)
        for inner, parameter in made.named_parameters():
            name = f"{block.name}.{inner}"
            other = self._name_of.setdefault(id(parameter), name)
            if parameter.requires_grad and other != name and self._task.tied.get(name) != other:
                raise self._code.fault(
                    f"{name} and {other} are one parameter, but would be two on different stages; declare it: "
                    f"tied = {{{name!r}: {other!r}}}"
                )
        self._parameters.update({f"{block.name}.{inner}": one for inner, one in module.named_parameters()})
        return module

    def _forward(self, block: Block, module: nn.Module) -> Tensors:
        taken = [self._held[name].clone() for name in block.takes]
        versions = [tensor._version for tensor in taken]
        result = module(*taken)
        for name, tensor, before in zip(block.takes, taken, versions):
            if tensor._version != before:
                raise self._code.fault(
                    f"block {block.name} changes {name} in place, which it takes; use an operation that is not in place"
                )
        results = (result,) if len(block.gives) == 1 else result
        if not isinstance(results, (tuple, list)) or len(results) != len(block.gives):
            count = len(results) if isinstance(results, (tuple, list)) else 1
            raise self._code.fault(
                f"block {block.name} gives {', '.join(block.gives)}, but returns {count} value{'s' * (count != 1)}"
            )
        given = dict(zip(block.gives, results))
        for name, tensor in given.items():
            self._require_wire(block, self._task.wires[name], tensor)
            self._held[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        return given

    def _require_wire(self, block: Block, wire: Wire, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise self._code.fault(f"block {block.name} returns a {type(tensor).__name__} as {wire.name}, not a tensor")
        unknown = [dim for dim in wire.dims if isinstance(dim, str) and dim not in self._sizes]
        if unknown:
            raise self._code.fault(f"wire {wire.name} has the size {unknown[0]!r}, which sizes(micro_batch_size) lacks")
        said = [self._sizes[dim] if isinstance(dim, str) else dim for dim in wire.dims]
        dtype = self._dtype if wire.dtype is None else wire.dtype
        if list(tensor.shape) != said or tensor.dtype != dtype:
            raise self._code.fault(
                f"block {block.name} gives {wire.name} of shape {list(tensor.shape)} ({tensor.dtype}), but wires says "
                f"{said} ({dtype}); what crosses between stages has one shape in all micro-batches"
            )
        if tensor.requires_grad and not wire.gradient:
            raise self._code.fault(
                f"block {block.name} gives {wire.name} with a gradient, which would be lost: its wire has "
                "gradient=False; detach it, or let the wire have gradient=True"
            )
        if wire.gradient and not tensor.is_floating_point():
            raise self._code.fault(f"wire {wire.name} is of {tensor.dtype} and has no gradient; say gradient=False")

    def _require_ties(self) -> None:
        order = {name: number for number, name in enumerate(self._parameters)}
        for copy, owner in self._task.tied.items():
            for name in (copy, owner):
                if name not in order:
                    raise self._code.fault(f"{copy} is tied to {owner}, but no block has a parameter {name}")
            a, b = self._parameters[copy], self._parameters[owner]
            if a.shape != b.shape:
                raise self._code.fault(f"{copy} {list(a.shape)} is tied to {owner} {list(b.shape)}, of another shape")
            if owner in self._task.tied or order[owner] > order[copy]:
                raise self._code.fault(
                    f"{copy} is tied to {owner}, which is "
                    + ("tied itself" if owner in self._task.tied else "in a later block")
                    + "; the owner must be the first of all that are tied"
                )

    def _backward(self, passed: Sequence[_Passed]) -> None:
        left = {name: self._held[name].clone() for name in self._task.outputs}
        with self._code.running("loss(left, micro, tensor)"):
            loss = self._task.loss(left, self._micro, TensorGroup())
        require_loss(self._code, "loss(left, micro, tensor)", loss)
        with self._code.running("metrics(left, micro, tensor)"), torch.no_grad():
            metrics = self._task.metrics(left, self._micro, TensorGroup())
        require_metrics(self._code, "metrics(left, micro, tensor)", metrics)
        with self._code.running("the backward pass of loss(left, micro, tensor)"):
            torch.autograd.backward(loss.sum())
        for block, _, given in reversed(passed):
            with self._code.running(f"the backward pass of block {block.name}"):
                pass_back(given, self._held)
        used = {name for name, one in self._parameters.items() if not one.requires_grad or one.grad is not None}
        used |= {owner for copy, owner in self._task.tied.items() if copy in used}
        tied = {copy for copy, owner in self._task.tied.items() if owner in used}
        require_gradients(self._code, [name for name in self._parameters if name not in used | tied])
