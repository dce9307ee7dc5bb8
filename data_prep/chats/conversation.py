"""Records of the common formats of conversations, as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_prep.errors import BadDocument

ASSISTANT = "assistant"
"""The role whose messages are answers."""
ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function": "tool",
    "observation": "tool",
}
"""What ShareGPT and its kind call the roles of templates."""
FORMATS = "messages (role, content), prompt and completion, or conversations (from, value)"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a template renders."""

    messages: list[dict[str, Any]]
    """With `role` and `content`, and what else the record gives."""
    untrained: frozenset[int] = frozenset()
    """Answers that are read, but not learned: those of weight 0."""
    tools: list[Any] | None = None
    plain: bool = False
    """Whether prompt and completion are texts, which need no template."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the record gives to the template beside messages, as transformers does (`chat_template_kwargs`)."""

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.messages if isinstance(message.get("content"), str)]


def conversation_of(content: bytes) -> Conversation:
    """The conversation of a JSON object. Raises BadDocument: it is none, or none of the formats."""
    try:
        record = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadDocument(0, f"not JSON ({error}); each line must be an object of its own") from error
    if not isinstance(record, dict):
        raise BadDocument(0, f"not a JSON object with a conversation, but {json.dumps(record)[:40]}")
    record = {key: value for key, value in record.items() if value is not None}
    tools = record.get("tools")
    if isinstance(tools, str):  # as data sets of columns hold them
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadDocument(0, f"'tools' is not JSON ({error})") from error
    if tools is not None and not isinstance(tools, list):
        raise BadDocument(0, f"'tools' is not a list, but {json.dumps(tools)[:40]}")
    options = record.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise BadDocument(0, "'chat_template_kwargs' is not an object")
    found, plain = _messages(record)
    messages = [_message(one, number) for number, one in enumerate(found)]
    untrained = frozenset(number for number, one in enumerate(found) if one.get("weight") == 0)
    return Conversation(messages=messages, untrained=untrained, tools=tools, plain=plain, options=options)


def _messages(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The messages as they stand, and whether they are texts of prompt and completion."""
    for key in ("messages", "conversations", "conversation"):
        if isinstance(record.get(key), list):
            system = record.get("system")
            first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
            return _objects([*first, *record[key]], key), False
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) or isinstance(completion, list):
            sides = [
                _objects(side, name) if isinstance(side, list) else [{"role": role, "content": side}]
                for side, name, role in ((prompt, "prompt", "user"), (completion, "completion", ASSISTANT))
            ]
            return [*({**one, "weight": 0} if _is_answer(one) else one for one in sides[0]), *sides[1]], False
        return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}], True
    found = ", ".join(map(repr, record)) or "none"
    raise BadDocument(0, f"no conversation: its keys are {found}; needed are {FORMATS}")


def _objects(messages: list[Any], key: str) -> list[dict[str, Any]]:
    for number, one in enumerate(messages):
        if not isinstance(one, dict):
            raise BadDocument(0, f"{key}[{number}] is not an object, but {json.dumps(one)[:40]}")
    return [{name: value for name, value in one.items() if value is not None} for one in messages]


def _is_answer(message: Mapping[str, Any]) -> bool:
    role = str(message.get("role", message.get("from")))
    return ROLES.get(role.lower(), role) == ASSISTANT


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """With the role and the text under the names that templates use. Raises BadDocument: one is missing, or is not
    text."""
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise BadDocument(0, f"message {number} has no role ('role' or 'from'); needed are {FORMATS}")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = _joined(content, number)
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise BadDocument(0, f"message {number} has no text ('content' or 'value'), but {json.dumps(content)[:40]}")
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(content[error.start]):04x}"
            raise BadDocument(0, f"message {number} has half a character ({half})") from error
    rest = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value", "weight")}
    return {"role": ROLES.get(role.lower(), role), "content": content, **rest}


def _joined(parts: list[Any], number: int) -> str:
    """The text of content in parts. Raises BadDocument: a part is something else, such as an image."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadDocument(0, f"message {number} has content of type {kind}, but only text can be learned")
    return "".join(part["text"] for part in parts)
