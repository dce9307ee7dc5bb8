"""Every format gives its documents, compressed or not; what is broken is named with file and line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from data_prep.errors import BadDocument, DataPrepError
from data_prep.indexed.manifest import Manifest
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import corpus_of
from data_prep.text.encode import Options
from data_prep.text.formats import Documents, Format, text_of
from data_prep.tokenizers.tokenizer import ByteTokenizer
from megatron_ext.data.indexed_dataset import IndexedDataset

TEXTS = ["first", "Grüße, 世界\nsecond line", "third " * 1000]
JSONL = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode()
DUMP = b"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo><namespaces><namespace key="0" case="first-letter" /></namespaces></siteinfo>
  <page><title>Anarchism</title><ns>0</ns><id>12</id><revision><id>1</id><text bytes="9" xml:space="preserve">
'''Anarchism''' is a [[political philosophy|philosophy]].&lt;ref&gt;A note&lt;/ref&gt; {{Infobox|name=x}}

== History ==
[[File:A.jpg|thumb|200px|A caption]]Long &amp;amp; old. __NOTOC__
{| class="wikitable"
|-
| a cell
|}
[[Category:Politics]]</text></revision></page>
  <page><title>AccessibleComputing</title><ns>0</ns><redirect title="Computer accessibility" />
    <revision><text>#REDIRECT [[Computer accessibility]]</text></revision></page>
  <page><title>Talk:Anarchism</title><ns>1</ns><revision><text>Chatter</text></revision></page>
</mediawiki>
"""

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".GZ": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def made(tmp_path: Path, *files: tuple[str, bytes], **options: object) -> tuple[list[str], Manifest]:
    """The documents of data prepared from these files, and the manifest."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in files:
        (folder / name).write_bytes(content)
    request = Request(corpus=corpus_of([folder]), tokenizer=ByteTokenizer(), options=Options(**options))  # type: ignore[arg-type]
    manifest = prepare(request, tmp_path / "out" / "x")
    data = IndexedDataset(tmp_path / "out" / "x")
    return [ByteTokenizer().decode(data[document]) for document in range(len(data))], manifest


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_give_a_document_each(tmp_path: Path, suffix: str) -> None:
    assert made(tmp_path, (f"a.jsonl{suffix}", COMPRESS[suffix](JSONL)))[0] == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_an_archive_of_several_parts_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    lines = JSONL.splitlines(keepends=True)
    parts = b"".join(COMPRESS[suffix](line) for line in lines)
    assert made(tmp_path, (f"a.jsonl{suffix}", parts))[0] == TEXTS


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (Documents.file, ["a\nb\n\n \nc\n"]),
        (Documents.line, ["a\n", "b\n", "c\n"]),
        (Documents.paragraph, ["a\nb\n", "c\n"]),
    ],
    ids=str,
)
def test_plain_text_falls_into_documents_as_told(tmp_path: Path, documents: Documents, expected: list[str]) -> None:
    assert made(tmp_path, ("a.txt", b"a\nb\n\n \nc\n"), documents=documents)[0] == expected


@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_a_dump_gives_the_words_of_its_articles(tmp_path: Path, suffix: str) -> None:
    (article,), _ = made(tmp_path, (f"enwiki-pages-articles.xml{suffix}", COMPRESS[suffix](DUMP)))
    assert article == "Anarchism\n\nAnarchism is a philosophy.\n\nHistory\nLong & old.\n"


def test_filters_leave_out_what_they_are_told_and_count_it(tmp_path: Path) -> None:
    texts = ["", "ab", "abc", "abcd", "abc", "abcde", "abcd"]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()
    kept, manifest = made(tmp_path, ("a.json", lines), key="body", min_chars=3, max_chars=4, unique=True)
    assert kept == ["abc", "abcd"]
    assert manifest.left_out == {"empty": 1, "short": 1, "long": 1, "duplicate": 2}


@pytest.mark.parametrize(
    ("package", "name", "content"),
    [("zstandard", "a.txt.zst", b"("), ("mwparserfromhell", "a.xml", DUMP)],
    ids=["zstandard", "mwparserfromhell"],
)
def test_a_package_that_is_not_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, content: bytes
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataPrepError, match=rf"the Python package {package} is needed .*: pip install 'tdpp\[data\]'"):
        made(tmp_path, (name, content))


BROKEN = {
    "not UTF-8": ("b.txt", b"a\nb\n\xe9t\xe9\n", r"b\.txt:3: not UTF-8 \(byte 0xe9\)"),
    "not UTF-8 in an archive": ("b.txt.gz", gzip.compress(b"a\n\xff"), r"b\.txt\.gz:2: not UTF-8 \(byte 0xff\)"),
    "no JSON": ("b.jsonl", JSONL + b"{\n", r"b\.jsonl:4: not JSON \(Expecting .*\); each line must be an object"),
    "no object": ("b.jsonl", b"\n[1]\n", r"b\.jsonl:2: not a JSON object with the text under 'text', but \[1\]"),
    "no key": (
        "b.jsonl",
        JSONL + b'{"id": 1, "body": "x"}',
        r"b\.jsonl:4: no key 'text'; its keys are 'id', 'body'; ch",
    ),
    "no key within": (
        "b.jsonl",
        b'{"text": {"a": 1}}',
        r"b\.jsonl:1: 'text' is not text, but \{\"a\": 1\}; choose another key",
    ),
    "no text": ("b.jsonl", b'{"text": null}', r"b\.jsonl:1: 'text' is not text, but null; choose another key with"),
    "half a character": ("b.jsonl", rb'{"text": "\ud83d"}', r"b\.jsonl:1: 'text' has half a character \(\\ud83d\)"),
    "a gz cut short": ("b.txt.gz", gzip.compress(b"x\n" * 9)[:-9], r"b\.txt\.gz:\d+: cannot be .* ends in the middle"),
    "a bz2 cut short": ("b.txt.bz2", bz2.compress(b"x\n" * 9)[:-9], r"b\.txt\.bz2:\d+: cannot be .* ends in the mid"),
    "a zst cut short": ("b.txt.zst", COMPRESS[".zst"](b"x\n" * 9)[:-1], r"b\.txt\.zst:\d+: .*ends in the middle"),
    "a gz of no bytes": ("b.txt.gz", b"", r"b\.txt\.gz:1: cannot be .* is empty"),
    "a bz2 of no bytes": ("b.txt.bz2", b"", r"b\.txt\.bz2:1: cannot be .* ends in the middle"),
    "a zst of no bytes": ("b.txt.zst", b"", r"b\.txt\.zst:1: cannot be .* is empty"),
    "no gz": ("b.txt.gz", b"text", r"b\.txt\.gz:1: cannot be decompressed .* \(Not a gzipped file"),
    "no bz2": ("b.txt.bz2", b"text" * 9, r"b\.txt\.bz2:1: cannot be decompressed any further \(Invalid data stream\)"),
    "no zst": ("b.txt.zst", b"text" * 9, r"b\.txt\.zst:1: cannot be decompressed any further"),
    "a dump cut short": ("b.xml", DUMP[:-20], r"b\.xml:\d+: not XML from here on .*not copied completely"),
    "nothing at all": ("b.txt", b"", r"source: no text in its files \(1 empty\)"),
}


def test_a_key_may_lie_within_another(tmp_path: Path) -> None:
    deep, flat = b'{"record": {"text": "deep"}}', b'{"record.text": "flat", "record": {"text": "no"}}'
    assert [text_of(line, Format.jsonl, "record.text") for line in (deep, flat)] == ["deep", "flat"]
    for line, message in (
        (b'{"record": {"id": 1}}', "no key 'record.text', in which 'text' is missing; its keys are 'id'; choose"),
        (b'{"record": "text"}', "no key 'record.text', in which 'text' is missing; its keys are none; choose"),
        (b'{"id": 1}', "no key 'record.text'; its keys are 'id'; choose"),
    ):
        with pytest.raises(BadDocument, match=message):
            text_of(line, Format.jsonl, "record.text")


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_text_is_named_with_its_place_and_leaves_nothing(tmp_path: Path, broken: str) -> None:
    name, content, message = BROKEN[broken]
    with pytest.raises(DataPrepError, match=message):
        made(tmp_path, (name, content))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_byte_order_mark_is_no_text() -> None:
    assert text_of(codecs.BOM_UTF8 + "text é".encode(), Format.text, "text") == "text é"
    assert text_of(codecs.BOM_UTF8 + b'{"text": "a"}', Format.jsonl, "text") == "a"
    with pytest.raises(BadDocument, match="0xff"):
        text_of(codecs.BOM_UTF8 + b"a\xff", Format.text, "text")
