"""The formats of text: how files fall into raw documents, and how these become text."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from xml.parsers import expat

from data_prep.errors import BadDocument, missing_package
from data_prep.files.archives import SUFFIXES

if TYPE_CHECKING:
    from mwparserfromhell.wikicode import Wikicode


LARGEST = 1 << 30
"""Bytes of one document. The index takes 2^31 tokens, and a document is in memory as a whole."""


class Format(StrEnum):
    text = "text"
    jsonl = "jsonl"
    mediawiki = "mediawiki"
    parquet = "parquet"


class Documents(StrEnum):
    """What a document is in plain text."""

    file = "file"
    line = "line"
    paragraph = "paragraph"
    """Lines up to the next empty one."""


class Raw(NamedTuple):
    """A document as it stands in its file."""

    file: int
    """The number of the file in the source."""
    number: int
    """In its file, from 0."""
    line: int
    """Where it begins in its file, from 1."""
    content: bytes


def format_of(path: Path) -> Format:
    """Tells the format by the ending of a file's name, before that of a compressed file."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return Format.parquet
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    if name.endswith((".jsonl", ".json", ".ndjson")):
        return Format.jsonl
    return Format.mediawiki if name.endswith(".xml") else Format.text


def raw_documents(stream: IO[bytes], kind: Format, documents: Documents) -> Iterator[tuple[int, bytes]]:
    """Line (from 1) and content of each document of a file; a document at a time is in memory. Raises BadDocument: a
    document is too large, or a dump not well-formed; its line counts in the file."""
    if kind is Format.mediawiki:
        return pages(stream)
    if kind is Format.text and documents is Documents.file:
        return _whole(stream)
    if kind is Format.text and documents is Documents.paragraph:
        return _paragraphs(stream)
    return ((number, line) for number, line in _lines(stream) if not line.isspace())


