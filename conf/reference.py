"""Every key of a configuration, with its meaning, values, default and rule, as the schema has them, and what a word on
the command line may become.

`python -m conf.reference` prints docs/reference.md; `tdpp config` shows the same in a terminal. `python -m
conf.reference families` prints the table of families in docs/models.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf

from conf.compose import compose_unchecked
from conf.errors import ConfigError
from conf.reading.own_folders import groups
from conf.reading.user_files import choices
from conf.schema.experiment import Experiment
from conf.schema.model import Model
from megatron_ext.contract.keys import ranges_of
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import IMAGES, Family, ModelConfig, family_named, family_names

_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_PLURALS = {str: "texts", int: "whole numbers", Any: "tables"}
_ALONE = {"gpu"}
"""Groups that are chosen for a place: gpu@cluster.gpus.NAME."""
_NEEDED = "must be given"
_EMPTY = "empty"
_ANY_NAME = "*"
_HEAD = """\
# Every key of a configuration

Written by `python -m conf.reference` from the schema, which checks the keys. `tdpp config KEY` prints the same in a
terminal, and `tdpp launch --cfg job` prints every key with the value that it would have. `*` stands for a name of your
own. Rules that combine several keys are checked before anything starts; an error names the broken rule.

A key that takes text gets the characters that you write, in a file as on the command line: `00123`, `2024_01`, `yes`,
`12:30`, `1e3`. Only `null` means that it is not set; a text `null` needs quotes (on the command line two pairs,
`key='"null"'`). Whole numbers are decimal: `010` is 10.
""".splitlines()


@dataclass(frozen=True)
class Key:
    """One key; in its name `*` stands for a name that users choose."""

    name: str
    values: str
    """What it takes, in words."""
    default: str
    rule: str
    """The range of a number; empty without one."""
    meaning: str
    options: tuple[tuple[str, str], ...]
    """The words that it takes, each with its meaning, which may be empty."""


@dataclass(frozen=True)
class Part:
    """Keys that belong together."""

    name: str
    """Empty: those of the run as a whole."""
    meaning: str
    keys: tuple[Key, ...]


def parts() -> list[Part]:
    """All of them, in the schema's order; the run's own keys first."""
    return [part for part in _parts("", Experiment) if part.keys]


def found(name: str) -> list[Key]:
    """The key of this name, or the keys under it, also with names that users chose; none where there is no such key."""
    wanted = name.split(".")
    return [
        key
        for part in parts()
        for key in part.keys
        if len(at := key.name.split(".")) >= len(wanted)
        and all(mine in (theirs, _ANY_NAME) for mine, theirs in zip(at, wanted, strict=False))
    ]


def _parts(name: str, kind: Any) -> Iterator[Part]:
    documented, hints = _attribute_docs(kind), get_type_hints(kind)
    keys, further = list[Key](), list[Part]()
    for field in dataclasses.fields(kind):
        of, key = hints[field.name], f"{name}.{field.name}".lstrip(".")
        inner, below = of, key
        if get_origin(of) is dict:
            inner, below = get_args(of)[1], f"{key}.{_ANY_NAME}"
        elif get_origin(of) is list:
            inner, below = get_args(of)[0], f"{key}[{_ANY_NAME}]"
        if dataclasses.is_dataclass(inner):
            further += _parts(below, inner)
            if inner is of:
                continue
        default = _default(field)
        keys.append(
            Key(
                name=key,
                values="true, false or auto" if default == "auto" else _values(of),
                default=default,
                rule=str(ranges_of(kind).get(field.name, "")),
                meaning=documented.get(field.name, "") or _of_words(of),
                options=_options(of),
            )
        )
    yield Part(name, _first_paragraph(kind), tuple(keys))
    yield from further


def _first_paragraph(kind: Any) -> str:
    """Return the first paragraph of a class's own docstring; none that it inherits, or that dataclasses write."""
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.partition("\n\n")[0].split())


def _of_words(kind: Any) -> str:
    """What the words that a key takes are about."""
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    return next((_first_paragraph(one) for one in kinds if _is_words(one)), "")


