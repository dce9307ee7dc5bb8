"""A look at a user's model before anything is started: its pieces pass one micro-batch on, forward and backward.

That says what crosses between pieces, which of them draw random numbers or change in place what they take, and what is
wrong with them. It is done on shapes alone (torch's device `meta`), which takes neither time nor memory; where the
user's code asks for numbers, on the CPU, with two micro-batches.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.families.module import tree
from megatron_ext.families.module.block import Form, Piece, Pieces, Value, copied
from megatron_ext.families.module.code import (
    CPU,
    META,
    Fault,
    Randomness,
    UserCode,
    is_number,
    pass_back,
    require_gradients,
    require_loss,
    require_metrics,
)
from megatron_ext.tasks.task import Tensors, Wire


class Given(NamedTuple):
    """A value: its shape (`tree.apart`) and the names of its tensors."""

    shape: Any
    wires: Tuple[str, ...]


class Look(NamedTuple):
    """What is known of a model."""

    forms: Tuple[Form, ...]
    """The form of each piece."""
    values: Dict[str, Given]
    wires: Dict[str, Wire]
    """Wires that pieces give."""


class Sample(NamedTuple):
    """A micro-batch of a model."""

    inputs: Tensors
    targets: Any


class Functions(NamedTuple):
    """What the user's file says of a model's outputs and targets."""

    loss: Callable[[Any, Any], Any]
    metrics: Optional[Callable[[Any, Any], Any]] = None
    """What is logged beside the loss, by name, from outputs and targets."""
    weight: Optional[Callable[[Any], Any]] = None
    """What the loss is a sum over, and the metrics are, from the targets. None: they are means."""


def look_at(
    code: UserCode,
    pieces: Pieces,
    inputs: Mapping[str, Given],
    samples: Sequence[Sample],
    functions: Functions,
    dtype: torch.dtype,
) -> Look:
    """`inputs` are the arguments of the model's forward pass, whose tensors `samples` have. Raises EngineError: the
    user's code raises, or its pieces cannot be trained on several stages."""
    try:
        return _Walk(code, pieces, inputs, samples[0], functions, dtype, META).look()
    except Fault:
        raise
    except Exception:  # noqa: BLE001  (the user's code, which asks for numbers, or is wrong: the CPU will tell)
        found = [_Walk(code, pieces, inputs, sample, functions, dtype, CPU).look() for sample in samples]
    for other in found[1:]:
        _require_same(code, pieces, found[0], other)
    return found[0]


def _require_same(code: UserCode, pieces: Pieces, one: Look, other: Look) -> None:
    for piece in pieces.pieces:
        for name in piece.gives:
            if one.values[name] != other.values[name]:
                raise code.error(
                    f"block {piece.name} gives a value that is not a tensor and differs between micro-batches: {name}"
                )
            for wire in one.values[name].wires:
                a, b = one.wires[wire], other.wires[wire]
                if a != b:
                    raise code.error(
                        f"block {piece.name}{_at(piece)} gives {wire} of shape {list(a.dims)} "
                        f"({a.dtype}) for one micro-batch and {list(b.dims)} ({b.dtype}) for another; stages exchange "
                        "tensors of one shape: pad it, or put what follows into the same block"
                    )


