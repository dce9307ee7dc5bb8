"""MediaWiki dumps: pages out of the XML, text out of wiki markup (https://www.mediawiki.org/wiki/Help:Export)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING
from xml.parsers import expat

from data_prep.errors import BadDocument, missing_package

if TYPE_CHECKING:
    from mwparserfromhell.wikicode import Wikicode

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
