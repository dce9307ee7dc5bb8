"""The text of a gettext catalogue that is not compiled (.po)."""

from __future__ import annotations

import ast
import codecs
import re
from collections.abc import Iterator

_CHARSET = re.compile(rb"charset=([\w.-]+)")
_KEYWORD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s*(".*")$')
CONTEXT = "\x04"


def po_messages(content: bytes) -> dict[str, str]:
    """Translations by message, a context and U+0004 before it; the header is that of the empty message.

    Fuzzy translations and obsolete messages are left out; of a message with several numbers the singular is taken.

    Raises:
        ValueError: it is not such a text; it names the line.
        LookupError: its character set is not known.
    """
    found = _CHARSET.search(content)
    charset = found[1].decode() if found and found[1] != b"CHARSET" else "utf-8"
    messages = {}
    for entry in _entries(content.removeprefix(codecs.BOM_UTF8).decode(charset)):
        text = entry.get("msgstr", entry.get("msgstr[0]", ""))
        if "msgid" in entry and text:
            context = entry["msgctxt"] + CONTEXT if "msgctxt" in entry else ""
            messages[context + entry["msgid"]] = text
    if "" not in messages:
        raise ValueError("it has no header, the translation of an empty message")
    return messages


def _entries(text: str) -> Iterator[dict[str, str]]:
    """The fields of each entry that is neither fuzzy nor obsolete."""
    entry: dict[str, str] = {}
    field, fuzzy = "", False
    for number, raw in enumerate([*text.split("\n"), ""], 1):
        line = raw.strip()
        comment = line.startswith("#")
        if (not line or comment) and "msgid" in entry:
            if not fuzzy or not entry["msgid"]:
                yield entry
            entry, field, fuzzy = {}, "", False
        if comment:
            fuzzy = fuzzy or (line.startswith("#,") and "fuzzy" in line)
        elif keyword := _KEYWORD.match(line):
            field = keyword[1]
            if field in entry or (field == "msgctxt" and "msgid" in entry):  # entries need no empty line between them
                if not fuzzy or not entry.get("msgid"):
                    yield entry
                entry, fuzzy = {}, False
            entry[field] = _unquoted(keyword[2], number)
        elif line.startswith('"') and field:
            entry[field] += _unquoted(line, number)
        elif line:
            raise ValueError(f"line {number} is {line[:40]!r}")


def _unquoted(text: str, line: int) -> str:
    try:
        found = ast.literal_eval(text)
        found.encode()  # there is half a character in it, if that fails
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ValueError(f"line {line} is {text[:40]!r}") from error
    return str(found)
