"""Pairs from gettext's catalogues, compiled (.mo) or not (.po): messages of programs, in English, and translations."""

from __future__ import annotations

import ast
import codecs
import gettext
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import error as StructError
from typing import NamedTuple

from data_prep.errors import DataPrepError
from data_prep.files.archives import content_of, is_archive, members
from data_prep.pairs.pair import Languages, Pair, code_of, same_language

SUFFIXES = (".mo", ".po")
ENGLISH = "en"
"""What the messages themselves are in."""
CONTEXT = "\x04"
"""Stands between a message's context and the message."""
_CODE = r"[a-z]{2,3}(?:[_-][A-Za-z]+)?(?:@[a-z]+)?"
_FOLDER = re.compile(rf"(?:^|/)({_CODE})/(LC_MESSAGES/)?([^/]+)\.[mp]o$")
_STEM = re.compile(rf"(?:^|/)(?:([^/]+)[.-])?({_CODE})\.[mp]o$")
_HEADER = re.compile(r"^language:\s*(\S+)", re.IGNORECASE | re.MULTILINE)


class Catalogue(NamedTuple):
    name: str
    """The same in all languages."""
    language: str
    """Empty where nothing says it."""
    messages: dict[str, str]
    """Translations by message, a context before it; of a message with several numbers the singular."""


@dataclass(frozen=True)
class Catalogues:
    """Files, folders and packages that hold catalogues of the languages; one of the two may be English."""

    files: tuple[Path, ...]
    languages: Languages

    def pairs(self) -> Iterator[Pair]:
        """In the order of the messages in the catalogues.

        Where neither language is English, the translations of a message into both make a pair.
        """
        found = [self._of_language(language) for language in self.languages]
        for side, language in zip(found, self.languages, strict=True):
            if not side and not same_language(ENGLISH, language):
                raise DataPrepError(
                    f"--source {', '.join(map(str, self.files))}: none of its catalogues is in language {language!r}; "
                    "a catalogue says its language in its header, or by its path, such as de/LC_MESSAGES/app.mo"
                )
        source, target = found
        for name in sorted(source.keys() | target.keys()):
            sides = source.get(name), target.get(name)
            for message in sides[0] or sides[1] or {}:
                texts = [_text(message, side, code) for side, code in zip(sides, self.languages, strict=True)]
                if texts[0] is not None and texts[1] is not None:
                    yield Pair(texts[0], texts[1])

    def _of_language(self, language: str) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, dict[str, str]]] = {}
        for path in self.files:
            for catalogue in _catalogues(path, self.languages):
                found.setdefault(catalogue.language, {})[catalogue.name] = catalogue.messages
        return found.get(code_of(language, found) or "", {})


def is_catalogue(name: str) -> bool:
    return name.endswith(SUFFIXES)


def _text(message: str, side: dict[str, str] | None, language: str) -> str | None:
    """A message in one language; None where it has no translation."""
    if side is not None:
        return side.get(message)
    return message.rpartition(CONTEXT)[2] if same_language(ENGLISH, language) else None


def _catalogues(path: Path, languages: Languages) -> Iterator[Catalogue]:
    if path.is_dir() or is_archive(path):
        for name, content in members(path, lambda name: is_catalogue(name) and _may_be_of(name, languages)):
            yield catalogue(content, name, f"{path}: {name}")
        return
    found = catalogue(content_of(path), str(path), str(path))
    given = next((language for language in languages if not same_language(ENGLISH, language)), "")
    yield found if found.language else found._replace(language=given)  # it was named, so it is of what was asked for


def _may_be_of(name: str, languages: Languages) -> bool:
    """Whether a catalogue's path does not name another language; `po/de.po` may be of any until its header is read."""
    found = _FOLDER.search(name)
    return found is None or not found[2] or any(same_language(language, found[1]) for language in languages)


def catalogue(content: bytes, name: str, shown: str) -> Catalogue:
    """A catalogue by the content and the path of its file. Raises DataPrepError: it is none; it names the file as
    `shown`."""
    try:
        messages = _compiled(content) if name.endswith(".mo") else po_messages(content)
    except (OSError, StructError, UnicodeDecodeError, LookupError, ValueError) as error:
        raise DataPrepError(f"{shown}: not a catalogue of gettext ({error}); get it again, or leave it out") from error
    header = _HEADER.search(messages.pop("", ""))
    folder, stem = _FOLDER.search(name), _STEM.search(name)
    if folder and not folder[2] and header and not same_language(folder[1], header[1]):
        folder = None  # a folder such as po/ or src/, not one of a language
    language = folder[1] if folder else header[1] if header else stem[2] if stem else ""
    domain = folder[3] if folder and folder[3] != folder[1] else (stem[1] or "messages") if stem else Path(name).stem
    return Catalogue(domain, language.split("@")[0], messages)


def _compiled(content: bytes) -> dict[str, str]:
    found = gettext.GNUTranslations(io.BytesIO(content))
    entries: dict[str | tuple[str, int], str] = found._catalog  # type: ignore[attr-defined]  # no other way to all
    plain = {(key, 0) if isinstance(key, str) else key: text for key, text in entries.items()}
    singular = {message: text for (message, number), text in plain.items() if number == 0}
    header = "".join(f"{key}: {text}\n" for key, text in found.info().items())
    return {**singular, "": header}


_CHARSET = re.compile(rb"charset=([\w.-]+)")
_KEYWORD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s*(".*")$')


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
