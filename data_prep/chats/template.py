"""Chat templates: how a model's messages become text, and where in it the answers stand.

Templates are programs of Jinja that come with a model. They run in Jinja's sandbox, with what transformers gives them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data_prep.chats.conversation import ASSISTANT, Conversation
from data_prep.errors import BadDocument, DataPrepError, missing_package
from megatron_ext.contract.files import read_regular_text, why

if TYPE_CHECKING:
    from jinja2 import Environment, Template

NOW = "strftime_now"
"""What a template calls to write the date."""
BEGIN, END = "\U000fdd01", "\U000fdd02"
"""Around what a template marks as generated, until its places are known: characters that no text has."""

FAULTS = (TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What Python raises when a template computes with messages that it was not written for."""

Span = tuple[int, int]
"""Characters from the first up to the second."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template with the special tokens that it may write. Raises DataPrepError when made: it is no template."""

    source: str
    tokens: dict[str, str]
    """Tokens by their names in `tokenizer_config.json`: `bos_token` and so on."""
    special: tuple[str, ...]
    """All special tokens of the tokenizer."""
    day: str
    """That templates take for today, as YYYY-MM-DD."""

    def __post_init__(self) -> None:
        _ = self._compiled

    @property
    def dated(self) -> bool:
        return NOW in self.source

    def rendered(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation, and where what is to be learned stands in it: answers with the token that ends
        them. Raises BadDocument: the template refuses the messages, or does not show where an answer begins."""
        text = self._render(conversation, conversation.messages)
        if BEGIN in text:
            return _marked(text)
        spans = []
        for number, message in enumerate(conversation.messages):
            if message["role"] == ASSISTANT and number not in conversation.untrained:
                spans.append(self._answer(conversation, number, text))
        return text, spans

    def _answer(self, conversation: Conversation, number: int, text: str) -> Span:
        """Where an answer stands: from behind what asks for it up to the end of the special token behind it."""
        messages = conversation.messages
        before = self._render(conversation, messages[:number]) if number else ""
        asked = self._render(conversation, messages[:number], asks=True) if number else ""
        begin = next((at for at, pair in enumerate(zip(text, asked, strict=False)) if pair[0] != pair[1]), len(asked))
        if not text.startswith(before) or begin < len(before):
            raise _unclear(number)
        with_it = self._render(conversation, messages[: number + 1])
        if text.startswith(with_it):
            return begin, self._end(text, begin, len(with_it))
        content = str(messages[number].get("content") or "")
        for said in (content.strip(), content.rpartition("</think>")[2].strip()):
            if said and (place := text.find(said, begin)) >= 0:
                end = place + len(said)
                mark = self._ends.match(text, end)
                return begin, mark.end() if mark else end
        raise _unclear(number)

    def _end(self, text: str, begin: int, end: int) -> int:
        """Without spaces behind the special token that ends an answer: nobody generates them."""
        stripped = text[begin:end].rstrip()
        return begin + len(stripped) if stripped.endswith(self.special) else end

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, self.special)) or '(?!)'})")

    def _render(self, conversation: Conversation, messages: Sequence[dict[str, Any]], asks: bool = False) -> str:
        from jinja2 import TemplateError

        given = {"messages": messages, "tools": conversation.tools, "documents": None, "add_generation_prompt": asks}
        try:
            return self._compiled.render(**self.tokens, **{**conversation.options, **given})
        except (TemplateError, *FAULTS) as error:
            raise BadDocument(0, f"the chat template refuses these messages: {error}") from error

    @cached_property
    def _compiled(self) -> Template:
        environment = _environment(self.day)
        from jinja2 import TemplateSyntaxError

        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise DataPrepError(
                f"the chat template is not one of Jinja (line {error.lineno}: {error.message})"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}


def _marked(text: str) -> tuple[str, list[Span]]:
    """Takes the marks of `{% generation %}` out of a text; returns it and where they stood."""
    spans, parts, length = [], [], 0
    for number, part in enumerate(re.split(f"{BEGIN}|{END}", text)):
        if number % 2:
            spans.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return "".join(parts), spans


def _unclear(number: int) -> BadDocument:
    return BadDocument(
        0,
        f"the chat template does not show where the answer of message {number} stands: it writes the messages before "
        "it otherwise once others follow; give --template a file that marks answers with {% generation %}",
    )


def _environment(day: str) -> Environment:
    """Jinja's sandbox as transformers sets it up."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise missing_package("jinja2", "for chat templates") from error

    class Generation(Extension):
        """`{% generation %}`: what a model has written."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = as_json
    made.globals["raise_exception"] = refuse
    made.globals[NOW] = date.fromisoformat(day).strftime
    return made


def template_of(tokenizer: Path, given: Path | None, special: Sequence[str]) -> ChatTemplate | None:
    """The template in a tokenizer's folder, or in the file that is given instead; None where there is none. Raises
    DataPrepError: it cannot be read, or is no template."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = _config(folder / "tokenizer_config.json")
    source = _read(given) if given is not None else _own(folder, config)
    if source is None:
        return None
    tokens = {key: _text(value) for key, value in config.items() if key.endswith("_token")}
    return ChatTemplate(
        source=source,
        tokens={key: value for key, value in tokens.items() if value is not None},
        special=tuple(special),
        day=date.today().isoformat(),
    )


def _own(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return _read(file)
    found = config.get("chat_template")
    if isinstance(found, list):  # one for each use
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _config(path: Path) -> dict[str, Any]:
    """Read a tokenizer's configuration; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataPrepError(f"{path}: not JSON ({why(error)}); get it again") from error
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    """A token's text; those with options are objects."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _read(path: Path) -> str:
    try:
        return read_regular_text(path)
    except (OSError, ValueError) as error:
        raise DataPrepError(f"{path}: cannot be read ({why(error)})") from error
