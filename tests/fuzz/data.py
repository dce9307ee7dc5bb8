"""Damaged indexed data, manifests, index maps and sources of text."""

from __future__ import annotations

import gzip
import io
import json
import struct
from contextlib import redirect_stderr
from pathlib import Path
from random import Random

from data_prep.preparation.prepare import Request
from data_prep.text.corpus import corpus_of
from data_prep.text.encode import Options
from data_prep.text.formats import Documents
from data_prep.tokenizers.tokenizer import ByteTokenizer
from tests.fuzz.corpora import ENDINGS, write_corpus
from tests.fuzz.mutate import TOKENS, damaged, hurt

PREFIX = "data/a_text_document"
TRAIN = ("launch", "dry_run=true", f"data.prefix={PREFIX}", "model.sequence_length=64", "train.iterations=2")
EDGES = (0, 1, 2, 59, 61, 255, 2**31 - 1, 2**31, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def draw(random: Random, folder: Path) -> list[str]:
    return random.choice((_indexed, _indexed, _maps, _text, _begun))(random, folder)


def _indexed(random: Random, folder: Path) -> list[str]:
    write_corpus(folder / PREFIX)
    for _ in range(random.choice((1, 1, 2))):
        path = folder / f"{PREFIX}{random.choice((*ENDINGS, '.idx', '.json'))}"
        if path.suffix == ".idx" and path.is_file() and random.random() < 0.5:
            path.write_bytes(_header(random, path.read_bytes()))
        elif path.suffix == ".json" and path.is_file() and random.random() < 0.5:
            path.write_text(_manifest(random, path.read_text(errors="replace")))
        elif path.is_file():
            hurt(random, path)
    _short(folder / f"{PREFIX}.json")
    write_corpus(folder / "data/b_text_document")
    return [
        *random.choice(
            (
                ["data", "check", PREFIX],
                ["data", "inspect", PREFIX],
                ["data", "inspect", PREFIX, "--page", "page.html"],
                ["data", "inspect", PREFIX, "--document", str(random.choice((0, 59, 60, -1)))],
                ["data", "inspect", PREFIX, "--sample", str(random.choice((0, 7, 10**9))), "--sequence-length", "64"],
                ["data", "merge", PREFIX, "data/b_text_document", "--output", "all"],
                ["data", "split", PREFIX, "--weights", "9,1", "--output", "part"],
                ["data", "prepare", "--source", f"{PREFIX}.json", "--output", "data/a", "--workers", "1"],
                TRAIN,
                [*TRAIN, "data.blend=[{prefix:data/b_text_document,weight:0.5}]"],
            )
        )
    ]


def _short(source: Path) -> None:
    """What is prepared is read to its end, which of the largest files may well take long."""
    if source.is_file() and source.stat().st_size > 2**30:
        source.write_bytes(bytes(2**16))


def _header(random: Random, content: bytes) -> bytes:
    """A number of the index, at its edges: version, type, counts, or one of lengths, offsets and boundaries."""
    kind, place = random.choice(
        (("<Q", 9), ("<B", 17), ("<Q", 18), ("<Q", 26), ("<i", 34), ("<q", 34 + 240), ("<q", 34 + 720))
    )
    place += struct.calcsize(kind) * random.randrange(50) * (place >= 34)
    low, high = {"Q": (0, 2**64 - 1), "B": (0, 255), "i": (-(2**31), 2**31 - 1), "q": (-(2**63), 2**63 - 1)}[kind[1]]
    value = max(low, min(high, random.choice((1, -1)) * random.choice(EDGES)))
    end = place + struct.calcsize(kind)
    return content[:place] + struct.pack(kind, value) + content[end:] if end <= len(content) else content


def _manifest(random: Random, text: str) -> str:
    """Another value for one of its keys."""
    try:
        content = json.loads(text)
    except ValueError:
        return text
    if not isinstance(content, dict) or not content:
        return text
    values = (
        None,
        True,
        -1,
        0,
        10**30,
        1.5,
        float("nan"),
        "",
        "x" * 9000,
        "\x1b[2J",
        [],
        {},
        [[]],
        {"a": {}},
        {"train_bpe": -1},
    )
    key = random.choice(list(content))
    inner = content[key]
    if isinstance(inner, dict) and inner and random.random() < 0.7:
        inner[random.choice(list(inner))] = random.choice(values)
    else:
        content[key] = random.choice(values)
    return json.dumps(content)


def _maps(random: Random, folder: Path) -> list[str]:
    """Index maps that lie there already."""
    write_corpus(folder / PREFIX)
    for name in ("doc", "sample", "shuffle"):
        path = folder / f"{PREFIX}_train_indexmap_32ns_64sl_1234s_{name}_idx.npy"
        head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({random.choice(EDGES)},), }}".ljust(117) + "\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.encode() + random.randbytes(400))
        if random.random() < 0.7:
            hurt(random, path)
    return list(TRAIN)


def _text(random: Random, folder: Path) -> list[str]:
    """A source that is not text, or not of the kind that its name says."""
    lines = [
        b'{"text": "some words"}\n',
        b'{"text": 5}\n',
        b"plain text\n",
        b"<page><text>a</text></page>\n",
        b"\n",
        *TOKENS,
    ]
    content = b"".join(random.choices(lines, k=random.randrange(30)))
    ending = random.choice((".txt", ".jsonl", ".json", ".xml", ".txt.gz", ".jsonl.bz2", ".jsonl.zst", ".xml.gz"))
    if ending.endswith(".gz") and random.random() < 0.7:
        content = gzip.compress(content)
    source = folder / f"source{ending}"
    source.write_bytes(damaged(random, content) if random.random() < 0.6 else content)
    if random.random() < 0.1:
        hurt(random, source)
        _short(source)
    (folder / "tokenizer.json").write_bytes(
        damaged(random, b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    )
    options = random.choice(
        ([], ["--tokenizer", "tokenizer.json"], ["--unique"], ["--documents", "line"], ["--train-bpe", "300"])
    )
    return ["data", "prepare", "--source", source.name, "--output", "made", "--workers", "1", *options]


def _begun(random: Random, folder: Path) -> list[str]:
    """A preparation that was cut off, whose folder is damaged."""
    (folder / "source.txt").write_text("some text\n" * 50)
    partial = folder / ".made_text_document.partial"
    partial.mkdir(mode=0o755)
    options = Options(key="text", documents=Documents.file, min_chars=1, max_chars=None, unique=False)
    with redirect_stderr(io.StringIO()):
        made = Request(corpus=corpus_of([folder / "source.txt"]), tokenizer=ByteTokenizer(), options=options).recipe()
    recipe = json.dumps(made)
    journal = '{"file": 0, "number": 1, "documents": 1, "tokens": 100, "left_out": {}}'
    for name, text in (("recipe.json", recipe), ("journal.json", journal), ("tokens", "x" * 200), ("index", "x" * 50)):
        (partial / name).write_text(text)
    (partial / "digests").write_bytes(b"")
    hurt(random, partial / random.choice(("recipe.json", "journal.json", "journal.json", "tokens", "index", "digests")))
    return ["data", "prepare", "--source", "source.txt", "--output", "made", "--workers", "1"]
