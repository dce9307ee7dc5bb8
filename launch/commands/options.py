"""The options that a command has, as its parser knows them: what completion offers of `--…` and of their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from conf.reading.hydra_options import CONFIG_DIR, FULL
from launch.commands import module_of

OF_WORDS = {
    "launch": ("-m", "--multirun", FULL, "--cfg", "--resolve", "--package", "--info", CONFIG_DIR, "--help"),
    "search": (CONFIG_DIR, "--help"),
    "profile": (CONFIG_DIR, "--help"),
    "simulate": ("--json", CONFIG_DIR, "--help"),
    "rehearse": (CONFIG_DIR, "--help"),
}
"""Of commands that take words, as Hydra does, and have no parser."""


def offered(command: str, before: Sequence[str], word: str) -> list[str] | None:
    """What a word of a command may become where its parser decides; None where it may be anything else.

    Args:
        before: the words between the command and this one.
    """
    if command in OF_WORDS:
        return _beginning(word, OF_WORDS[command]) if word.startswith("-") else None
    parser = _parser(command, before)
    positional = [one for one in before if not one.startswith("-")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            if not positional:
                return _beginning(word, [*action.choices, *_names(parser)] if word.startswith("-") else action.choices)
            chosen: argparse.ArgumentParser = action.choices.get(positional[0], parser)
            parser = chosen
    values = {name: action for action in parser._actions for name in action.option_strings if action.nargs != 0}
    option, equals, value = word.partition("=")
    if equals and option in values:
        return [f"{option}={one}" for one in _beginning(value, values[option].choices)]
    if before and before[-1] in values and values[before[-1]].choices is not None:
        return _beginning(word, values[before[-1]].choices)
    if before and before[-1] in values and before[-1] != "--watch":  # --watch alone has a value, too
        return []
    if word.startswith("-"):
        return _beginning(word, _names(parser))
    choices = [one for action in parser._actions if not action.option_strings for one in action.choices or ()]
    return _beginning(word, choices) if choices else None


def _parser(command: str, before: Sequence[str]) -> argparse.ArgumentParser:
    """A command's module is imported only where the command is asked for."""
    if command == "init" and before[:1] == ["model"]:
        from launch.commands.initial import model

        return model.parser()
    parser = module_of(command).parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def _names(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings


def _beginning(start: str, names: object) -> list[str]:
    return [str(name) for name in names or () if str(name).startswith(start)]  # type: ignore[attr-defined]
