"""A manifest is believed only when it is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.errors import DataPrepError
from data_prep.indexed.manifest import Manifest, read_manifest

SOUND = json.loads(
    Manifest(
        source="a book",
        recipe={"corpus_sha256": "2" * 64},
        tokenizer="byte",
        vocab_size=257,
        end_of_document=256,
        end_token=None,
        documents=3,
        tokens=90,
        left_out={},
        sha256={".bin": "0" * 64, ".idx": "1" * 64},
    ).to_json()
)
WITHOUT_SOURCE = {key: value for key, value in SOUND.items() if key != "source"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (SOUND | {"vocab_size": "257"}, 'damaged: vocab_size="257" must be a whole number'),
        (SOUND | {"sha256": None}, "damaged: sha256=null must be a JSON object"),
        (WITHOUT_SOURCE, "it lacks source"),
        (SOUND | {"version": 3, "licence": "MIT"}, "version 3 of the manifest, but only 2 is supported"),
        ({}, "it lacks source, recipe"),
        (3, "it is not a JSON object"),
    ],
    ids=["text for a number", "no hashes", "a key less", "a later version", "empty", "no object"],
)
def test_a_manifest_of_another_form_is_refused_with_the_reason(tmp_path: Path, content: Any, problem: str) -> None:
    (tmp_path / "text.json").write_text(json.dumps(content))
    with pytest.raises(DataPrepError) as caught:
        read_manifest(tmp_path / "text")
    assert str(caught.value).startswith(str(tmp_path / "text.json"))
    assert problem in str(caught.value)
    assert "prepare the data again, or delete the file" in str(caught.value)


def test_data_may_have_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "text") is None


@pytest.mark.parametrize("name", ["text", "x" * 300], ids=["link to itself", "too long"])
def test_a_manifest_that_cannot_be_opened_is_not_taken_for_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.json").symlink_to("text.json")
    with pytest.raises(DataPrepError, match=r"\.json: cannot be read: .*prepare the data again, or delete the file"):
        read_manifest(tmp_path / name)


def test_a_sound_manifest_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text(json.dumps(SOUND))
    assert read_manifest(tmp_path / "text") == Manifest(**SOUND)
