"""Operations in place, in a graph whose parts may lie on different stages: their results are taken instead."""

from __future__ import annotations

import copy
import operator

from torch import fx, nn


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
