"""Words of a command line whose keys hold text, with quotes around what Hydra's grammar would read as something else
(conf/reading/written_text.py). This imports Hydra, which a command whose configuration is kept already does without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from antlr4 import CommonTokenStream, InputStream, ParserRuleContext, Token  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_visitor import HydraErrorListener
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from conf.reading.words import quoted
from conf.reading.written_text import below, holds_text, kind_at

_CASTS = ("int", "float", "bool", "json_str", "range", "interval", "glob")
"""Functions of Hydra's grammar whose arguments are no texts."""
_READ: dict[int, Callable[[str], object]] = {
    OverrideLexer.INT: int,
    OverrideLexer.FLOAT: float,
    OverrideLexer.BOOL: lambda text: text.lower() == "true",
}
_MISREAD = re.compile(r"[0-9]|true|false|inf|nan", re.IGNORECASE)
"""Without any of these, no value is a number or a switch."""


class _Choice(str):
    """The name of a group's file."""


def quote_texts(word: str, kind: Any, groups: Collection[str]) -> tuple[str, dict[str, str]]:
    """A word of a command line, with those texts in quotes that Hydra would read as something else, and these texts by
    how they are quoted. Hydra says what is wrong with a word that it cannot read."""
    key, _, value = word.lstrip("+~").partition("=")
    of_key = _Choice if key.partition("@")[0] in groups else kind_at(kind, key.strip().split("."))
    if of_key in (None, Any, int, float, bool) or not _MISREAD.search(value):
        return word, {}
    try:
        found = list(_misread(_tree(word), of_key))
    except HydraException:
        return word, {}
    if found:
        word = word.rstrip()  # which the grammar allows behind a number, but not behind quotes
    for token in reversed(found):
        word = word[: token.start] + quoted(token.text) + word[token.stop + 1 :]
    return word, {quoted(token.text): token.text for token in found}


def _tree(word: str) -> ParserRuleContext:
    """Parses a word by Hydra's grammar. Raises HydraException: it cannot be read."""
    lexer = OverrideLexer(InputStream(word))
    parser = OverrideParser(CommonTokenStream(lexer))
    for one in (lexer, parser):
        one.removeErrorListeners()
        one.addErrorListener(HydraErrorListener())
    return parser.override()  # type: ignore[no-untyped-call]


def _misread(node: Any, kind: Any) -> Iterator[Token]:
    """Numbers and switches where the schema has text, unless they are written as Python would write them."""
    children = list(node.getChildren()) if isinstance(node, ParserRuleContext) else []
    if isinstance(node, OverrideParser.FunctionContext) and children[0].getText() in _CASTS:
        return
    if isinstance(node, OverrideParser.PrimitiveContext):
        tokens = [child.symbol for child in children if child.symbol.type != OverrideLexer.WS]
        if len(tokens) == 1 and tokens[0].type in _READ and holds_text(kind) and _differs(tokens[0], kind):
            yield tokens[0]
    elif isinstance(node, OverrideParser.ListContainerContext):
        for child in children:
            yield from _misread(child, below(kind, "0"))
    elif isinstance(node, OverrideParser.DictKeyValuePairContext):
        yield from _misread(children[-1], below(kind, children[0].getText().strip()))
    else:
        for child in children:
            yield from _misread(child, kind)


def _differs(token: Token, kind: Any) -> bool:
    """Whether it would become another text; a number is no choice at all."""
    return kind is _Choice or str(_READ[token.type](token.text)) != token.text
