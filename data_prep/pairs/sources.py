"""What the paths of `--source` hold: which readers give their pairs.

LibreOffice's help has HTML pages of the same name in each language, whose paragraphs share their `id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.archives import SUFFIXES, files_below, is_archive, members, names
from data_prep.pairs.catalogues import Catalogues, is_catalogue
from data_prep.pairs.lines import TabSeparated, TwoFiles, split_named, without_compression
from data_prep.pairs.pair import Languages, Pair, Reader, code_of, same_language
from data_prep.text.encode import sentences

PAGE = re.compile(r"(?:^|/)([A-Za-z]{2,3}(?:[-_][A-Za-z0-9]+)*)/(text/.+\.html)$")
"""The language of a page, and its name, which is the same in all."""
PARAGRAPHS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6"})
VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"})
"""Elements that have no end."""
Paragraphs = dict[tuple[str, int], str]
"""Text by `id`, and by how often that was there before: what a page includes may come twice."""


@dataclass(frozen=True)
class HelpPages:
    """Folders and packages that together hold the pages of both languages."""

    files: tuple[Path, ...]
    languages: Languages

    def pairs(self) -> Iterator[Pair]:
        """The sentences of each paragraph, or the paragraph whole where the languages have unequal numbers of them."""
        sides = _pages(self.files, self.languages)
        for side, language in zip(sides, self.languages, strict=True):
            if not side:
                raise DataPrepError(
                    f"--source {', '.join(map(str, self.files))}: none of its help pages is in language {language!r}; "
                    "give the packages or folders of both languages, such as libreoffice-help-de and "
                    "libreoffice-help-en-us"
                )
        source, target = sides
        for page in sorted(source.keys() & target.keys()):
            for place, text in source[page].items():
                if place in target[page]:
                    yield from (Pair(*pair, page=page) for pair in _sentences(text, target[page][place]))


def is_page(name: str) -> bool:
    return PAGE.search(name) is not None


def _pages(files: tuple[Path, ...], languages: Languages) -> tuple[dict[str, Paragraphs], dict[str, Paragraphs]]:
    """The paragraphs of all pages by name, in each language."""
    found: dict[str, dict[str, Paragraphs]] = {}
    for path in files:
        for name, content in members(path, is_page):
            page = PAGE.search(name)
            assert page is not None
            if any(same_language(language, page[1]) for language in languages):
                found.setdefault(page[1], {})[page[2]] = paragraphs(_decoded(content, path, name))
    source, target = (found.get(code_of(language, found) or "", {}) for language in languages)
    return source, target


def _decoded(content: bytes, path: Path, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataPrepError(f"{path}: {name}:{line}: not UTF-8 (byte {content[error.start]:#04x})") from error


def _sentences(source: str, target: str) -> Iterator[tuple[str, str]]:
    sides = sentences(source), sentences(target)
    if len(sides[0]) == len(sides[1]):
        yield from zip(*sides, strict=True)
    else:
        yield source, target


def paragraphs(html: str) -> Paragraphs:
    """The text of the paragraphs and headings of a page that have an `id` and are not empty."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    return parser.found


class _Parser(HTMLParser):
    """Collects paragraphs; of words that differ by system or module (`switchinline`) the last, which is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Paragraphs = {}
        self._seen: dict[str, int] = {}
        self._id: str | None = None
        self._text: list[str] = []
        self._open: list[str] = []
        """Elements within the paragraph."""
        self._switches: list[tuple[int, int]] = []
        """How many elements and pieces of text each switch around had before it."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in PARAGRAPHS:
            self._finish()
            self._id = given.get("id") or None
        elif self._id is None:
            return
        elif tag == "br":
            self._text.append(" ")
        elif tag not in VOID:
            if self._switches and len(self._open) == self._switches[-1][0] + 1:
                del self._text[self._switches[-1][1] :]  # another choice: it takes the place of the one before
            if given.get("class") == "switchinline":
                self._switches.append((len(self._open), len(self._text)))
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in PARAGRAPHS:
            self._finish()
        elif self._id is not None and tag in self._open:
            while self._open.pop() != tag:
                pass
            while self._switches and len(self._open) <= self._switches[-1][0]:
                self._switches.pop()

    def handle_data(self, data: str) -> None:
        if self._id is not None and "script" not in self._open:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._finish()

    def _finish(self) -> None:
        if self._id is not None:
            before = self._seen[self._id] = self._seen.get(self._id, -1) + 1
            text = " ".join("".join(self._text).split())
            if text:
                self.found[self._id, before] = text
        self._id = None
        self._text, self._open, self._switches = [], [], []


