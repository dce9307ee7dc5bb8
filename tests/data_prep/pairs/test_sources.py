"""The forms that pairs come in, and what is wrong with files of them."""

from __future__ import annotations

import bz2
import gzip
import io
import struct
import tarfile
from pathlib import Path

import pytest

from data_prep.errors import DataPrepError
from data_prep.pairs.catalogues import po_messages
from data_prep.pairs.pair import Languages, Pair
from data_prep.pairs.sources import languages_of, paragraphs, readers_of

GERMAN = Languages("de", "en")


def read(*paths: Path, languages: Languages = GERMAN) -> list[Pair]:
    return [pair for reader in readers_of(paths, languages) for pair in reader.pairs()]


def compiled(messages: dict[str, str]) -> bytes:
    """A catalogue as msgfmt writes it."""
    ids = sorted(messages)
    keys = [one.encode() for one in ids]
    values = [messages[one].encode() for one in ids]
    start = 28 + 16 * len(ids)
    tables, data = [], b""
    for texts in (keys, values):
        for text in texts:
            tables.append(struct.pack("<2I", len(text), start + len(data)))
            data += text + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(ids), 28, 28 + 8 * len(ids), 0, 0)
    return header + b"".join(tables) + data


HEADER = "Language: de\nContent-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n"


def package(files: dict[str, bytes], compression: str = "xz") -> bytes:
    """A Debian package with these files."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=f"w:{compression}" if compression != "zst" else "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = held.getvalue()
    if compression == "zst":
        import zstandard

        data = zstandard.compress(data)
    found = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar", b"odd"), (f"data.tar.{compression}", data)):
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        found += b"\n" * (len(content) % 2)
    return found


def help_page(*texts: tuple[str, str]) -> bytes:
    body = "".join(f'<p id="{name}" class="paragraph">{text}</p>' for name, text in texts)
    return f'<html><body><p id="bm_module"></p><p>no id</p>{body}</body></html>'.encode()


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)])
def test_two_files_and_moses_names_give_line_beside_line(tmp_path: Path, suffix: str, compress: type[bytes]) -> None:
    (tmp_path / f"c.de{suffix}").write_bytes(compress("\ufeffHund\r\nBaum, grün\n".encode()))
    (tmp_path / f"c.en{suffix}").write_bytes(compress(b"dog\ntree"))
    expected = [Pair("Hund", "dog"), Pair("Baum, grün", "tree")]
    assert read(tmp_path / f"c.de{suffix}", tmp_path / f"c.en{suffix}") == expected
    assert read(tmp_path / "c") == expected
    assert read(tmp_path) == expected


def test_names_that_end_in_the_languages_say_which_file_is_the_source(tmp_path: Path) -> None:
    (tmp_path / "c.de").write_text("Hund\n")
    (tmp_path / "c.en").write_text("dog\n")
    assert read(tmp_path / "c.en", tmp_path / "c.de") == [Pair("Hund", "dog")]


def test_of_two_kinds_of_a_language_one_is_taken(tmp_path: Path) -> None:
    for language, text in (("de_AT", "Jänner"), ("de", "Januar"), ("pt_PT", "ecrã"), ("pt_BR", "tela")):
        folder = tmp_path / language / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "app.mo").write_bytes(compiled({"": "Content-Type: text/plain; charset=UTF-8\n", "word": text}))
    assert read(tmp_path) == [Pair("Januar", "word")]
    assert read(tmp_path, languages=Languages("de-AT", "pt")) == [Pair("Jänner", "tela")]


def test_the_endings_of_two_names_are_the_languages(tmp_path: Path) -> None:
    assert languages_of(None, None, [Path("a.de.gz"), Path("a.en")]) == GERMAN
    with pytest.raises(DataPrepError, match="--source-lang is missing"):
        languages_of(None, None, [Path("a.txt"), Path("b.txt")])


def test_a_tab_stands_between_source_and_target(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("Hund\tdog\tCC-BY\nBaum\ttree\n")
    assert read(tmp_path / "a.tsv") == [Pair("Hund", "dog"), Pair("Baum", "tree")]
    (tmp_path / "a.tsv").write_text("Hund\tdog\nBaum tree\n")
    with pytest.raises(DataPrepError, match=r"a\.tsv:2: no tab in it"):
        read(tmp_path / "a.tsv")


@pytest.mark.parametrize("languages", [GERMAN, Languages("en", "de")], ids=str)
def test_a_compiled_catalogue_pairs_messages_with_translations(tmp_path: Path, languages: Languages) -> None:
    messages = {
        "": HEADER,
        "Open file": "Datei öffnen",
        "menu\x04Close": "Schließen",
        "%d day\0%d days": "%d Tag\0%d Tage",
    }
    (tmp_path / "app.mo").write_bytes(compiled(messages))
    german = [("%d Tag", "%d day"), ("Datei öffnen", "Open file"), ("Schließen", "Close")]
    expected = german if languages.source == "de" else [(english, text) for text, english in german]
    assert sorted((pair.source, pair.target) for pair in read(tmp_path / "app.mo", languages=languages)) == sorted(
        expected
    )


PO = r"""# a comment
msgid ""
msgstr ""
"Language: de\n"
"Content-Type: text/plain; charset=ISO-8859-1\n"

#: file.c:1
msgid "Open "
"file"
msgstr "Datei \"öffnen\"\n"

#, fuzzy, c-format
msgid "guess"
msgstr "geraten"
msgctxt "menu"
msgid "Close"
msgstr "Schließen"

msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d Tag"
msgstr[1] "%d Tage"

msgid "nothing"
msgstr ""

