"""The graph of a module's forward pass: torch.fx follows it from leaf to leaf.

Leaves are modules of torch's, and of classes of the user's own. torch's stacks of Transformer layers are followed layer
by layer: their own forward passes look at what is in a tensor, to choose a faster way for inference, which torch.fx
cannot follow.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple, Type

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.module.code import described, line_here

LINE = "line"
"""Under `Node.meta`: where in the user's code a node comes from."""


def trace(
    model: nn.Module,
    inputs: Sequence[str],
    defaults: Dict[str, Any],
    path: Path,
    through: Tuple[Type[nn.Module], ...],
) -> fx.Graph:
    """The graph of a forward pass that is given `inputs`; its other arguments have their `defaults`.

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
    return graph


class _Tracer(fx.Tracer):
    """Leaves are torch's modules and the user's; lists of modules, and torch's stacks of layers, are followed."""

    def __init__(self, path: Path, through: Tuple[Type[nn.Module], ...]) -> None:
        super().__init__()
        self._path = path
        self._through = through

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (type(m) in (nn.Sequential, *FORWARD) or isinstance(m, self._through))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Any:
        if type(m) in FORWARD:
            return FORWARD[type(m)](m, *args, **kwargs)
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


def _drop_checks_of_defaults(graph: fx.Graph, inputs: Sequence[str]) -> None:
    """What torch.fx leaves of arguments that have their defaults."""
    doomed = {node for node in graph.nodes if node.op == "placeholder" and node.target not in inputs}
    for node in graph.nodes:
        if doomed.intersection(node.all_input_nodes):
            doomed.add(node)
    for node in reversed(list(graph.nodes)):
        if node in doomed:
            graph.erase_node(node)


def _given(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """What a forward pass is given, by the names of its arguments; what it is not given has its default."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _encoder(stack: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
    given = _given(stack, args, kwargs)
    src, masked, causal = given["src"], given["src_key_padding_mask"], bool(given.get("is_causal"))
    for layer in stack.layers:
        src = layer(src, src_mask=given["mask"], src_key_padding_mask=masked, is_causal=causal)
    return src if stack.norm is None else stack.norm(src)


def _decoder(stack: nn.TransformerDecoder, *args: Any, **kwargs: Any) -> Any:
    given = _given(stack, args, kwargs)
    given["tgt_is_causal"] = bool(given.get("tgt_is_causal"))
    tgt, memory = given.pop("tgt"), given.pop("memory")
    for layer in stack.layers:  # which may be the user's own, with other names for these two
        tgt = layer(tgt, memory, **given)
    return tgt if stack.norm is None else stack.norm(tgt)


def _transformer(model: nn.Transformer, *args: Any, **kwargs: Any) -> Any:
    given = _given(model, args, kwargs)
    of_source = [given.pop(name, None) for name in ("src", "src_mask", "src_key_padding_mask", "src_is_causal")]
    return model.decoder(given.pop("tgt"), model.encoder(*of_source), **given)


FORWARD: Dict[type, Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
"""The forward pass of each class."""
