"""From conversations to indexed data with a mask of the answers: the work of each process, and `tdpp data chats`."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from conf.visible import plural
from data_prep.chats.conversation import ASSISTANT, Conversation, conversation_of
from data_prep.chats.template import ChatTemplate, Span, template_of
from data_prep.errors import BadDocument, DataPrepError, of_option
from data_prep.files.journal import Journal, publish, work_folder
from data_prep.files.progress import hashes
from data_prep.kinds import ChatsManifest
from data_prep.making import Request, add_common_options, add_number, add_output, add_source, workers_of
from data_prep.preparation.prepare import (
    DOCUMENTS_MADE,
    INDEX,
    LONGEST,
    MASK,
    TOKENIZER_FILE,
    TOKENS,
    left_out,
    write_documents,
)
from data_prep.text.corpus import corpus_of
from data_prep.text.encode import Chunk, Encoded, Options
from data_prep.text.formats import Format, digest, format_of
from data_prep.tokenizers.tokenizer import JsonTokenizer, content_of, eos_token_of, loaded
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.indexed_dataset import token_dtype

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Pure: the same chunk gives the same arrays in any process."""

    content: str
    """The content of the tokenizer.json."""
    end: str | None
    """The token that ends a text; None: the tokenizer names none."""
    template: ChatTemplate | None
    max_tokens: int | None = None
    """Longer conversations are left out."""
    unique: bool = False

    def __call__(self, chunk: Chunk) -> Encoded:
        """Raises BadDocument: a record is no conversation, or the template refuses it."""
        left_out: Counter[str] = Counter()
        rendered = []
        for raw in chunk.raw:
            try:
                conversation = conversation_of(raw.content)
                self._require_template(conversation)
                if (reason := self._unfit(conversation)) is not None:
                    left_out[reason] += 1
                    continue
                rendered.append(self._rendered(conversation))
            except BadDocument as error:
                raise BadDocument(raw.line - 1 + error.line, error.why, raw.file) from error
        found = [(text, *one) for text, one in zip((text for text, *_ in rendered), self._ids(rendered), strict=True)]
        kept = []
        for text, ids, mask in found:
            if not mask.any():
                left_out["unanswered"] += 1
            elif self.max_tokens is not None and len(ids) > self.max_tokens:
                left_out["long"] += 1
            else:
                kept.append((text, ids, mask))
        dtype = token_dtype(self.vocab_size)
        last = chunk.raw[-1]
        return Encoded(
            np.array([len(ids) for _, ids, _ in kept], np.int32),
            np.ones(len(kept), np.int64),
            np.concatenate([np.zeros(0, dtype), *(np.array(ids, dtype) for _, ids, _ in kept)]),
            np.concatenate([np.zeros(0, np.uint8), *(mask.astype(np.uint8) for *_, mask in kept)]),
            [digest(text) for text, *_ in kept] if self.unique else [],
            +left_out,
            last.file,
            last.number,
        )

    @cached_property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    def _require_template(self, conversation: Conversation) -> None:
        if not conversation.plain and self.template is None:
            raise BadDocument(
                0,
                "messages need a chat template, and the tokenizer's folder has none; give one with --template FILE, "
                "such as the chat_template.jinja of a model of the same family",
            )

    def _unfit(self, conversation: Conversation) -> str | None:
        """Why a conversation is left out."""
        if not any(message["role"] == ASSISTANT for message in conversation.messages):
            return "unanswered"
        # Text that looks like a special token would become one, and could end an answer, or begin one of its own.
        if self._special is not None and any(self._special.search(text) for text in conversation.texts):
            return "special"
        return None

    def _rendered(self, conversation: Conversation) -> tuple[str, list[Span], bool]:
        """Text, answers, and whether it is plain."""
        if self.template is not None:
            return *self.template.rendered(conversation), False
        prompt, answer = conversation.texts
        return prompt + answer, [(len(prompt), len(prompt) + len(answer))], True

    def _ids(self, rendered: Sequence[tuple[str, list[Span], bool]]) -> list[tuple[list[int], NDArray[np.bool_]]]:
        """The ids of each text, and which of them are answers.

        A plain text begins as the tokenizer begins texts, and ends with its end of a text.
        """
        end = None if self.end is None else self._tokenizer.token_to_id(self.end)
        found = []
        for text, spans, plain in rendered:
            encoding = self._tokenizer.encode(text, add_special_tokens=plain)
            ids = list(encoding.ids)
            begins = np.array([first for first, _ in encoding.offsets], np.int64)
            own = np.array(encoding.special_tokens_mask, bool) if plain else np.zeros(len(ids), bool)
            mask = np.zeros(len(ids), bool)
            for first, stop in spans:
                mask |= (begins >= first) & (begins < stop)
            mask &= ~own
            if plain and end is not None:
                if not ids or ids[-1] != end:
                    ids, mask = [*ids, end], np.append(mask, False)
                mask[-1] = True
            found.append((ids, mask))
        return found

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        tokens = special_tokens(self._tokenizer)
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        tokenizer = loaded(self.content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def special_tokens(tokenizer: HfTokenizer) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


@dataclass(frozen=True, kw_only=True)
class ChatsRequest(Request):
    encoder: Encoder
    end: str
    """How the tokenizer calls the end of a text; of the data's manifest."""

    def recipe(self) -> dict[str, Any]:
        encoder, template = self.encoder, self.encoder.template
        return {
            "corpus_sha256": self.corpus.digest(),
            "tokenizer": JsonTokenizer(encoder.content, self.end).identity,
            "template": None if template is None else template.source,
            "tokens": None if template is None else template.tokens,
            "day": template.day if template is not None and template.dated else None,
            "end": encoder.end,
            "max_tokens": encoder.max_tokens,
            "unique": encoder.unique,
        }


def prepare(request: ChatsRequest, prefix: Path, recipe: dict[str, Any]) -> ChatsManifest:
    """Writes conversations and their manifest; shows progress on stderr. Nothing half-written takes their names.

    What an earlier call left unfinished is gone on with. The bytes do not depend on `request.workers`.

    Raises:
        DataPrepError: a file cannot be read, a record is no conversation, none is left, or the files cannot be written.
    """
    for path in request.corpus.files:
        if format_of(path) not in (Format.jsonl, Format.parquet):
            raise DataPrepError(f"--source {path}: not JSON lines (.jsonl, .json, .ndjson) or Parquet (.parquet)")
    encoder = request.encoder
    try:
        with work_folder(prefix, recipe) as folder:
            dtype = token_dtype(encoder.vocab_size)
            none = "no conversation with an answer"
            counts = write_documents(
                request, encoder, Options(key=None), dtype, Journal(folder), noun="conversations", none=none
            )
            write_atomic(folder / TOKENIZER_FILE, encoder.content)
            files = {".bin": TOKENS, ".idx": INDEX, ANSWERS: MASK, TOKENIZER: TOKENIZER_FILE}
            manifest = ChatsManifest(
                conversations=counts[DOCUMENTS_MADE],
                tokens=counts[TOKENS],
                answers=counts[MASK],
                longest=counts[LONGEST],
                vocab_size=encoder.vocab_size,
                end_token=request.end,
                corpus=request.corpus.description,
                left_out=left_out(counts),
                sha256=hashes({suffix: folder / name for suffix, name in files.items()}),
            )
            publish(folder, prefix, files, manifest.to_json(recipe))
            return manifest
    except BadDocument as error:
        raise error.in_file(request.corpus.files[error.file]) from error


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data chats` takes."""
    add_source(
        make,
        "files and folders of JSON lines (.jsonl, .json; also .gz, .bz2, .zst) or Parquet, a conversation each: "
        "messages with role and content, prompt and completion, or ShareGPT's conversations with from and value",
        Path,
    )
    make.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="PATH",
        help="the model's folder with tokenizer.json and its chat template, or a tokenizer.json",
    )
    make.add_argument(
        "--template", type=Path, metavar="FILE", help="a chat template of Jinja, instead of the tokenizer's own"
    )
    add_output(make, "<output>.bin, .idx, .answers")
    add_number(make, "--max-tokens", "leave out longer conversations")
    make.add_argument("--unique", action="store_true", help="leave out conversations that occurred before")
    add_common_options(make)


def summary(made: ChatsManifest) -> str:
    """What was prepared, in a line."""
    left_out = "".join(f", {count} {reason}" for reason, count in made.left_out.items())
    return (
        f"{plural(made.conversations, 'conversation')} of up to {made.longest} tokens, {made.tokens} tokens, "
        f"{made.answers} of them in answers, of {made.corpus}; {f'left out:{left_out[1:]}; ' if left_out else ''}"
        f"model.vocab_size={made.vocab_size}"
    )


def request_of(arguments: argparse.Namespace) -> ChatsRequest:
    """What the options ask for."""
    path: Path = arguments.tokenizer
    with of_option("--tokenizer", path):
        content, end = content_of(path), eos_token_of(path)
        tokenizer = loaded(content)
    special = special_tokens(tokenizer)
    with of_option("--tokenizer" if arguments.template is None else "--template", arguments.template or path):
        template = template_of(path, arguments.template, special)
    corpus = corpus_of(arguments.source)
    return ChatsRequest(
        corpus=corpus,
        encoder=Encoder(
            content=content,
            end=end,
            template=template,
            max_tokens=arguments.max_tokens,
            unique=arguments.unique,
        ),
        end=end or next(iter(special), next(iter(tokenizer.get_vocab()))),
        workers=workers_of(arguments, corpus),
    )
