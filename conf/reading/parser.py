"""Command lines of words and options, which argparse reads; commands of words alone do without."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn, TypeVar

from conf.reading.values import NoValue, Reader
from conf.visible import shortened, visible

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

T = TypeVar("T")

UNKNOWN = "unrecognized arguments: "
"""What argparse says before the words that no option and no argument takes."""


def option(reader: Reader[T]) -> Reader[T]:
    """`reader` as argparse takes it, which puts the option before the message."""

    def read_option(text: str) -> T:
        try:
            return reader(text)
        except NoValue as rule:
            raise argparse.ArgumentTypeError(f"{text!r} {rule}") from rule

    return read_option


class Parser(argparse.ArgumentParser):
    """One whose messages a terminal can show, whatever words they quote."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Prints argparse's help, which drops what finds no room."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """In one line: the usage, which argparse prints as well, is what --help is for."""
        message = re.sub(r"ignored explicit argument ('.*')$", r"takes no value, and \1 is one", message)
        self.exit(2, visible(shortened(f"{self.prog}: error: {message}; {self._way_out(message)}")) + "\n")

    def _way_out(self, message: str) -> str:
        _, unknown, words = message.partition(UNKNOWN)
        word = words.split(" ")[0].partition("=")[0] if unknown else ""
        near = difflib.get_close_matches(word, {*_options(self)}, cutoff=0.7) if word.startswith("-") else []
        return f"did you mean {' or '.join(near)}?" if near else f"see '{self.prog} --help'"


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser and of the commands below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
