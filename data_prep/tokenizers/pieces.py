"""Long texts in pieces: the tokenizers library takes some 160 bytes of memory for each byte given to it at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

PIECE = 1 << 18
"""Characters; a piece is as much longer as it takes to find a place for the cut."""
CUT = re.compile("(?<=[^\\s\u180e])\n")
"""Before a line's end that follows no space; U+180E was one in older Unicode."""


def pieces(text: str) -> Iterator[str]:
    """`text`, cut only where GPT-2's pre-tokenizer cuts as well, so that the pieces' tokens are those of the whole.

    Its expression looks ahead, over spaces alone, but never back, and no match of it holds a line's end after
    something else: the rest of a text from such a line's end on is matched as if it stood alone.
    """
    start = 0
    while len(text) - start > PIECE and (cut := CUT.search(text, start + PIECE)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def may_be_cut(content: str) -> bool:
    """Whether a tokeniser, by its tokenizer.json, gives a text's pieces the tokens of the whole.

    That is GPT-2's form: nothing but its pre-tokenizer sees more than one word. Whatever else a tokeniser may have,
    such as a token of several lines, may see a cut.
    """
    settings = json.loads(content)
    splits = settings.get("pre_tokenizer") or {}
    return (
        settings.get("normalizer") is None
        and splits.get("type") == "ByteLevel"
        and splits.get("use_regex", True)
        and not splits.get("add_prefix_space", True)
        and all(token["special"] for token in settings.get("added_tokens", []))
    )
