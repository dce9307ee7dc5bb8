"""What lies beside indexed data and says where they came from: `<prefix>.json` (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import reworded
from data_prep.errors import DataPrepError
from data_prep.kinds import ChatsManifest, kind_of, read_described
from data_prep.tokenizers.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import read_regular, why
from megatron_ext.contract.models.model import CHATS
from megatron_ext.data.indexed_dataset import data_file

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Source, tokeniser, counts and hashes of indexed data."""

    version: int = VERSION
    source: str
    """For people."""
    recipe: dict[str, Any]
    """All that the data follow from; data of the same recipe are the same."""
    tokenizer: str
    """`byte`, or the kind of the tokeniser beside the data."""
    vocab_size: int
    end_of_document: int
    end_token: str | None
    """How the tokeniser beside the data calls it."""
    documents: int
    tokens: int
    left_out: dict[str, int]
    """How many texts of the source are not in the data, by reason."""
    sha256: dict[str, str]
    """Hashes of the files beside this one, by suffix."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def text_prefix(output: Path, sentences: bool = False) -> Path:
    """The prefix of the data that `--output` asks for, with the ending that Megatron's own tool gives."""
    return output.with_name(f"{output.name}_text_{'sentence' if sentences else 'document'}")


def read_manifest(prefix: Path) -> Manifest | None:
    """The manifest of indexed data, or None where there is none, as with data that others made. Raises DataPrepError:
    it is there but cannot be understood."""
    with reworded(DataPrepError, "", ", or delete the file", of=DataPrepError):
        try:
            return read_described(prefix, Manifest, VERSION)
        except DataPrepError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise


def tokenizer_of(prefix: Path) -> Tokenizer:
    """What turns the tokens of indexed data back into text. Raises DataPrepError: nobody knows, or its file cannot be
    used."""
    if kind_of(prefix) == CHATS:
        return JsonTokenizer.from_file(data_file(prefix, TOKENIZER), read_described(prefix, ChatsManifest).end_token)
    manifest = read_manifest(prefix)
    if manifest is None:
        raise DataPrepError(f"{prefix} has no manifest, so its tokens cannot be turned into text")
    if manifest.end_token is None:
        return ByteTokenizer()
    return JsonTokenizer.from_file(data_file(prefix, TOKENIZER), manifest.end_token)


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether each token id stands for the same text in both indexed data, of which each has a manifest. Raises
    DataPrepError: a manifest is none, or the tokeniser beside it cannot be read."""
    hashes = [_tokenizer_hash(prefix) for prefix in (one, other)]
    if None in hashes or hashes[0] == hashes[1]:
        return hashes[0] == hashes[1]
    return _vocabulary(data_file(one, TOKENIZER)) == _vocabulary(data_file(other, TOKENIZER))


def has_manifest(prefix: Path) -> bool:
    """Whether it is known what indexed data or conversations were made with."""
    return kind_of(prefix) == CHATS or read_manifest(prefix) is not None


def _tokenizer_hash(prefix: Path) -> str | None:
    """Return the hash of the tokeniser beside data; None for bytes, which have no file."""
    found = read_described(prefix, ChatsManifest) if kind_of(prefix) == CHATS else read_manifest(prefix)
    return found.sha256.get(TOKENIZER) if found else None


def _vocabulary(path: Path) -> dict[str, int]:
    """Ids by their tokens, of a tokenizer.json; read as it is, for launching does without the tokenizers library."""
    try:
        content = json.loads(read_regular(path))
        ids = content["model"]["vocab"]
        if isinstance(ids, list):  # Unigram's: pairs of token and score
            ids = {token: number for number, (token, _) in enumerate(ids)}
        return {**ids, **{token["content"]: token["id"] for token in content.get("added_tokens", [])}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataPrepError(
            f"{path}: not the tokenizer that its data were made with ({why(error)}); copy it from where they come "
            "from, or prepare them again"
        ) from error
