"""The work of one process on a part of the conversations: records become text, tokens, and a mask of the answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_prep.chats.conversation import ASSISTANT, Conversation, conversation_of
from data_prep.chats.template import ChatTemplate, Span
from data_prep.errors import BadDocument
from data_prep.text.encode import Chunk, Encoded
from data_prep.text.formats import digest
from data_prep.tokenizers.tokenizer import loaded
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