def _whole(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise BadDocument(0, f"larger than a document may be ({LARGEST} bytes): take --documents line or paragraph")
    yield 1, content


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(LARGEST + 1):
        number += 1
        if len(line) > LARGEST:
            raise BadDocument(number - 1, f"a line longer than {LARGEST} bytes; is each document on a line of its own?")
        yield number, line


def _paragraphs(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    held: list[bytes] = []
    first = size = 0
    for number, line in _lines(stream):
        if not line.isspace():
            first = first if held else number
            held.append(line)
            size += len(line)
            if size > LARGEST:
                raise BadDocument(first - 1, f"a paragraph larger than {LARGEST} bytes; take --documents line")
        elif held:
            yield first, b"".join(held)
            held, size = [], 0
    if held:
        yield first, b"".join(held)


def text_of(content: bytes, kind: Format, key: str) -> str:
    """The text of a raw document, without a byte order mark; of JSON the value of `key`, or of `key.within`. Raises
    BadDocument: it has none."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = 0 if kind is Format.parquet else content[: error.start].count(b"\n")
        raise BadDocument(line, f"not UTF-8 (byte {content[error.start]:#04x})") from error
    if kind is Format.jsonl:
        return _value(text, key)
    if kind is Format.mediawiki:
        title, _, markup = text.partition("\n\n")
        body = plain_text(markup)
        return f"{title}\n\n{body}\n" if body else ""
    return text


def _value(line: str, key: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument(0, f"not JSON ({error}); each line must be an object of its own") from error
    if not isinstance(record, dict):
        raise BadDocument(0, f"not a JSON object with the text under {key!r}, but {line.strip()[:40]}")
    value: Any = record
    for name in [key] if key in record else key.split("."):
        if not isinstance(value, dict) or name not in value:
            found = ", ".join(map(repr, value)) if value and isinstance(value, dict) else "none"
            where = "" if value is record else f", in which {name!r} is missing"
            raise BadDocument(0, f"no key {key!r}{where}; its keys are {found}; choose one with --key")
        value = value[name]
    if not isinstance(value, str):
        raise BadDocument(0, f"{key!r} is not text, but {json.dumps(value)[:40]}; choose another key with --key")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadDocument(0, f"{key!r} has half a character (\\u{ord(value[error.start]):04x})") from error
    return value


DIGEST = 16
"""Bytes of a text's digest."""


def digest(text: str) -> bytes:
    """What two texts share only if they are the same."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()


BLOCK = 1 << 18
ARTICLES = "0"
"""The namespace of articles; the others hold talk, users, templates and the like."""
FILES = re.compile(r"\s*:?\s*(file|image|media|category)\s*:", re.IGNORECASE)
"""Links that show a picture or sort the page. Other languages have names of their own for these besides."""
SWITCHES = re.compile(
    "__(?:(?:NO|FORCE)?TOC|(?:NO)?INDEX|NOGALLERY|NOEDITSECTION|(?:NO)?NEWSECTIONLINK|HIDDENCAT|DISAMBIG|"
    "NO(?:TITLE|CONTENT)CONVERT|NO[TC]C|STATICREDIRECT|EXPECTUNUSEDCATEGORY)__"
)
"""How a page asks for a table of contents and the like (https://www.mediawiki.org/wiki/Help:Magic_words)."""
LEFT_OUT = frozenset({"ref", "references", "gallery", "timeline", "math", "score", "table", "style", "imagemap"})


def pages(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Line, and title, empty line, wiki markup (UTF-8) of each article of a dump; no redirects.

    One page is in memory at a time, in its newest revision of those the dump has.

    Raises:
        BadDocument: the dump is not well-formed, as where it was cut short.
    """
    parser = expat.ParserCreate()
    parser.buffer_text = True
    builder = _Pages(parser)
    try:
        while block := stream.read(BLOCK):
            parser.Parse(block, False)
            yield from builder.take()
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        why = f"not XML from here on ({expat.errors.messages[error.code]})"
        raise BadDocument(error.lineno - 1, f"{why}; the dump is damaged or was not copied completely") from error


class _Pages:
    """What expat calls; collects the pages that have ended."""

    def __init__(self, parser: expat.XMLParserType) -> None:
        self._parser = parser
        self._ready: list[tuple[int, bytes]] = []
        self._page: dict[str, str] = {}
        self._line = 0
        self._text: list[str] | None = None
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters

    def take(self) -> list[tuple[int, bytes]]:
        ready, self._ready = self._ready, []
        return ready

    def _start(self, name: str, _attributes: dict[str, str]) -> None:
        if name == "page":
            self._page, self._line = {}, self._parser.CurrentLineNumber
        elif name in ("title", "ns", "text"):
            self._text = []
        elif name == "redirect":
            self._page["redirect"] = ""

    def _characters(self, text: str) -> None:
        if self._text is not None:
            self._text.append(text)

    def _end(self, name: str) -> None:
        if self._text is not None and name in ("title", "ns", "text"):
            self._page[name], self._text = "".join(self._text), None
        elif name == "page" and self._page.get("ns") == ARTICLES and "redirect" not in self._page:
            content = f"{self._page.get('title', '')}\n\n{self._page.get('text', '')}"
            self._ready.append((self._line, content.encode()))


def plain_text(markup: str) -> str:
    """The text of wiki markup: no templates, tables, pictures, notes and categories; links become their words."""
    try:
        import mwparserfromhell as wiki
    except ModuleNotFoundError as error:
        raise missing_package("mwparserfromhell", "to read MediaWiki dumps") from error
    code = wiki.parse(markup)
    _prune(code)
    text = code.strip_code(normalize=True, collapse=True, keep_template_params=False)
    lines = [line.strip() for line in SWITCHES.sub("", text).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _prune(code: Wikicode) -> None:
    """Takes out of what shows what is to be left out. The library's own removal takes nearly as long as parsing."""
    from mwparserfromhell.nodes import Tag, Wikilink

    code.nodes = [node for node in code.nodes if not _left_out(node)]
    for node in code.nodes:
        if isinstance(node, Tag) and node.contents is not None:
            _prune(node.contents)
        elif isinstance(node, Wikilink) and node.text is not None:
            _prune(node.text)


def _left_out(node: object) -> bool:
    from mwparserfromhell.nodes import Tag, Wikilink

    if isinstance(node, Wikilink):
        return FILES.match(str(node.title)) is not None
    return isinstance(node, Tag) and str(node.tag).strip().lower() in LEFT_OUT
