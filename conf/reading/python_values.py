"""The values that a Python file gives its names, read without running it.

Known are literals, names assigned before, arithmetic, joined texts and lists, `math.sqrt`, `os.path.join`, dictionaries
that are built, merged, copied or updated, and names that the file imports, which stand for themselves.
"""

from __future__ import annotations

import ast
import math
import operator
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_ITEMS = 100_000
"""The longest list or text that a repetition may make."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Imported:
    """A name that comes from elsewhere, such as `tf.float32`: what it is only running the file would tell."""

    name: str

    def __str__(self) -> str:
        return self.name


class Unread(ValueError):
    """A part of the file whose value is not certain: the line, and what stands there."""

    def __init__(self, node: ast.AST, text: str) -> None:
        super().__init__(f"line {getattr(node, 'lineno', '?')}: {text}")


def values(text: str) -> dict[str, Any]:
    """What the names of a module have at its end.

    A name whose value is not certain is an `Unread`, which whoever needs it raises.

    Raises:
        Unread: the file does more than to give values to names.
        SyntaxError: it is not Python.
    """
    known: dict[str, Any] = {}
    for statement in ast.parse(text).body:
        match statement:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for name in names:
                    known[name.asname or name.name.split(".")[0]] = Imported(name.asname or name.name.split(".")[0])
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                known[name] = _or_unread(value, known)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                known[name] = _or_unread(value, known)
            case ast.Assign(targets=[ast.Subscript() as place], value=value):
                _dict(place.value, known)[_value(place.slice, known)] = _or_unread(value, known)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="update"), args=[given], keywords=[])):
                _dict(of, known).update(_dict(given, known))
            case _:
                raise Unread(statement, f"{ast.unparse(statement)[:60]!r} is not an assignment of a value to a name")
    return known


def _dict(node: ast.expr, known: Mapping[str, Any]) -> dict[Any, Any]:
    found = _value(node, known)
    if not isinstance(found, dict):
        raise Unread(node, f"{ast.unparse(node)[:60]!r} is not a dictionary")
    return found


def _or_unread(node: ast.expr, known: Mapping[str, Any]) -> Any:
    try:
        return _value(node, known)
    except Unread as unread:
        return unread


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in known:
            if isinstance(known[name], Unread):
                raise known[name]
            return known[name]
        case ast.Name(id="object" | "int" | "float" | "str" | "bool" as name):
            return Imported(name)
        case ast.Attribute(value=of, attr=attribute):
            found = _value(of, known)
            if isinstance(found, Imported):
                return Imported(f"{found}.{attribute}")
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_or_unread(item, known) for item in items]
        case ast.Dict(keys=keys, values=parts):
            made: dict[Any, Any] = {}
            for key, part in zip(keys, parts, strict=True):
                if key is None:
                    made |= _dict(part, known)
                else:
                    made[_hashable(key, known)] = _or_unread(part, known)
            return made
        case ast.UnaryOp(op=ast.USub(), operand=operand) if isinstance(of := _value(operand, known), int | float):
            return -of
        case ast.UnaryOp(op=ast.Not(), operand=operand) if isinstance(of := _value(operand, known), bool):
            return not of
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _dict(left, known) | _dict(right, known)
        case ast.BinOp(left=left, op=how, right=right) if type(how) in _OPERATORS:
            return _computed(node, _OPERATORS[type(how)], _value(left, known), _value(right, known))
        case ast.Subscript(value=of, slice=key):
            found = _value(of, known)
            try:
                part = found[_value(key, known)]
            except (TypeError, KeyError, IndexError):
                raise Unread(node, f"{ast.unparse(node)[:60]!r} is not defined") from None
            if isinstance(part, Unread):
                raise part
            return part
        case ast.Call(func=function, args=arguments, keywords=keywords):
            return _called(node, ast.unparse(function), arguments, keywords, known)
    raise Unread(node, f"the value of {ast.unparse(node)[:60]!r} cannot be determined without running the file")


def _hashable(node: ast.expr, known: Mapping[str, Any]) -> Any:
    key = _value(node, known)
    if not isinstance(key, str | int | float | bool | None):
        raise Unread(node, f"{ast.unparse(node)[:60]!r} cannot be a key")
    return key


def _computed(node: ast.expr, how: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if how is operator.pow and numbers and not (abs(left) < 1e6 and abs(right) < 100):
        raise Unread(node, f"{ast.unparse(node)[:60]!r} is too large")
    if how is operator.mul and not numbers:
        sized = left if isinstance(left, str | list) else right
        count = right if sized is left else left
        if isinstance(count, int) and isinstance(sized, str | list) and len(sized) * count > MOST_ITEMS:
            raise Unread(node, f"{ast.unparse(node)[:60]!r} is too long")
    if isinstance(left, Imported) or isinstance(right, Imported):
        raise Unread(node, f"the value of {ast.unparse(node)[:60]!r} cannot be determined without running the file")
    try:
        return how(left, right)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise Unread(node, f"{ast.unparse(node)[:60]!r}: {error}") from None


def _called(
    node: ast.expr, name: str, arguments: list[ast.expr], keywords: list[ast.keyword], known: Mapping[str, Any]
) -> Any:
    if name == "dict" and len(arguments) <= 1:
        made: dict[Any, Any] = dict(_dict(arguments[0], known)) if arguments else {}
        for one in keywords:
            made |= _dict(one.value, known) if one.arg is None else {one.arg: _or_unread(one.value, known)}
        return made
    if keywords:
        raise Unread(node, f"the value of {ast.unparse(node)[:60]!r} cannot be determined without running the file")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
        return _copied(_value(node.args[0] if node.args else node.func.value, known))
    given = [_value(one, known) for one in arguments]
    match name, given:
        case "os.path.join" | "path.join" | "join", [str(), *_] if all(isinstance(one, str) for one in given):
            return posixpath.join(*given)
        case "copy.deepcopy" | "deepcopy", [value]:
            return _copied(value)
        case "int" | "float", [int() | float() as value]:
            return int(value) if name == "int" else float(value)
        case "math.sqrt" | "np.sqrt", [int() | float() as value] if value >= 0:
            return math.sqrt(value)
    raise Unread(node, f"the value of {ast.unparse(node)[:60]!r} cannot be determined without running the file")


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value
