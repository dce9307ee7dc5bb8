"""From a module to pieces that can lie on different stages, by the graph of its forward pass.

Every call of a leaf becomes a piece. What the forward pass does between leaves goes to the piece that gives the last of
what it takes, so that a skip connection is added, and an activation taken, where the tensor is made.
"""

from __future__ import annotations

import copy
import operator
from itertools import chain, count
from pathlib import Path
from typing import Any, Dict, List, Sequence, Set, Tuple, Type

import torch
from torch import Tensor, fx, nn

from megatron_ext.families.module import tree
from megatron_ext.families.module.block import Piece, Pieces, Value
from megatron_ext.families.module.tracing import LINE, trace

_OF_SHAPES = {"size", "dim", "numel", "ndimension", "element_size", "is_floating_point", "stride"}
"""Methods of a tensor whose result follows from its shape and number format, the same for all micro-batches."""
_ATTRIBUTES = {"shape", "ndim", "dtype"}
DEVICE = "device"


def capture(
    model: nn.Module,
    inputs: Sequence[str],
    defaults: Dict[str, Any],
    path: Path,
    through: Tuple[Type[nn.Module], ...] = (),
) -> Pieces:
    """The pieces of a model; the arguments are those of `tracing.trace`. Raises EngineError: torch.fx cannot follow the
    forward pass; the message has the line of the user's code."""
    graph = trace(model, inputs, defaults, path, through)
    take_results(graph, model)
    return _Cutter(model, graph, tuple(inputs), path).pieces()


class _Cutter:
    """Cuts a graph into pieces."""

    def __init__(self, model: nn.Module, graph: fx.Graph, inputs: Tuple[str, ...], path: Path) -> None:
        self._model = model
        self._graph = graph
        self._inputs = inputs
        self._path = path
        self._piece_of: Dict[fx.Node, int] = {}
        """The piece of each node that comes after a leaf."""
        self._leaves: List[fx.Node] = []
        self._called: Dict[str, int] = {}

    def pieces(self) -> Pieces:
        self._place()
        pieces = []
        used: Set[str] = set()
        for number in range(max(1, len(self._leaves))):
            pieces.append(self._piece(number, used))
            used.add(pieces[-1].name)
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        returned = tree.mapped(output.args[0], lambda one: Value(one.name) if isinstance(one, fx.Node) else one)
        return Pieces(tuple(pieces), self._inputs, returned)

    def _place(self) -> None:
        """Each node to a piece: to that of the last leaf it depends on, or of the first that takes it."""
        for node in self._graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            before = [self._piece_of[one] for one in node.all_input_nodes if one in self._piece_of]
            if node.op == "call_module":
                self._leaves.append(node)
                self._piece_of[node] = len(self._leaves) - 1
            elif before:
                self._piece_of[node] = max(before)
        last = max(0, len(self._leaves) - 1)
        for node in reversed(list(self._graph.nodes)):  # what depends on no leaf
            if node.op not in ("placeholder", "get_attr", "output") and node not in self._piece_of:
                self._piece_of[node] = min((self._piece_of.get(user, last) for user in node.users), default=0)

    def _piece(self, number: int, used: Set[str]) -> Piece:
        own = [node for node in self._graph.nodes if self._piece_of.get(node) == number]
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        returned = [node for node in output.all_input_nodes if node.op == "get_attr"]
        if number == max(0, len(self._leaves) - 1):
            own += returned
        graph = fx.Graph()
        content: Dict[str, Any] = {}
        made: Dict[fx.Node, fx.Node] = {}
        taken = self._taken(own, number)
        for node in taken:
            made[node] = graph.placeholder(node.name)
        for node in own:
            for needed in (*node.all_input_nodes, *([node] if node.op == "get_attr" else [])):
                if needed in made:
                    continue
                if needed.op == "get_attr":
                    content[str(needed.target)] = _attribute(self._model, str(needed.target))
                    made[needed] = graph.get_attr(str(needed.target))
                elif needed not in taken:
                    made[needed] = graph.call_function(_device_of, tuple(made[one] for one in taken))
            if node.op == "call_module":
                content[str(node.target)] = not_in_place(self._model.get_submodule(str(node.target)))
                made[node] = graph.node_copy(node, made.__getitem__)
            elif node.op != "get_attr":
                made[node] = graph.node_copy(node, made.__getitem__)
        given = [node for node in own if self._is_taken_elsewhere(node, number) or node in output.all_input_nodes]
        results = tuple(made[node] for node in given)
        lines = [node.meta[LINE] for node in own if LINE in node.meta]
        graph.output(results[0] if len(results) == 1 else results)
        return Piece(
            self._name(number, used),
            fx.GraphModule(content, graph),
            tuple(node.name for node in taken),
            tuple(node.name for node in given),
            where=lines[0] if lines else str(self._path),
            unforeseen=tuple(node.name for node in given if node.op != "call_module" and not _foreseen(node)),
        )

    def _taken(self, own: Sequence[fx.Node], number: int) -> List[fx.Node]:
        found: Dict[fx.Node, None] = {}
        for node in own:
            for needed in node.all_input_nodes:
                outside = needed.op == "placeholder" or self._piece_of.get(needed, number) != number
                if outside and not _is_device(needed):
                    found[needed] = None
        return list(found)

    def _is_taken_elsewhere(self, node: fx.Node, number: int) -> bool:
        return not _is_device(node) and any(self._piece_of.get(user, number) != number for user in node.users)

    def _name(self, number: int, used: Set[str]) -> str:
        """That of the leaf; of its second call and so on, with a number."""
        if not self._leaves:
            return type(self._model).__name__
        name = str(self._leaves[number].target)
        return next(one for one in chain([name], (f"{name}_{again}" for again in count(2))) if one not in used)


