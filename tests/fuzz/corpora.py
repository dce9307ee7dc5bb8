"""Small indexed data, as `tdpp data prepare` writes them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from launch.commands.data import main

ENDINGS = (".bin", ".idx", ".json")


def write_corpus(prefix: Path) -> None:
    """60 documents, 73,260 tokens of bytes, with their manifest."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for ending, content in _prepared().items():
        Path(f"{prefix}{ending}").write_bytes(content)


@cache
def _prepared() -> Mapping[str, bytes]:
    """The content of the files, by ending."""
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        source, made = Path(name, "text.jsonl"), Path(name, "a")
        source.write_text("".join(f'{{"text": "{"word " * number * 8}"}}\n' for number in range(1, 61)))
        main(["prepare", "--source", str(source), "--output", str(made), "--workers", "1"])
        return {ending: Path(f"{made}_text_document{ending}").read_bytes() for ending in ENDINGS}
