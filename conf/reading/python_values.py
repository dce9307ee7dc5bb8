"""The values that a Python file gives its names, read without running it.

Known are literals, names assigned before, arithmetic, joined texts and lists, `math.sqrt`, `os.path.join`, dictionaries
that are built, merged, copied or updated, and names that the file imports, which stand for themselves.
"""

from __future__ import annotations

import ast
import math
import operator
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_ITEMS = 1_000_000
"""Characters of texts, and items of lists and dictionaries, that all lines of a file together may make."""
MOST_BITS = 4096
"""Bits of an integer, at most."""
FORMAT = re.compile(r"%[sdif%]")
"""What a text may have for the values that % puts into it: no widths."""
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


class _Names(dict[str, Any]):
    """The values of names so far; and how much has been made, for a line can double what another one made."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._lines = re.split(rb"\r\n|\r|\n", text.encode())
        self._made = 0

    def make(self, node: ast.AST, items: int) -> None:
        """Counts what is about to be made. Raises Unread: it is too much."""
        if self._made + items > MOST_ITEMS:
            raise Unread(node, f"{self.text(node)} is too long: a file may make {MOST_ITEMS:,} characters and items")
        self._made += items

    def text(self, node: ast.AST) -> str:
        """What stands in the file, cut. `ast.unparse` takes long where expressions are nested deeply."""
        begin, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
        several = getattr(node, "end_lineno", 0) != getattr(node, "lineno", 0)
        line = self._lines[getattr(node, "lineno", 1) - 1]
        shown = line[begin : begin + 60 if several else min(end, begin + 60)]
        return repr(shown.decode(errors="ignore"))

    def unread(self, node: ast.AST, rule: str = "cannot be determined without running the file") -> Unread:
        return Unread(node, f"the value of {self.text(node)} {rule}")


def values(text: str) -> dict[str, Any]:
    """What the names of a module have at its end.

    A name whose value is not certain is an `Unread`, which whoever needs it raises.

    Raises:
        Unread: the file does more than to give values to names.
        SyntaxError: it is not Python, or too deeply nested to be read.
    """
    known = _Names(text)
    try:
        statements = ast.parse(text).body
    except (MemoryError, RecursionError) as error:
        raise SyntaxError("it is nested too deeply") from error
    except ValueError as error:
        raise SyntaxError("it has NUL bytes") from error
    except SyntaxError as error:
        if "int_max_str_digits" in str(error):
            raise SyntaxError(f"line {error.lineno} has an integer of too many digits") from error
        raise
    for statement in statements:
        try:
            _read(statement, known)
        except RecursionError:
            raise Unread(statement, f"{known.text(statement)} is nested too deeply") from None
    return dict(known)


def _read(statement: ast.stmt, known: _Names) -> None:
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
            _dict(place.value, known)[_hashable(place.slice, known)] = _or_unread(value, known)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="update"), args=[given], keywords=[])):
            more = _dict(given, known)
            known.make(statement, len(more))
            _dict(of, known).update(more)
        case _:
            raise Unread(statement, f"{known.text(statement)} is not an assignment of a value to a name")


def _dict(node: ast.expr, known: _Names) -> dict[Any, Any]:
    found = _value(node, known)
    if not isinstance(found, dict):
        raise Unread(node, f"{known.text(node)} is not a dictionary")
    return found


def _or_unread(node: ast.expr, known: _Names) -> Any:
    try:
        return _value(node, known)
    except Unread as unread:
        return unread


def _value(node: ast.expr, known: _Names) -> Any:
    match node:
        case ast.Constant(value=value):
            return _bounded(node, value, known)
        case ast.Name(id=name) if name in known:
            if isinstance(known[name], Unread):
                raise known[name].with_traceback(None)
            return known[name]
        case ast.Name(id="object" | "int" | "float" | "str" | "bool" as name):
            return Imported(name)
        case ast.Attribute(value=of, attr=attribute):
            found = _value(of, known)
            if isinstance(found, Imported):
                known.make(node, len(found.name))
                return Imported(f"{found}.{attribute}")
        case ast.List(elts=items) | ast.Tuple(elts=items):
            known.make(node, len(items))
            return [_or_unread(item, known) for item in items]
        case ast.Dict(keys=keys, values=parts):
            made: dict[Any, Any] = {}
            for key, part in zip(keys, parts, strict=True):
                if key is None:
                    known.make(part, len(more := _dict(part, known)))
                    made |= more
                else:
                    made[_hashable(key, known)] = _or_unread(part, known)
            return made
        case ast.UnaryOp(op=ast.USub(), operand=operand) if isinstance(of := _value(operand, known), int | float):
            return -of
        case ast.UnaryOp(op=ast.Not(), operand=operand) if isinstance(of := _value(operand, known), bool):
            return not of
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            one, other = _dict(left, known), _dict(right, known)
            known.make(node, len(one) + len(other))
            return one | other
        case ast.BinOp(left=left, op=how, right=right) if type(how) in _OPERATORS:
            return _computed(node, _OPERATORS[type(how)], _value(left, known), _value(right, known), known)
        case ast.Subscript(value=of, slice=key):
            found = _value(of, known)
            try:
                part = found[_value(key, known)]
            except (TypeError, KeyError, IndexError):
                raise Unread(node, f"{known.text(node)} is not defined") from None
            if isinstance(part, Unread):
                raise part.with_traceback(None)
            return part
        case ast.Call(func=function, args=arguments, keywords=keywords):
            return _called(node, _dotted(function), arguments, keywords, known)
    raise known.unread(node)


def _dotted(node: ast.expr) -> str:
    """Such as os.path.join; empty for a function without a name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name() | ast.Attribute(value=ast.Name()) as of, attr=name):
            return f"{_dotted(of)}.{name}"
    return ""