class _Walk:
    """One micro-batch through all pieces."""

    def __init__(
        self,
        code: UserCode,
        pieces: Pieces,
        inputs: Mapping[str, Given],
        sample: Sample,
        functions: Functions,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._code = code
        self._pieces = pieces
        self._values: Dict[str, Given] = dict(inputs)
        self._functions = functions
        self._targets = _moved(sample.targets, device)
        self._modules = [copied(piece.module, dtype, device) for piece in pieces.pieces]
        self._held: Dict[str, Tensor] = {}
        """Each wire, cut off from the piece that gave it."""
        for name, tensor in sample.inputs.items():
            self._held[name] = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        self._wires: Dict[str, Wire] = {}
        self._last_use = {name: n for n, piece in enumerate(pieces.pieces) for name in piece.takes}

    def look(self) -> Look:
        given = []
        forms = []
        for number, (piece, module) in enumerate(zip(self._pieces.pieces, self._modules)):
            form, tensors = self._forward(number, piece, module)
            forms.append(form)
            given.append(tensors)
        self._backward(given)
        return Look(tuple(forms), self._values, self._wires)

    def _forward(self, number: int, piece: Piece, module: nn.Module) -> Tuple[Form, Dict[str, Tensor]]:
        taken = [self._values[name] for name in piece.takes]
        wires = [wire for value in taken for wire in value.wires]
        copies = [self._held[wire].clone() for wire in wires]
        versions = [tensor._version for tensor in copies]
        form = Form(tuple(value.shape for value in taken), piece.keywords, len(piece.gives), (), (), False)
        with self._code.running(f"block {piece.name}{_at(piece)}"), Randomness() as drawn:
            values = form.call(module, copies)
        if len(values) != len(piece.gives):
            raise self._code.fault(f"block {piece.name} gives {len(values)} values")
        changed = tuple(n for n, (tensor, before) in enumerate(zip(copies, versions)) if tensor._version != before)
        for n in changed:
            self._require_last(number, piece, wires[n])
        found: Dict[str, Tensor] = {}
        for name, value in zip(piece.gives, values):
            self._note(piece, name, value, found)
        return form._replace(kept=tuple(range(len(found))), changed=changed, random=drawn.any), found

    def _require_last(self, number: int, piece: Piece, wire: str) -> None:
        value = next(name for name, given in self._values.items() if wire in given.wires)
        if wire in wires_of(self._pieces.output, self._values) or self._last_use.get(value, number) > number:
            after = [one.name for one in self._pieces.pieces[number + 1 :] if value in one.takes]
            raise self._code.fault(
                f"block {piece.name}{_at(piece)} changes {wire} in place, but "
                f"{f'block {after[0]}' if after else 'the loss'} takes it afterwards, maybe on another stage; use an "
                "operation that is not in place"
            )

    def _note(self, piece: Piece, name: str, value: Any, found: Dict[str, Tensor]) -> None:
        """Remembers a value that a piece gives."""
        try:
            shape, tensors = tree.apart(value)
        except TypeError as error:
            raise self._code.fault(
                f"block {piece.name}{_at(piece)} gives {error}; only tensors can go to another stage"
            ) from error
        if name in piece.unforeseen and _numbers(shape):
            raise self._code.fault(
                f"block {piece.name}{_at(piece)} gives a number that follows from what "
                "is in a tensor, and that another block takes; only tensors can go to another stage"
            )
        wires = tuple(tree.names(name, shape))
        self._values[name] = Given(shape, wires)
        for wire, tensor in zip(wires, tensors):
            found[wire] = tensor
            self._wires[wire] = Wire(wire, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            self._held[wire] = tensor.detach().requires_grad_(tensor.requires_grad)

    def _require_rest(self, outputs: Any) -> None:
        """What the file's `metrics` and `weight` give."""
        if self._functions.metrics is not None:
            with self._code.running("metrics(outputs, targets)"), torch.no_grad():
                metrics = tree.mapped(self._functions.metrics(outputs, self._targets), as_number)
            require_metrics(self._code, "metrics(outputs, targets)", metrics)
        if self._functions.weight is not None:
            with self._code.running("weight(targets)"):
                weight = as_number(self._functions.weight(self._targets))
            if not is_number(weight):
                raise self._code.fault("weight(targets) must return one number")

    def _backward(self, given: Sequence[Dict[str, Tensor]]) -> None:
        outputs = returned(self._pieces.output, self._values, {name: one.clone() for name, one in self._held.items()})
        with self._code.running("loss(outputs, targets)"):
            loss = self._functions.loss(outputs, self._targets)
        require_loss(self._code, "loss(outputs, targets)", loss)
        self._require_rest(outputs)
        with self._code.running("the backward pass of loss(outputs, targets)"):
            torch.autograd.backward(loss.sum())
        for piece, tensors in reversed(list(zip(self._pieces.pieces, given))):
            with self._code.running(f"the backward pass of block {piece.name}{_at(piece)}"):
                pass_back(tensors, self._held)
        without = [
            name
            for piece, module in zip(self._pieces.pieces, self._modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        require_gradients(self._code, without)


def as_number(value: Any) -> Any:
    """A Python number as a tensor."""
    return torch.tensor(float(value)) if isinstance(value, (int, float)) else value


def _moved(value: Any, device: str) -> Any:
    shape, tensors = tree.apart(value)
    return tree.together(shape, [tensor.to(device) for tensor in tensors])


def _numbers(shape: Any) -> bool:
    """Whether a value holds numbers that are no tensors."""
    if isinstance(shape, tree.Nest):
        return any(_numbers(part) for part in shape.parts)
    return isinstance(shape, tree.Kept) and isinstance(shape.value, (int, float, torch.Size))


def _at(piece: Piece) -> str:
    return f" ({piece.where})" if piece.where else ""


def wires_of(output: Any, values: Mapping[str, Given]) -> List[str]:
    """The names of the tensors in what a model returns."""
    found = [values[leaf.name].wires for leaf in tree.leaves(output) if isinstance(leaf, Value) and leaf.name in values]
    return [name for wires in found for name in wires]


def returned(output: Any, values: Mapping[str, Given], tensors: Mapping[str, Tensor]) -> Any:
    """What a model returns, made of the tensors of its pieces."""

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        return tree.together(values[leaf.name].shape, [tensors[name] for name in values[leaf.name].wires])

    return tree.mapped(output, filled)
