"""Corpora for the tests of preparing data."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.text.corpus import Corpus, stdlib_corpus

TEXTS = {"a.py": "x = 1\n", "b.py": "# Grüße, 世界\n", "pkg/__init__.py": "", "pkg/c.py": "y = 2\n" * 500}
"""In the order of the documents; the empty one gives none."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of four files, one of them empty, and of what is not a library."""
    for name, text in {**TEXTS, "test/test_a.py": "no", "site-packages/z.py": "no", "data.txt": "no"}.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "library"


@pytest.fixture
def corpus(library: Path) -> Corpus:
    return stdlib_corpus(folder=library)
