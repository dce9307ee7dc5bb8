"""From a module to pieces that can lie on different stages: torch.fx follows its forward pass from leaf to leaf.

Every call of a leaf, which is a module of torch's or of a class of the user's own, becomes a piece. What the forward
pass does between leaves goes to the piece that gives the last of what it takes, so that a skip connection is added, and
an activation taken, where the tensor is made.
"""

from __future__ import annotations

import copy
import operator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Type

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from megatron_ext.contract.errors import EngineError
from megatron_ext.tasks.user_code import described, line_here

LINE = "line"
"""Under `Node.meta`: where in the user's code a node comes from."""
_OF_SHAPES = {"size", "dim", "numel", "ndimension", "element_size", "is_floating_point", "stride"}
"""Methods of a tensor whose result follows from its shape and number format, the same for all micro-batches."""
_ATTRIBUTES = {"shape", "ndim", "dtype"}
DEVICE = "device"


class Piece(NamedTuple):
    """A part of a model that a block is made of."""

    name: str
    module: nn.Module
    """Parameters have their names in the user's module."""
    takes: Tuple[str, ...]
    """Names of values, in the order of the module's arguments; a value is a tensor, or tensors in tuples and such."""
    gives: Tuple[str, ...]
    """Names of values; the module returns a tuple of them if they are several."""
    keywords: Optional[Tuple[str, ...]] = None
    """The names of the arguments; None: they are passed by their places."""
    where: str = ""
    """In the user's code."""
    unforeseen: Tuple[str, ...] = ()
    """Of what it gives, what follows from what is in tensors; so it must be tensors, too."""


class Pieces(NamedTuple):
    """A model in pieces."""

    pieces: Tuple[Piece, ...]
    inputs: Tuple[str, ...]
    """The arguments of its forward pass that it is given."""
    output: Any
    """What it returns, with `Value`s in the place of what pieces give."""


@dataclass(frozen=True)
class Value:
    """Stands for a value."""

    name: str


def one_piece(model: nn.Module, inputs: Tuple[str, ...]) -> Pieces:
    """A model that is not cut."""
    return Pieces((Piece(type(model).__name__, model, inputs, ("output",), inputs),), inputs, Value("output"))


def children(model: nn.Sequential, inputs: Tuple[str, ...]) -> Pieces:
    """A piece per child."""
    pieces: List[Piece] = []
    taken = inputs
    for name, child in model.named_children():
        graph = fx.Graph()
        graph.output(graph.call_module(name, tuple(graph.placeholder(one) for one in taken)))
        module = fx.GraphModule({name: child}, graph)
        pieces.append(Piece(name, module, taken, (f"after_{name}",)))
        taken = pieces[-1].gives
    return Pieces(tuple(pieces), inputs, Value(taken[0]))


def capture(
    model: nn.Module,
    inputs: Sequence[str],
    defaults: Dict[str, Any],
    path: Path,
    through: Tuple[Type[nn.Module], ...] = (),
) -> Pieces:
    """The pieces of a model whose forward pass is given `inputs`; its other arguments have their `defaults`.

    `through` are classes of the user's own that are not leaves, but followed inside.

    Raises:
        EngineError: torch.fx cannot follow the forward pass; the message has the line of the user's code.
    """
    tracer = _Tracer(path, through)
    try:
        with _factories_followed(tracer):
            graph = tracer.trace(model, concrete_args=defaults or None)
    except Exception as error:
        raise EngineError(
            f"{type(model).__name__} cannot be captured: {described(error, path)}. What the forward pass does may "
            "depend on shapes, but not on what is in a tensor; put such code into a module of a class of its own, "
            "which stays whole, or use model.capture=false, which makes the model one block"
        ) from error
    _drop_checks_of_defaults(graph, inputs)
    _without_effects_in_place(graph, model)
    return _Cutter(model, graph, tuple(inputs), path).pieces()


