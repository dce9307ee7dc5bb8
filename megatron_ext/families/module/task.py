"""A module of the user's own as a task: its blocks, its loss and its samples come from one Python file."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor, fx, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples
from megatron_ext.families.module import tree
from megatron_ext.families.module.block import HELD_AS, Form, Pieces, UserBlock, children, copied, one_piece
from megatron_ext.families.module.capture import capture
from megatron_ext.families.module.code import UserCode, load, make, require_gradients
from megatron_ext.families.module.look import Functions, Given, Look, Sample, as_number, look_at, returned, wires_of
from megatron_ext.families.module.own_task import checked
from megatron_ext.families.module.samples import INPUTS, TARGETS, UserSamples
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import DTYPES, Block, Micro, Task, Tensors, Wire, kinds_of, ties

LOSS, METRICS, WEIGHT = "loss", "metrics", "weight"
"""Functions of the user's file."""
THROUGH = "capture_through"
"""In the user's file: classes that `capture` follows inside."""


class ModuleTask(Task):
    """Blocks that a user's module consists of. Their weights are those that its own code draws under the run's seed."""

    def __init__(self, plan: Plan, code: UserCode, model: nn.Module) -> None:
        """Raises EngineError: what the user's file holds cannot be trained."""
        self._code = code
        self._seed = plan.train.seed
        self._dtype = DTYPES[plan.train.precision]
        self._micro_batch_size = plan.micro_batch_size
        self._train: Samples = UserSamples(code, "train", 2 * plan.micro_batch_size, plan.train.seed)
        self._functions = _functions(code)
        arguments = self._arguments(model)
        pieces = _pieces(plan, code, model, tuple(arguments))
        _require_all(code, model, pieces)
        self._pieces, self._given = pieces, arguments
        look = self._look(plan.micro_batch_size)
        self._output, self._values = pieces.output, look.values
        returned_wires = wires_of(pieces.output, look.values)
        self.inputs = tuple(dict.fromkeys(wire for given in arguments.values() for wire in given.wires))
        self.outputs = tuple(dict.fromkeys(name for name in returned_wires if name in look.wires))
        self.wires: Mapping[str, Wire] = look.wires
        self._wires_at: Dict[int, Mapping[str, Wire]] = {plan.micro_batch_size: self.wires}
        self.tied, recompute = _tied(pieces), plan.recompute == "full"
        kinds = _kinds(pieces, look)
        self.blocks = [
            Block(
                piece.name,
                kind,
                tuple(wire for name in piece.takes for wire in look.values[name].wires),
                tuple(wire for name in piece.gives for wire in look.values[name].wires),
                partial(_made, piece.module, form, piece.name, self._seed, recompute),
            )
            for piece, form, kind in zip(pieces.pieces, look.forms, kinds)
        ]

    def samples(self, split: str, count: int) -> Samples:
        return UserSamples(self._code, split, count, self._seed)

    def epoch(self, split: str) -> Optional[int]:
        return UserSamples(self._code, split, 1, self._seed).length

    def wires_at(self, micro_batch_size: int) -> Mapping[str, Wire]:
        """Work out the wires by another look: the batch may be inside a dimension, as in [batch * tokens, width]."""
        if micro_batch_size not in self._wires_at:
            try:
                with torch.random.fork_rng([]):
                    self._wires_at[micro_batch_size] = self._look(micro_batch_size).wires
            except EngineError as error:
                raise EngineError(
                    f"the last micro-batch of a split has only {micro_batch_size} of {self._micro_batch_size} samples, "
                    "and this model cannot take it; choose a parallel.micro_batch_size that divides the split, "
                    f"or give train.eval_iterations, a number of whole global batches: {error}"
                ) from error
        return self._wires_at[micro_batch_size]

    def _look(self, micro_batch_size: int) -> Look:
        examples = [self._example(number, micro_batch_size) for number in range(2)]
        return look_at(self._code, self._pieces, self._given, examples, self._functions, self._dtype)

    def micro(self, sample: Tensors) -> Micro:
        inputs, targets = (
            {name: sample[name] for name in sample if name.partition(".")[0] == part} for part in (INPUTS, TARGETS)
        )
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                inputs[name] = tensor.to(self._dtype)
        if self._functions.weight is None:
            return Micro(inputs, targets)
        with self._code.running("weight(targets)"):
            weight = as_number(self._functions.weight(self._targets(targets)))
        return Micro(inputs, targets, weight=weight)

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        """The first samples, for no others are known to be right."""
        return self.micro(self._first(0, micro_batch_size))

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """What the user's `loss` says of the model's outputs, in fp32 at least, and the targets."""
        with self._code.running("loss(outputs, targets)"):
            loss: Tensor = self._functions.loss(self._outputs(left, micro), self._targets(micro.targets))
        return loss.reshape(())

    def metrics(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensors:
        if self._functions.metrics is None:
            return {}
        with self._code.running("metrics(outputs, targets)"):
            found = self._functions.metrics(self._outputs(left, micro), self._targets(micro.targets))
        return {name: as_number(value).reshape(()) for name, value in found.items()}

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Nothing: the module came with its weights."""

    def _arguments(self, model: nn.Module) -> Dict[str, Given]:
        """What the forward pass is given, by the names of its arguments."""
        assert isinstance(self._train, UserSamples)
        inputs = self._train.item.inputs
        wires = tree.names(INPUTS, inputs)
        if not isinstance(inputs, tree.Nest):
            return {_positional(self._code, model, 1)[0]: Given(inputs, tuple(wires))}
        named = inputs.keys if issubclass(inputs.kind, dict) else _positional(self._code, model, len(inputs.parts))
        found = {}
        for name, part in zip(named, inputs.parts):
            count = len(tree.paths(part))
            found[name], wires = Given(part, tuple(wires[:count])), wires[count:]
        return found

    def _outputs(self, left: Tensors, micro: Micro) -> Any:
        tensors = {name: _wide(one) for name, one in {**micro.inputs, **left}.items()}
        return returned(self._output, self._values, tensors)

    def _targets(self, targets: Tensors) -> Any:
        assert isinstance(self._train, UserSamples)
        shape = self._train.item.targets
        return tree.together(shape, [targets[name] for name in tree.names(TARGETS, shape)])

    def _example(self, number: int, micro_batch_size: int) -> Sample:
        micro = self.micro(self._first(number, micro_batch_size))
        return Sample(micro.inputs, self._targets(micro.targets))

    def _first(self, number: int, micro_batch_size: int) -> Tensors:
        numbers = np.arange(number * micro_batch_size, (number + 1) * micro_batch_size) % len(self._train)
        return {name: torch.from_numpy(array) for name, array in self._train.batch(numbers).items()}


def users_task(plan: Plan) -> Task:
    """The task that `model.code` of a plan leads to: a `Task` of the user's own, or one made of the user's module.
    Raises EngineError: it leads nowhere, or to something that cannot be trained."""
    assert plan.model.code is not None
    with torch.random.fork_rng([]):
        torch.manual_seed(plan.train.seed)  # the file may make the model while it is imported
        code = load(plan.model.code, plan.model.code_digest)
        torch.manual_seed(plan.train.seed)
        made = make(code, plan)
    if isinstance(made, Task):
        return checked(made, code, plan)
    if not isinstance(made, nn.Module):
        raise code.error(
            f"{code.name} must be a torch.nn.Module, a megatron_ext.tasks.task.Task, a class "
            f"of such, or a function that returns one, but is a {type(made).__name__}"
        )
    return ModuleTask(plan, code, made)


def _pieces(plan: Plan, code: UserCode, model: nn.Module, arguments: Sequence[str]) -> Pieces:
    names = tuple(arguments)
    if plan.model.capture:
        through = tuple(getattr(code.module, THROUGH, ()))
        return capture(model, names, _defaults(code, model, names), code.path, through)
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and len(model):
        return children(model, names)
    return one_piece(model, names)


def _positional(code: UserCode, model: nn.Module, count: int) -> List[str]:
    """The names of the first arguments of the forward pass."""
    names = [one.name for one in _signature(code, model) if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(names) < count:
        raise code.error(
            f"the samples' inputs are {count}, but {type(model).__name__}.forward takes "
            f"{len(names)} ({', '.join(names)}); a sample is (inputs, targets), where several inputs are a tuple"
        )
    return names[:count]


def _defaults(code: UserCode, model: nn.Module, given: Sequence[str]) -> Dict[str, Any]:
    """Return the defaults of the arguments that samples do not give."""
    found = {}
    for one in _signature(code, model):
        if one.name in given or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if one.default is one.empty:
            raise code.error(
                f"{type(model).__name__}.forward takes {one.name}, which the samples' inputs "
                f"do not give; they give {', '.join(given)}"
            )
        found[one.name] = one.default
    return found


def _signature(code: UserCode, model: nn.Module) -> List[inspect.Parameter]:
    """Raises EngineError if there is none."""
    name = f"model.code={code.spec}: {type(model).__name__}.forward"
    if not callable(model.forward):
        raise EngineError(f"{name} is of type {type(model.forward).__name__}; write def forward(self, …)")
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except ValueError as error:
        raise EngineError(f"{name} does not say which arguments it takes; write it as def forward(self, …)") from error


def _functions(code: UserCode) -> Functions:
    loss = code.function(LOSS)
    if loss is None:
        raise code.error(
            f"{code.path} has no function {LOSS}(outputs, targets); write one that returns the "
            "mean over the micro-batch"
        )
    return Functions(loss, code.function(METRICS), code.function(WEIGHT))


def _require_all(code: UserCode, model: nn.Module, pieces: Pieces) -> None:
    """Raises EngineError if a parameter is in no piece."""
    held = {id(parameter) for piece in pieces.pieces for parameter in piece.module.parameters()}
    require_gradients(
        code, [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in held]
    )


def _tied(pieces: Pieces) -> Dict[str, str]:
    """Parameters that are in several pieces."""
    named = ((piece, *one) for piece in pieces.pieces for one in piece.module.named_parameters())
    return ties([(f"{piece.name}.{HELD_AS}.{inner}", one) for piece, inner, one in named if one.requires_grad])


def _kinds(pieces: Pieces, look: Look) -> Sequence[str]:
    """A name for each piece: the same for those that compute the same with tensors of the same sizes."""
    keys = []
    for piece in pieces.pieces:
        calls: List[str] = []
        kind = type(piece.module).__name__
        if isinstance(piece.module, fx.GraphModule):
            nodes = [node for node in piece.module.graph.nodes if node.op.startswith("call_")]
            leaves = [piece.module.get_submodule(node.target) for node in nodes if node.op == "call_module"]
            calls = [repr(leaf) + _attributes(leaf) for leaf in leaves]
            calls += [str(node.target) for node in nodes if node.op != "call_module"]
            kind = type(leaves[0]).__name__ if leaves else "functions"
        shapes = tuple((tuple(one.shape), one.requires_grad) for one in piece.module.parameters())
        wires = [wire for name in (*piece.takes, *piece.gives) for wire in look.values[name].wires]
        sizes = tuple(look.wires[wire][1:] if wire in look.wires else wire for wire in wires)  # or an input's name
        keys.append((kind, tuple(calls), shapes, sizes))
    return kinds_of(keys)


def _attributes(leaf: nn.Module) -> str:
    """Numbers and words that a module's forward pass may go by, which its `repr` need not have."""
    own = [
        {key: value for key, value in vars(part).items() if not key.startswith("_") and isinstance(value, tree.PLAIN)}
        for part in leaf.modules()
    ]
    return repr(own)


def _wide(tensor: Tensor) -> Tensor:
    """A loss is computed in fp32, whatever the model is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _made(module: nn.Module, form: Form, name: str, seed: int, recompute: bool, tensor: TensorGroup) -> nn.Module:
    return UserBlock(copied(module), form, name, seed, recompute)


TASK = users_task
