"""`graph.txt`, the profile of PipeDream's profiler: a line for every node, then a line for every edge.

    node4 -- Linear(8, 8) -- forward_compute_time=0.073, backward_compute_time=6.949, activation_size=6291456.0, \
parameter_size=132.000 -- stage_id=0
    <tab>node3 -- node4

Times are milliseconds, sizes bytes; `activation_size=[a; b]` lists several results. `stage_id` is optional. The edges
that lead to a node stand in the order of its arguments. What of a profile looks wrong is reported, and used as it is.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from fasop.errors import SearchError
from fasop.graphs.graph import Cycle, Graph, Operator, sorted_names
from megatron_ext.contract.files import read_regular

SEPARATOR = " -- "
KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
NODE_FORM = "NAME -- DESCRIPTION -- " + ", ".join(f"{key}=N" for key in KEYS) + "[ -- stage_id=N]"
EDGE_FORM = "a tab, SOURCE -- TARGET"
MOST_BYTES = 2**26


class GraphError(SearchError):
    """A graph.txt that cannot be read."""


class _Fault(Exception):
    """What is wrong with a line."""


def read_graph(path: Path) -> Graph:
    """The graph in a file. Raises GraphError: it cannot be read, or its first wrong line, with the line's number."""
    try:
        content = read_regular(path, MOST_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise GraphError(f"graph={path} is larger than {MOST_BYTES >> 20} MiB; a graph.txt never is") from error
        raise GraphError(f"graph={path} cannot be read: {error.strerror}; give the path of a graph.txt") from error
    try:
        return parse(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise GraphError(f"{path}, line {line}: not UTF-8 text; give the path of a graph.txt") from error


def parse(text: str, where: str) -> Graph:
    """The graph that `text` describes; `where` it comes from is said in messages. Raises GraphError: as
    `read_graph`."""
    nodes: dict[str, Operator] = {}
    inputs: dict[str, list[str]] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.startswith("\t") and line.strip():
                source, target = _edge(line.strip(), nodes)
                inputs[target].append(source)
                edges[source, target] = number
            elif line.strip():
                node = _node(line.strip(), nodes)
                nodes[node.name], inputs[node.name] = node, []
        except _Fault as fault:
            raise GraphError(f"{where}, line {number}: {fault}") from fault
    if not nodes:
        raise GraphError(f"{where} has no nodes; the line of a node is {NODE_FORM}")
    try:
        sorted_names(inputs)
    except Cycle as cycle:
        closing = max(edges[pair] for pair in zip(cycle.names, cycle.names[1:], strict=False))
        raise GraphError(
            f"{where}, line {closing}: this edge closes a cycle, {cycle}; a model's graph has none"
        ) from cycle
    return Graph(tuple(replace(node, inputs=tuple(inputs[name])) for name, node in nodes.items()))


def _node(line: str, others: Container[str]) -> Operator:
    fields = line.split(SEPARATOR)
    stage = None
    if len(fields) > 3 and fields[-1].startswith("stage_id="):
        stage = _stage(fields.pop().removeprefix("stage_id="))
    if len(fields) < 3 or not fields[0].strip():
        raise _Fault(f"neither a node nor an edge; a node is {NODE_FORM}, an edge {EDGE_FORM}")
    if fields[0].strip() in others:
        raise _Fault(f"node {fields[0].strip()!r} already has a line above; rename it")
    values = dict(zip(KEYS, _values(fields[-1]), strict=True))
    forward, backward, parameters = (_one(values[key], key) for key in (KEYS[0], KEYS[1], KEYS[3]))
    return Operator(
        name=fields[0].strip(),
        description=SEPARATOR.join(fields[1:-1]),
        forward_ms=forward,
        backward_ms=backward,
        outputs=values["activation_size"],
        parameter_bytes=parameters,
        stage=stage,
    )


def _values(text: str) -> Iterable[tuple[float, ...]]:
    parts = text.split(", ")
    if [part.partition("=")[0] for part in parts] != [*KEYS]:
        raise _Fault(f"{text!r} must give {', '.join(KEYS)}, in this order")
    for part in parts:
        key, _, value = part.partition("=")
        several = value.startswith("[") and value.endswith("]")
        yield tuple(_number(key, one) for one in (value[1:-1].split("; ") if several else [value]))


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        of = "bytes" if key.endswith("size") else "milliseconds"
        raise _Fault(f"{key}={text} must be a number of {of}, at least 0")
    return number


def _one(values: tuple[float, ...], key: str) -> float:
    if len(values) > 1:
        raise _Fault(f"{key} has {len(values)} values; only activation_size lists several")
    return values[0]


def _stage(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise _Fault(f"stage_id={text} must be a whole number, at least 0, of at most 9 digits")
    return int(text)


def _edge(line: str, nodes: dict[str, Operator]) -> tuple[str, str]:
    names = line.split(SEPARATOR)
    if len(names) != 2:
        raise _Fault(f"{line!r} is not an edge; an edge is {EDGE_FORM}")
    for name in names:
        if name not in nodes:
            raise _Fault(f"no line above describes node {name!r}; put nodes before edges")
    source, target = names
    return source, target


def graph_text(graph: Graph) -> str:
    """Write a graph as the public tools do."""
    lines = [_node_line(node) for node in graph.nodes]
    lines += [f"\t{name}{SEPARATOR}{node.name}" for node in graph.nodes for name in node.inputs]
    return "\n".join(lines) + "\n"


def _node_line(node: Operator) -> str:
    outputs = [str(float(size)) for size in node.outputs]
    size = outputs[0] if len(outputs) == 1 else f"[{'; '.join(outputs)}]"
    values = (f"{node.forward_ms:.3f}", f"{node.backward_ms:.3f}", size, f"{node.parameter_bytes:.3f}")
    fields = [
        node.name,
        "".join(node.description.splitlines()),
        ", ".join(f"{key}={value}" for key, value in zip(KEYS, values, strict=True)),
    ]
    if node.stage is not None:
        fields.append(f"stage_id={node.stage}")
    return SEPARATOR.join(fields)


NOTICEABLE = 0.01
"""The part of all nodes' time from which on a doubt matters."""
TOO_SHORT = 0.05
"""The part of its forward pass that a backward pass takes at least, where an operator has parameters."""


def doubts(graph: Graph) -> Iterator[str]:
    """In words, in the order of the graph."""
    total = sum(node.compute_ms for node in graph.nodes)
    for node in graph.nodes:
        if not node.inputs and node.description.startswith("Input"):
            if node.compute_ms:
                yield (
                    f"{_named(node)} takes {node.compute_ms:g} ms in this profile although an input computes nothing: "
                    f"the profile probably measured waiting for data; counted as 0"
                )
        elif not node.parameter_bytes:
            continue
        elif not node.compute_ms:
            yield f"{_named(node)} has parameters but takes no time in this profile; used unchanged"
        elif node.backward_ms < TOO_SHORT * node.forward_ms and node.forward_ms > NOTICEABLE * total:
            yield (
                f"{_named(node)} has a backward pass of {node.backward_ms:g} ms after a forward pass of "
                f"{node.forward_ms:g} ms: part of it was probably not measured; used unchanged"
            )


def _named(node: Operator) -> str:
    return f"{node.name} ({node.description.partition('(')[0].strip()})"