def _bounded(node: ast.AST, value: Any, known: _Names) -> Any:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise known.unread(node, "is too large")
    return value


def _hashable(node: ast.expr, known: _Names) -> Any:
    key = _value(node, known)
    if not isinstance(key, str | int | float | bool | None):
        raise Unread(node, f"{known.text(node)} cannot be a key")
    return key


def _computed(node: ast.expr, how: Callable[[Any, Any], Any], left: Any, right: Any, known: _Names) -> Any:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if how is operator.pow and numbers and not (abs(left) < 1e6 and abs(right) < 100):
        raise known.unread(node, "is too large")
    if isinstance(left, Imported) or isinstance(right, Imported):
        raise known.unread(node)
    if not numbers:
        known.make(node, _length(node, how, left, right, known))
    try:
        return _bounded(node, how(left, right), known)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise Unread(node, f"{known.text(node)}: {error}") from None


def _length(node: ast.expr, how: Callable[[Any, Any], Any], left: Any, right: Any, known: _Names) -> int:
    """Items of a text or list before it is made; 0 where Python makes none."""
    match left, right:
        case (str() | list(), int()) if how is operator.mul:
            return len(left) * max(right, 0)
        case (int(), str() | list()) if how is operator.mul:
            return len(right) * max(left, 0)
        case (str(), str()) | (list(), list()) if how is operator.add:
            return len(left) + len(right)
        case str(), str() | int() | float() if how is operator.mod:
            if "%" in FORMAT.sub("", left):
                raise known.unread(node)
            return len(left) + (len(right) if isinstance(right, str) else MOST_BITS)
        case str(), _ if how is operator.mod:
            raise known.unread(node)
    return 0


def _called(node: ast.expr, name: str, arguments: list[ast.expr], keywords: list[ast.keyword], known: _Names) -> Any:
    if name == "dict" and len(arguments) <= 1:
        made: dict[Any, Any] = dict(_dict(arguments[0], known)) if arguments else {}
        known.make(node, len(made))
        for one in keywords:
            more = _dict(one.value, known) if one.arg is None else {one.arg: _or_unread(one.value, known)}
            known.make(node, len(more))
            made |= more
        return made
    if keywords:
        raise known.unread(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
        return _copied(node, _value(node.args[0] if node.args else node.func.value, known), known)
    given = [_value(one, known) for one in arguments]
    match name, given:
        case "os.path.join" | "path.join" | "join", [str(), *_] if all(isinstance(one, str) for one in given):
            known.make(node, sum(len(one) + 1 for one in given))
            return posixpath.join(*given)
        case "copy.deepcopy" | "deepcopy", [value]:
            return _copied(node, value, known)
        case "int" | "float" | "math.sqrt" | "np.sqrt", [int() | float() as value]:
            convert: Callable[[Any], Any] = {"int": int, "float": float}.get(name, math.sqrt)
            try:
                return convert(value)
            except (ValueError, OverflowError) as error:
                raise Unread(node, f"{known.text(node)}: {error}") from None
    raise known.unread(node)


def _copied(node: ast.expr, value: Any, known: _Names) -> Any:
    if not isinstance(value, dict | list):
        return value
    known.make(node, len(value) + 1)
    if isinstance(value, list):
        return [_copied(node, part, known) for part in value]
    return {key: _copied(node, part, known) for key, part in value.items()}
