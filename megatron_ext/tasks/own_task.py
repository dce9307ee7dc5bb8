"""A `Task` of the user's own, looked at before anything is started: two micro-batches pass its blocks, as on stages.

It is done on shapes alone (torch's device `meta`) where the user's code allows it, else on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import check
from megatron_ext.tasks.faults import CPU, META, Fault, Randomness, require_gradients, require_loss, require_metrics
from megatron_ext.tasks.task import DTYPES, Block, Micro, Task, Tensors, Wire
from megatron_ext.tasks.user_block import copied, repeatable
from megatron_ext.tasks.user_code import UserCode

OF_ENGINE = ("first", "later")
"""Attributes that the engine sets in a block's module."""


def checked(task: Task, code: UserCode, plan: Plan) -> Task:
    """The task, whose blocks draw the same random numbers in every layout, and are computed again if the plan says so.

    Raises:
        EngineError: it cannot be trained.
    """
    _require_attributes(task, code)
    try:
        check(task)
    except EngineError as error:
        raise EngineError(f"model.code={code.spec}: {error}") from error
    micros = _micros(task, code, plan.micro_batch_size)
    dtype = DTYPES[plan.train.precision]
    with code.running(f"sizes({plan.micro_batch_size})"):
        sizes = dict(task.sizes(plan.micro_batch_size))
    try:
        drawing = _Walk(task, code, micros[0], sizes, dtype, META).drawing()
    except Fault:
        raise
    except Exception:  # noqa: BLE001  (the user's code, which asks for numbers, or is wrong: the CPU will tell)
        drawing = set()
        for micro in micros:
            drawing |= _Walk(task, code, micro, sizes, dtype, CPU).drawing()
    _require_initial_weights(task, code)
    task.blocks = [_repeatable(block, plan, block.name in drawing) for block in task.blocks]
    return task


def _require_attributes(task: Task, code: UserCode) -> None:
    rows = (tuple, list)
    for attribute, kinds, of in (
        ("blocks", rows, Block),
        ("wires", (dict,), str),
        ("inputs", rows, str),
        ("outputs", rows, str),
        ("tied", (dict,), str),
    ):
        found = getattr(task, attribute, None)
        if not isinstance(found, kinds) or not all(isinstance(one, of) for one in found):
            raise EngineError(
                f"model.code={code.spec}: {attribute} of {type(task).__name__} must be a "
                f"{'dict by name' if kinds == (dict,) else f'tuple or list of {of.__name__}'}, but is {found!r:.80}"
            )
    for block in task.blocks:
        for attribute in ("takes", "gives"):
            found = getattr(block, attribute)
            if not isinstance(found, rows):
                raise EngineError(
                    f"model.code={code.spec}: {attribute} of block {block.name} must be a tuple of names, but is "
                    f"{found!r}"
                )


def _repeatable(block: Block, plan: Plan, draws: bool) -> Block:
    if not draws and plan.recompute != "full":
        return block
    return block._replace(make=partial(_made, block, plan.train.seed if draws else None, plan.recompute == "full"))


def _made(block: Block, seed: Any, recompute: bool, tensor: TensorGroup) -> nn.Module:
    return repeatable(block.make(tensor), block.name, seed, recompute)


def _micros(task: Task, code: UserCode, micro_batch_size: int) -> List[Micro]:
    """The first two micro-batches."""
    what, count = f"samples('train', {2 * micro_batch_size})", 2 * micro_batch_size
    with code.running(what):
        samples = task.samples("train", count)
    if not isinstance(samples, Samples) or not isinstance(getattr(samples, "order", None), dict):
        raise EngineError(
            f"model.code={code.spec}: {what} returns a {type(samples).__name__}, but must return a "
            "megatron_ext.data.samples.Samples, with `order`: a dict of numbers that the samples' order follows from"
        )
    if len(samples) < count:
        raise EngineError(f"model.code={code.spec}: {what} returns only {len(samples)} samples; let them begin anew")
    micros = []
    for numbers in np.arange(count).reshape(2, micro_batch_size):
        with code.running(f"batch() of {what}"):
            batch = samples.batch(numbers)
        with code.running("micro(sample)"):
            micro = task.micro({name: torch.from_numpy(array) for name, array in batch.items()})
        if not isinstance(micro, Micro):
            raise EngineError(
                f"model.code={code.spec}: micro(sample) returns a {type(micro).__name__}, but must return a "
                "megatron_ext.tasks.task.Micro"
            )
        missing = [name for name in task.inputs if name not in micro.inputs]
        if missing:
            raise EngineError(
                f"model.code={code.spec}: micro(sample) gives no input {', '.join(missing)}, which `inputs` names; it "
                f"gives {', '.join(micro.inputs) or 'none'}"
            )
        weight = micro.weight
        if weight is not None and not (isinstance(weight, Tensor) and weight.numel() == 1):
            raise EngineError(f"model.code={code.spec}: micro(sample) must give its weight as a tensor of one number")
        micros.append(micro)
    return micros


class _Passed(NamedTuple):
    """A block after its forward pass."""

    block: Block
    module: nn.Module
    given: Tensors