TABS = ".tsv"
FORMS = (
    "pairs come from two files of lines, de first for --source-lang de; from Moses' corpus for corpus.de and "
    "corpus.en; from .tsv, .mo and .po files, or folders of them; and from .deb packages, tar files and folders with "
    "catalogues (.mo, .po) or LibreOffice's help pages"
)
_ENDING = re.compile(r"[a-z]{2,3}(?:[-_][A-Za-z]{2,4})?")


def languages_of(source: str | None, target: str | None, paths: Sequence[Path]) -> Languages:
    """The languages asked for, or those that the names of two files end in. Raises DataPrepError: nothing says them, or
    they are the same."""
    if source is None and target is None and len(paths) == 2:
        endings = [without_compression(path.name).rpartition(".")[2] for path in paths]
        if all(_ENDING.fullmatch(ending) for ending in endings) and not set(endings) & {
            "txt",
            "tsv",
            "mo",
            "po",
            "deb",
        }:
            source, target = endings
    for name, language in (("--source-lang", source), ("--target-lang", target)):
        if language is None:
            raise DataPrepError(f"{name} is missing: the code of a language, such as {name} de")
        if not re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", language):
            raise DataPrepError(f"{name} {language}: not the code of a language, such as de, en or en-US")
    assert source is not None and target is not None
    if source == target:
        raise DataPrepError(f"--source-lang {source} and --target-lang {target} are the same language; name two")
    return Languages(source, target)


def readers_of(paths: Sequence[Path], languages: Languages) -> list[Reader]:
    """The readers of all pairs, in the order of the paths; help pages and catalogues come last. Raises DataPrepError: a
    path is not there, or nobody can tell what it holds."""
    readers: list[Reader] = []
    plain: list[Path] = []
    pages: list[Path] = []
    catalogues: list[Path] = []
    for path in paths:
        if path.is_dir() or is_archive(path):
            held = names(path)
            in_folder = _in_folder(path, languages) if path.is_dir() else []
            readers += in_folder
            has_pages, has_catalogues = any(map(is_page, held)), any(map(is_catalogue, held))
            pages += [path] * has_pages
            catalogues += [path] * has_catalogues
            if not (in_folder or has_pages or has_catalogues):
                raise DataPrepError(f"--source {path}: it has no pairs; {FORMS}")
        elif not path.exists():
            readers.append(_moses(path, languages))
        elif not path.is_file():  # it is read twice, and a pipe or a device may never end
            raise DataPrepError(f"--source {path}: not a regular file; write its output to a file, and give that")
        elif is_catalogue(path.name):
            catalogues.append(path)
        elif without_compression(path.name).endswith(TABS):
            readers.append(TabSeparated(path, split_named(path)))
        else:
            plain.append(path)
    if len(plain) % 2:
        raise DataPrepError(
            f"--source {plain[-1]}: the file with its translation is missing: give both, {languages.source} first; "
            f"{FORMS}"
        )
    for two in zip(plain[::2], plain[1::2], strict=True):
        endings = [without_compression(path.name).rpartition(".")[2] for path in two]
        source, target = reversed(two) if endings == [languages.target, languages.source] else two
        readers.append(TwoFiles(source, target, split_named(source)))
    if pages:
        readers.append(HelpPages(tuple(pages), languages))
    if catalogues:
        readers.append(Catalogues(tuple(catalogues), languages))
    return readers


def _in_folder(folder: Path, languages: Languages) -> list[Reader]:
    """Returns readers of the folder's files of lines."""
    readers: list[Reader] = []
    for path in files_below(folder):
        name = without_compression(path.name)
        if name.endswith(TABS):
            readers.append(TabSeparated(path, split_named(path)))
        elif name.endswith(f".{languages.source}"):
            target = _existing(path.with_name(name.removesuffix(languages.source) + languages.target))
            if target is not None:
                readers.append(TwoFiles(path, target, split_named(path)))
    return readers


def _moses(path: Path, languages: Languages) -> TwoFiles:
    """`corpus` stands for `corpus.de` and `corpus.en`."""
    found = [_existing(path.with_name(f"{path.name}.{language}")) for language in languages]
    if found[0] is None and found[1] is None:
        raise DataPrepError(f"--source {path}: no such file or folder; {FORMS}")
    for side, language in zip(found, languages, strict=True):
        if side is None:
            raise DataPrepError(f"--source {path}: there is no {path}.{language}; {FORMS}")
    source, target = found
    assert source is not None and target is not None
    return TwoFiles(source, target, split_named(path))


def _existing(path: Path) -> Path | None:
    """The file, or the compressed one of this name."""
    names = [path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)]
    return next((name for name in names if name.is_file()), None)