def _foreseen(node: fx.Node) -> bool:
    """Whether a value follows from shapes and number formats alone."""
    if node.op == "call_method" and node.target in _OF_SHAPES:
        return True
    if node.op == "call_function" and node.target is getattr and node.args[1] in _ATTRIBUTES:
        return True
    if node.op == "call_function" and node.target is len:
        return True
    return node.op in ("call_function", "call_method") and all(_foreseen(one) for one in node.all_input_nodes)


def _is_device(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1] == DEVICE


def _device_of(*values: Any) -> torch.device:
    """Return the device of the first tensor among values."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (tuple, list)) and value:
            return _device_of(*value)
    return torch.empty(0).device


def _attribute(model: nn.Module, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    found = getattr(model.get_submodule(owner), name)
    assert isinstance(found, Tensor)
    return found


def take_results(graph: fx.Graph, model: nn.Module) -> None:
    """Has all that comes after an operation in place take its result, for what it was given may lie elsewhere."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        changed = node.args[0] if node.args else None
        if _in_place(node, model) and isinstance(changed, fx.Node):
            for user in list(changed.users):
                if order[user] > order[node]:
                    user.replace_input_with(changed, node)


def _in_place(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace") is True:
        return True
    if node.op == "call_function" and node.target in _IN_PLACE_OPERATORS:
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_function" and len(node.args) > 1 and node.args[-1] is True:  # F.relu(x, True)
        return getattr(node.target, "__module__", "") == "torch.nn.functional" and str(name) in _LAST_IS_INPLACE
    return isinstance(name, str) and name.endswith("_") and not name.endswith("__")


_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv}
_LAST_IS_INPLACE = {"relu", "relu6", "elu", "leaky_relu", "selu", "celu", "silu", "mish", "hardtanh", "dropout"}


def not_in_place(leaf: nn.Module) -> nn.Module:
    """What it was given may be taken by others, too; those that come after it take its result."""
    if not getattr(leaf, "inplace", False):
        return leaf
    changed = copy.copy(leaf)
    setattr(changed, "inplace", False)  # noqa: B010  (a type checker knows no attribute of all modules)
    return changed