class _Walk:
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
        """By wire: cut off from the block that gave it."""
        self._parameters: Dict[str, nn.Parameter] = {}
        """By name in the whole model."""
        self._name_of: Dict[int, str] = {}
        """Of parameters, as the user's code made them."""
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
            raise self._fault(f"make of block {block.name} returns a {type(made).__name__}, but must return a module")
        for name in OF_ENGINE:
            if not isinstance(getattr(made, name, None), (int, type(None))):
                raise self._fault(
                    f"the module of block {block.name} has an attribute {name}, which the engine sets there; rename it"
                )
        self._made.append(made)
        module = copied(made, self._dtype, self._device)
        for inner, parameter in made.named_parameters():
            name = f"{block.name}.{inner}"
            other = self._name_of.setdefault(id(parameter), name)
            if parameter.requires_grad and other != name and self._task.tied.get(name) != other:
                raise self._fault(
                    f"{name} and {other} are one parameter, which they would not be on two stages; say so: "
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
                raise self._fault(
                    f"block {block.name} changes {name} in place, which it takes; use an operation that is not in place"
                )
        results = (result,) if len(block.gives) == 1 else result
        if not isinstance(results, (tuple, list)) or len(results) != len(block.gives):
            count = len(results) if isinstance(results, (tuple, list)) else 1
            raise self._fault(f"block {block.name} gives {', '.join(block.gives)}, but returns {count} value(s)")
        given = dict(zip(block.gives, results))
        for name, tensor in given.items():
            self._require_wire(block, self._task.wires[name], tensor)
            self._held[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        return given

    def _require_wire(self, block: Block, wire: Wire, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise self._fault(f"block {block.name} returns a {type(tensor).__name__} as {wire.name}, not a tensor")
        unknown = [dim for dim in wire.dims if isinstance(dim, str) and dim not in self._sizes]
        if unknown:
            raise self._fault(f"wire {wire.name} has the size {unknown[0]!r}, which sizes(micro_batch_size) lacks")
        said = [self._sizes[dim] if isinstance(dim, str) else dim for dim in wire.dims]
        dtype = self._dtype if wire.dtype is None else wire.dtype
        if list(tensor.shape) != said or tensor.dtype != dtype:
            raise self._fault(
                f"block {block.name} gives {wire.name} of shape {list(tensor.shape)} ({tensor.dtype}), but wires says "
                f"{said} ({dtype}); what crosses between stages has one shape in all micro-batches"
            )
        if tensor.requires_grad and not wire.gradient:
            raise self._fault(
                f"block {block.name} gives {wire.name} with a gradient, which would be lost: its wire has "
                "gradient=False; detach it, or let the wire have gradient=True"
            )
        if wire.gradient and not tensor.is_floating_point():
            raise self._fault(f"wire {wire.name} is of {tensor.dtype} and has no gradient; say gradient=False")

    def _require_ties(self) -> None:
        order = {name: number for number, name in enumerate(self._parameters)}
        for copy, owner in self._task.tied.items():
            for name in (copy, owner):
                if name not in order:
                    raise self._fault(f"{copy} is tied to {owner}, but no block has a parameter {name}")
            a, b = self._parameters[copy], self._parameters[owner]
            if a.shape != b.shape:
                raise self._fault(f"{copy} {list(a.shape)} is tied to {owner} {list(b.shape)}, of another shape")
            if owner in self._task.tied or order[owner] > order[copy]:
                raise self._fault(
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
            roots = [name for name, one in given.items() if one.requires_grad and self._held[name].grad is not None]
            with self._code.running(f"the backward pass of block {block.name}"):
                if roots:
                    torch.autograd.backward([given[name] for name in roots], [self._held[name].grad for name in roots])
        used = {name for name, one in self._parameters.items() if not one.requires_grad or one.grad is not None}
        used |= {owner for copy, owner in self._task.tied.items() if copy in used}
        tied = {copy for copy, owner in self._task.tied.items() if owner in used}
        require_gradients(self._code, [name for name in self._parameters if name not in used | tied])

    def _fault(self, text: str) -> Fault:
        return Fault(f"model.code={self._code.spec}: {text}")


def _require_initial_weights(task: Task, code: UserCode) -> None:
    """That they follow from a parameter's name alone, and are the same where parameters are tied."""
    tied = {*task.tied, *task.tied.values()}
    kinds: Set[str] = set()
    found: Tensors = {}
    for block in task.blocks:
        if block.kind in kinds and not any(name.startswith(f"{block.name}.") for name in tied):
            continue
        kinds.add(block.kind)
        weights, others = (_initial_weights(task, code, block, seed) for seed in (0, 1))
        for name, weight in weights.items():
            if not torch.equal(weight, others[name]):
                raise EngineError(
                    f"model.code={code.spec}: the initial {name} depends on what was drawn before, so it would differ "
                    "with the layout; initialise() must fill it with numbers that follow from its name and the seed"
                )
        found.update(weights)
    for copy, owner in task.tied.items():
        if copy in found and owner in found and not torch.equal(found[copy], found[owner]):
            raise EngineError(
                f"model.code={code.spec}: initialise() fills {copy} with other numbers than {owner}, to which it is "
                "tied; both must follow from the owner's name: self.tied.get(name, name)"
            )


def _initial_weights(task: Task, code: UserCode, block: Block, drawn_before: int) -> Tensors:
    weights = {}
    with torch.random.fork_rng([]):
        torch.manual_seed(drawn_before)
        for inner, parameter in block.make(TensorGroup()).named_parameters():
            name, weight = f"{block.name}.{inner}", parameter.detach().clone()
            if parameter.requires_grad:
                with code.running(f"initialise({name!r}, parameter, tensor)"):
                    task.initialise(name, weight, TensorGroup())
            weights[name] = weight
    return weights