class _Tracer(fx.Tracer):
    """Leaves are torch's modules and the user's; lists of modules, and torch's stacks of layers, are followed."""

    def __init__(self, path: Path, through: Tuple[Type[nn.Module], ...]) -> None:
        super().__init__()
        self._path = path
        self._through = through

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (type(m) in (nn.Sequential, *_STACKS) or isinstance(m, self._through))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Any:
        if type(m) in _STACKS:
            return _STACKS[type(m)](m, *args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        line = line_here(self._path)
        if line is not None:
            node.meta[LINE] = line
        return node


@contextmanager
def _factories_followed(tracer: fx.Tracer) -> Iterator[None]:
    """Has torch.fx follow calls that make a tensor of sizes, such as torch.zeros(x.shape[0], 3)."""
    before = {name: getattr(torch, name) for name in _FACTORIES}

    def following(factory: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found: List[fx.Proxy] = []
            map_aggregate((args, kwargs), lambda one: found.append(one) if isinstance(one, fx.Proxy) else None)
            return tracer.create_proxy("call_function", factory, args, kwargs) if found else factory(*args, **kwargs)

        return call

    try:
        for name, factory in before.items():
            setattr(torch, name, following(factory))
        yield
    finally:
        for name, factory in before.items():
            setattr(torch, name, factory)


_FACTORIES = (
    *("arange", "linspace", "zeros", "ones", "full", "empty", "eye", "rand", "randn", "randint", "randperm", "tensor"),
    *("tril_indices", "triu_indices"),
)


def _encoder(
    stack: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Optional[bool] = None,
) -> Any:
    for layer in stack.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if stack.norm is None else stack.norm(src)


def _decoder(
    stack: nn.TransformerDecoder,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: Optional[bool] = None,
    memory_is_causal: bool = False,
) -> Any:
    for layer in stack.layers:
        tgt = layer(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )
    return tgt if stack.norm is None else stack.norm(tgt)


def _transformer(
    model: nn.Transformer,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    src_is_causal: Optional[bool] = None,
    tgt_is_causal: Optional[bool] = None,
    memory_is_causal: bool = False,
) -> Any:
    memory = model.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
    return model.decoder(
        tgt,
        memory,
        tgt_mask,
        memory_mask,
        tgt_key_padding_mask,
        memory_key_padding_mask,
        tgt_is_causal,
        memory_is_causal,
    )


_STACKS: Dict[type, Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
"""torch's own look at what is in their tensors, to choose a faster way for inference."""


def _drop_checks_of_defaults(graph: fx.Graph, inputs: Sequence[str]) -> None:
    """What torch.fx leaves of arguments that have their defaults."""
    doomed = {node for node in graph.nodes if node.op == "placeholder" and node.target not in inputs}
    for node in graph.nodes:
        if doomed.intersection(node.all_input_nodes):
            doomed.add(node)
    for node in reversed(list(graph.nodes)):
        if node in doomed:
            graph.erase_node(node)


def _without_effects_in_place(graph: fx.Graph, model: nn.Module) -> None:
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


class _Cutter:
    """Cuts a graph into pieces."""

    def __init__(self, model: nn.Module, graph: fx.Graph, inputs: Tuple[str, ...], path: Path) -> None:
        self._model = model
        self._graph = graph
        self._inputs = inputs
        self._path = path
        self._piece_of: Dict[fx.Node, int] = {}
        """Of a node that comes after a leaf."""
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
        return Pieces(
            tuple(pieces),
            self._inputs,
            _with_values(output.args[0]),
        )

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
                content[str(node.target)] = _not_in_place(self._model.get_submodule(str(node.target)))
                made[node] = graph.node_copy(node, made.__getitem__)
            elif node.op != "get_attr":
                made[node] = graph.node_copy(node, made.__getitem__)
        given = [node for node in own if self._is_taken_elsewhere(node, number) or node in output.all_input_nodes]
        results = tuple(made[node] for node in given)
        graph.output(results[0] if len(results) == 1 else results)
        return Piece(
            self._name(number, used),
            fx.GraphModule(content, graph),
            tuple(node.name for node in taken),
            tuple(node.name for node in given),
            where=self._where(own),
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
        again = 2
        while (name if again == 2 else f"{name}_{again - 1}") in used:
            again += 1
        return name if again == 2 else f"{name}_{again - 1}"

    def _where(self, own: Sequence[fx.Node]) -> str:
        lines = list(dict.fromkeys(node.meta[LINE] for node in own if LINE in node.meta))
        return lines[0] if lines else str(self._path)


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
    """Of the first tensor among values."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (tuple, list)) and value:
            return _device_of(*value)
    return torch.empty(0).device


def _with_values(output: Any) -> Any:
    """What a graph returns, with `Value`s in the place of its nodes."""
    if isinstance(output, fx.Node):
        return Value(output.name)
    if isinstance(output, dict):
        return {key: _with_values(part) for key, part in output.items()}
    if isinstance(output, (tuple, list)):
        parts = [_with_values(part) for part in output]
        if hasattr(output, "_fields"):
            return type(output)(*parts)
        return tuple(parts) if isinstance(output, tuple) else parts
    return output


def _not_in_place(leaf: nn.Module) -> nn.Module:
    """What it was given may be taken by others, too; those that come after it take its result."""
    if not getattr(leaf, "inplace", False):
        return leaf
    changed = copy.copy(leaf)
    setattr(changed, "inplace", False)  # noqa: B010  (a type checker knows no attribute of all modules)
    return changed


def _attribute(model: nn.Module, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    found = getattr(model.get_submodule(owner), name)
    assert isinstance(found, Tensor)
    return found
