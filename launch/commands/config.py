"""`tdpp config`: what the keys of a configuration mean, from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from conf.errors import ConfigError
from conf.reading.parser import Parser
from conf.reference import Key, found, parts, unit_of
from conf.visible import nearest, shortened
from launch.screen import print_table

WIDTH = 100
"""The width of a paragraph, in characters."""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp config <argv>`. Raises ConfigError: there is no such key."""
    key = parser().parse_args(argv).key
    if key is None:
        print_table(
            ["part", "keys", "meaning"],
            [[part.name or "(the run)", str(len(part.keys)), part.meaning] for part in parts()],
        )
        print("\n'tdpp config PART' lists the keys of a part, 'tdpp config KEY' explains one key.")
        return 0
    keys = found(key)
    if not keys:
        raise ConfigError(_unknown(key))
    if len(keys) == 1 and keys[0].name.count(".") == key.count("."):
        print(explained(keys[0]))
    else:
        print_table(
            ["key", "takes", "default", "meaning"],
            [[one.name, one.values, one.default, shortened(one.meaning)] for one in keys],
        )
    return 0


def parser() -> Parser:
    made = Parser(
        prog="tdpp config",
        description="Show what the keys of a configuration mean, which values they take, and their defaults.",
        epilog="'tdpp launch ... --cfg job' prints every key with its value under that command line.",
    )
    made.add_argument("key", nargs="?", help="a key, such as train.lr, or a part of the configuration, such as train")
    return made


def explained(key: Key) -> str:
    """A key, in some lines."""
    about = {"takes": key.values, "unit": unit_of(key.name), "rule": key.rule, "default": key.default}
    lines = [key.name, *textwrap.wrap(key.meaning, WIDTH, initial_indent="  ", subsequent_indent="  "), ""]
    lines += [f"  {word + ':':<9}{value}" for word, value in about.items() if value]
    for word, meaning in key.options:
        if meaning:
            lines += textwrap.wrap(meaning, WIDTH, initial_indent=f"    {word:<14} ", subsequent_indent=" " * 19)
    return "\n".join(lines)


def _unknown(key: str) -> str:
    names = [name for part in parts() for name in (part.name, *(one.name for one in part.keys)) if name]
    exact = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return f"{key} is not a configuration key; {nearest(key, names, exact)}'tdpp config' lists its parts"
