"""Every text has tokens, and they turn back into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_prep.errors import DataPrepError
from data_prep.indexed.manifest import read_manifest, tokenizer_of
from data_prep.tokenizers.tokenizer import ByteTokenizer, content_of, end_token_of
from launch.commands.data import main
from megatron_ext.data.indexed_dataset import IndexedDataset

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_bytes_turn_back_into_the_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([text])
    assert list(tokens) == list(text.encode())
    assert tokenizer.decode(np.append(tokens, tokenizer.end_of_document)) == text


def test_the_end_of_a_document_is_the_one_id_that_no_byte_has() -> None:
    assert (ByteTokenizer.end_of_document, ByteTokenizer.vocab_size) == (256, 257)


def saved(folder: Path, model: Any, end: str, config: dict[str, Any] | None) -> Path:
    """A folder as transformers leaves one: tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", end])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


PIECES = ["<unk>", "▁one", "▁two", "▁three"]
MODELS = {
    "Unigram": lambda: models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0),
    "WordLevel": lambda: models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="<unk>"),
    "BPE": lambda: models.BPE(dict(zip([*PIECES, *"▁onetwhr"], range(20), strict=False)), [], unk_token="<unk>"),
}  # fmt: skip


@pytest.mark.parametrize("given", ["folder", "file"])
@pytest.mark.parametrize("end", ["</s>", "<|eot_id|>"])
@pytest.mark.parametrize("kind", MODELS)
def test_any_fast_tokenizer_ends_documents_as_its_configuration_says(
    tmp_path: Path, kind: str, end: str, given: str
) -> None:
    config = {"eos_token": end if given == "folder" else {"content": end, "special": True}}
    folder = saved(tmp_path / "model", MODELS[kind](), end, config)
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "three one"}\n')
    path = folder if given == "folder" else folder / "tokenizer.json"
    main(["prepare", "--source", f"{tmp_path}/a.jsonl", "--output", f"{tmp_path}/x", "--tokenizer", str(path)])
    prefix = tmp_path / "x_text_document"
    manifest, data = read_manifest(prefix), IndexedDataset(prefix)
    assert manifest is not None
    assert (manifest.tokenizer, manifest.end_token, manifest.documents) == (kind, end, 2)
    assert data[0][-1] == manifest.end_of_document
    assert tokenizer_of(prefix).decode(data[1]).strip() == "three one"


def test_the_end_of_a_text_in_training_comes_before_that_of_an_answer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", MODELS["WordLevel"](), "<|endoftext|>", {"eos_token": "<|im_end|>"})
    assert end_token_of(folder) == "<|endoftext|>"


def test_a_tokenizer_that_names_no_end_says_how_to_choose_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", MODELS["WordLevel"](), "</s>", None)
    (tmp_path / "text.txt").write_text("one two\n")
    command = ["prepare", "--source", f"{tmp_path}/text.txt", "--output", f"{tmp_path}/x", "--tokenizer", str(folder)]
    with pytest.raises(DataPrepError, match=r"choose one with --end-of-document; its special tokens are <s>, </s>"):
        main(command)
    main([*command, "--end-of-document", "</s>"])


def test_a_folder_with_a_slow_tokenizer_says_how_to_make_a_fast_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(DataPrepError, match=r"has tokenizer\.model but no tokenizer\.json, .*save_pretrained"):
        content_of(tmp_path)