def _is_words(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


@cache
def _attribute_docs(kind: Any) -> Mapping[str, str]:
    """The texts below the fields of a class, or the members of an enumeration."""
    inherited: list[Any] = [base for base in kind.__mro__[:0:-1] if dataclasses.is_dataclass(base)]
    docs = {name: text for base in inherited for name, text in _attribute_docs(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef))
    for before, after in pairwise(body):
        match before, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(inspect.cleandoc(text).split())
    return docs


def _values(kind: Any) -> str:
    if kind is Any:
        return "whole number or text"
    if get_origin(kind) in (UnionType, Union):
        return " or ".join("null" if one is type(None) else _values(one) for one in get_args(kind))
    if get_origin(kind) is list and _is_words(get_args(kind)[0]):
        return f"list of {_values(get_args(kind)[0])}"
    if get_origin(kind) is list:
        return f"list of {_PLURALS.get(get_args(kind)[0], 'groups of keys')}"
    if get_origin(kind) is dict:
        value = get_args(kind)[1]
        return f"{'texts or null' if value == str | None else _PLURALS.get(value, 'groups of keys')} by name"
    if _is_words(kind):
        return ", ".join(str(one.value) for one in kind)
    return _NAMES[kind]


def _options(kind: Any) -> tuple[tuple[str, str], ...]:
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    words = [one for of in kinds if _is_words(of) for one in of]
    return tuple((str(one.value), _about(one)) for one in words)


def _about(word: Any) -> str:
    """What a member of an enumeration means: the text below it, or what it says of itself."""
    kind: Any = type(word)
    return _attribute_docs(kind).get(word.name, getattr(word, "summary", ""))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        assert made in ({}, []), "a default that the reference cannot show"
        return _EMPTY
    if field.default == MISSING:
        return _NEEDED
    if field.default is None or isinstance(field.default, bool):
        return {None: "null", True: "true", False: "false"}[field.default]
    return str(field.default)


def unit_of(name: str) -> str:
    """In words, from the end of a key's name; empty where it says none."""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


UNITS = {
    "gbit_per_s": "gigabits a second",
    "_gb_per_s": "gigabytes a second",
    "_tflops": "10^12 operations a second",
    "_gib": "GiB",
    "_us": "microseconds",
    "_min": "minutes",
    "_s": "seconds",
    "_hours": "hours",
    "price_per_hour": "US dollars",
    "_per_day": "times a day",
    "watts": "watts",
    "max_cost": "US dollars",
}
"""Units by the end of a name."""


def markdown() -> str:
    """docs/reference.md."""
    lines = [*_HEAD, "", f"Groups of files: {'; '.join(_group(group) for group in sorted(groups()))}."]
    for part in parts():
        lines += ["", f"## {part.name or 'The run'}", ""]
        if part.meaning:
            lines += [part.meaning, ""]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{key.name}` | {_cell(_takes(key))} | {_cell(_shown_default(key))} | {_cell(_meaning(key))} |"
            for key in part.keys
        ]
    return "\n".join(lines) + "\n"


def _group(name: str) -> str:
    return f"`{name}` ({', '.join(choices(name, ()))})"


def _shown_default(key: Key) -> str:
    return key.default if key.default in (_NEEDED, _EMPTY) else f"`{key.default}`"


def _takes(key: Key) -> str:
    unit = unit_of(key.name)
    return ", ".join(filter(None, (key.values, unit, key.rule)))


def _meaning(key: Key) -> str:
    options = "; ".join(f"`{word}`: {meaning.removesuffix('.')}" for word, meaning in key.options if meaning)
    return " ".join(filter(None, (key.meaning, options)))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def families_table() -> str:
    """Every family that tdpp brings and that does not learn from images, as its description has it: the rows of a table
    in docs/models.md."""
    rows = ["| `model.family` | what it is | blocks | own options |", "|---|---|---|---|"]
    keys, usual = {field.name for field in dataclasses.fields(Model)}, family_named(DEFAULT).options
    for family in map(family_named, family_names()):
        if family.learns == IMAGES or family.user_code:
            continue
        summary = family.summary.removesuffix(".").replace(" (docs/models.md)", "")
        summary = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", summary)
        own = ", ".join(f"`{key}`" for key in family.options if key in keys and key not in usual)
        rows.append(f"| `{family.name}` | {summary} | {', '.join(_blocks(family))} | {own} |")
    return "\n".join(rows) + "\n"


def _blocks(family: Family) -> Iterator[str]:
    """The names of a model's blocks; of a row of them, that of the first."""
    model = ModelConfig(
        layers=2, hidden=1, heads=1, sequence_length=1, vocab_size=1, padded_vocab_size=1, family=family.name
    )
    rows, shown = {stack.kind: stack.name for stack in family.stacks(model)}, set[str]()
    for kind, _ in family.all_kinds(model):
        name = f"`{rows[kind]}.0` …" if kind in rows else f"`{kind}`"
        if name not in shown:
            yield name
        shown.add(name)


def candidates(word: str, others: Sequence[str]) -> list[str]:
    """Whole words that begin with `word`; `others` are those before it.

    What can be gone on with ends with `=` or a dot.
    """
    key = word.lstrip("+~")
    before = word[: len(word) - len(key)]
    key, equals, value = key.partition("=")
    if not equals:
        names = [f"{group}=" for group in sorted(groups() - _ALONE)] if "." not in key else []
        found = [*names, *_keys(key, others)]
        return [before + name for name in dict.fromkeys(found) if name.startswith(key)]
    several, comma, last = value.rpartition(",")
    return [f"{before}{key}={several}{comma}{one}" for one in _possible_values(key, others) if one.startswith(last)]


def _possible_values(key: str, others: Sequence[str]) -> list[str]:
    """The values of a group or key; none of one that takes any number or text."""
    group = key.partition("@")[0]
    if group in groups():
        return choices(group, others)
    kind: Any = Experiment
    for part in key.split("."):
        if dataclasses.is_dataclass(kind):
            kind = get_type_hints(kind).get(part)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
        if get_origin(kind) in (UnionType, Union):
            kind = next(one for one in get_args(kind) if one is not type(None))
    if kind is bool:
        return ["true", "false"]
    return [str(one.value) for one in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _keys(key: str, others: Sequence[str]) -> list[str]:
    """Those of the part of the configuration that `key` leads into, as the other words make it."""
    try:
        cfg = compose_unchecked(others)
    except ConfigError:  # the other words are not finished yet, either
        cfg = compose_unchecked()
    parent, dot, _ = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(node, DictConfig):
        return []
    return [f"{parent}{dot}{name!s}{'.' if OmegaConf.is_dict(node._get_node(name)) else '='}" for name in node]


if __name__ == "__main__":
    print(families_table() if sys.argv[1:] == ["families"] else markdown(), end="")