#~ msgid "gone"
#~ msgstr "weg"
"""


def test_a_catalogue_of_text_is_read_without_guesses_and_what_is_gone() -> None:
    found = po_messages(PO.encode("latin-1"))
    assert found.pop("").startswith("Language: de\n")
    assert found == {"Open file": 'Datei "öffnen"\n', "menu\x04Close": "Schließen", "%d day": "%d Tag"}


def test_two_languages_other_than_english_meet_in_the_message(tmp_path: Path) -> None:
    for language, text in (("de", "Hund"), ("fr", "chien")):
        folder = tmp_path / language / "LC_MESSAGES"
        folder.mkdir(parents=True)
        messages = {"": "Content-Type: text/plain; charset=UTF-8\n", "dog": text, f"only {language}": "x"}
        (folder / "app.mo").write_bytes(compiled(messages))
    assert read(tmp_path, languages=Languages("de", "fr")) == [Pair("Hund", "chien")]


def test_a_folder_of_catalogues_gives_those_of_the_language(tmp_path: Path) -> None:
    for place, language in (("de/LC_MESSAGES/a.mo", "de"), ("fr/LC_MESSAGES/a.mo", "fr"), ("de.mo", "de")):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compiled({"": HEADER.replace("de", language), f"dog {place}": language}))
    assert sorted(pair.target for pair in read(tmp_path)) == ["dog de.mo", "dog de/LC_MESSAGES/a.mo"]


@pytest.mark.parametrize("folder", ["po", "src", "de"])
def test_a_folder_with_a_short_name_is_not_taken_for_a_language_that_the_header_denies(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "de.po").write_bytes(PO.encode("latin-1"))
    assert Pair("Schließen", "Close") in read(tmp_path)
    assert Pair("Schließen", "Close") in read(tmp_path / folder / "de.po")


@pytest.mark.parametrize("compression", ["xz", "gz", "zst"])
def test_help_pages_of_two_packages_meet_in_their_paragraphs(tmp_path: Path, compression: str) -> None:
    sides = {
        "de": {"a": help_page(("p1", "Erster Satz. Zweiter Satz."), ("p2", "Nur hier."), ("p3", "Eins. Zwei.")),
               "b": help_page(("p1", "Anderes &amp; <b>mehr</b>."))},
        "en-US": {"a": help_page(("p1", "First sentence. Second one."), ("p3", "One and two.")),
                  "b": help_page(("p1", "Other &amp; more.")), "c": help_page(("p1", "Only here."))},
    }  # fmt: skip
    for language, pages in sides.items():
        files = {f"usr/share/libreoffice/help/{language}/text/{name}.html": page for name, page in pages.items()}
        (tmp_path / f"help-{language}.deb").write_bytes(package(files, compression))
    expected = [
        Pair("Erster Satz.", "First sentence.", "text/a.html"),
        Pair("Zweiter Satz.", "Second one.", "text/a.html"),
        Pair("Eins. Zwei.", "One and two.", "text/a.html"),
        Pair("Anderes & mehr.", "Other & more.", "text/b.html"),
    ]
    assert read(tmp_path / "help-de.deb", tmp_path / "help-en-US.deb") == expected


def test_of_words_that_differ_by_system_the_default_is_taken() -> None:
    html = (
        '<p id="a">Choose <span class="switchinline"><span class="MAC"><b>Preferences</b></span>'
        '<span><b>Tools - Options</b></span></span>, then <i>OK</i>.<br>Now.</p><p id="a">Again</p><h2 id="b"> </h2>'
    )
    assert paragraphs(html) == {("a", 0): "Choose Tools - Options, then OK. Now.", ("a", 1): "Again"}


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        ({"a.de": b"x\ny\n", "a.en": b"x\n"}, ["a"], r"a\.de has 2 lines, .*a\.en has 1: line k of one"),
        ({"a.de": "ü\n".encode("latin-1"), "a.en": b"x\n"}, ["a"], r"a\.de:1: not UTF-8 \(byte 0xfc\); convert"),
        ({"a.de": b"x\n"}, ["a.de"], r"a\.de: the file with its translation is missing: give both, de first"),
        ({"a.de": b"x\n"}, ["a"], r"there is no .*a\.en; pairs come from"),
        ({}, ["a"], "no such file or folder; pairs come from two files of lines"),
        ({"d/a.txt": b""}, ["d"], "d: it has no pairs; pairs come from"),
        ({"a.mo": b"not one"}, ["a.mo"], r"a\.mo: not a catalogue of gettext"),
        ({"a.po": b"msgid unquoted\n"}, ["a.po"], r"a\.po: not a catalogue of gettext \(line 1 is"),
        ({"a.po": PO.replace("Datei", "\\ud800").encode("latin-1")}, ["a.po"], r"a\.po: not a catalogue .*line 10"),
        ({"a.deb": b"not one"}, ["a.deb"], r"a\.deb: cannot be read as an archive \(it is not a Debian package"),
        ({"a.deb": package({"x/de.mo": b"x" * 5000})[:-300]}, ["a.deb"], r"a\.deb: cannot be read as an archive"),
        ({"a.deb": package({"x/de.mo": b"x"}, "zst").replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe")}, ["a.deb"],
         r"a\.deb:1: cannot be decompressed any further"),
        ({"a.deb": package({"de/text/a.html": help_page(("p", "x"))})}, ["a.deb"], "help pages is in language 'en'"),
        ({"fr/LC_MESSAGES/a.mo": compiled({"": HEADER, "a": "b"})}, ["."], "its catalogues is in language 'de'"),
        ({"a.tar.gz": gzip.compress(b"x")[:-4]}, ["a.tar.gz"], r"a\.tar\.gz"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_files_that_give_no_pairs_are_one_message(
    tmp_path: Path, files: dict[str, bytes], given: list[str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataPrepError, match=message):
        read(*(tmp_path / name for name in given))
