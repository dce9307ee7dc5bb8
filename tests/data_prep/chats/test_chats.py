"""`tdpp data chats` writes what transformers' own template gives, of the formats people have, and marks the answers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data_prep.errors import DataPrepError
from data_prep.tokenizers.tokenizer import JsonTokenizer
from launch.commands.data import main
from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from tests.support.chat_model import BEGIN, CHATML, END, save_tokenizer, sums, write_lines

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "Servus"},
    {"role": "user", "content": "And 世界?"},
    {"role": "assistant", "content": "Hello"},
]
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
THINKING = (  # as Qwen3's: what was thought is left out of all answers but the last
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(found)
    return found


def made(folder: Path, source: Path, *options: str) -> Path:
    prefix = source.parent / "data" / "chats"
    words = ["--source", str(source), "--tokenizer", str(folder), "--output", str(prefix)]
    assert main(["chats", *words, *options]) == 0
    return prefix


def answers(prefix: Path) -> list[list[str]]:
    """The texts that are learned, by conversation."""
    data, tokenizer = IndexedDataset(prefix), _tokenizer(prefix)
    mask = np.fromfile(data_file(prefix, ANSWERS), np.uint8)
    found, begin = [], 0
    for number in range(len(data)):
        tokens = np.asarray(data[number])
        own = mask[begin : begin + len(tokens)]
        begin += len(tokens)
        ends = np.flatnonzero(np.diff(own)) + 1
        parts = zip(np.split(tokens, ends), np.split(own, ends), strict=True)
        found.append([tokenizer.decode(part, whole=True) for part, learned in parts if learned[0]])
    assert begin == len(mask)
    return found


def texts(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [_tokenizer(prefix).decode(data[number], whole=True) for number in range(len(data))]


def _tokenizer(prefix: Path) -> JsonTokenizer:
    return JsonTokenizer(data_file(prefix, ".tokenizer.json").read_text(), END)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {"conversations": [{"from": SHAREGPT[one["role"]], "value": one["content"]} for one in TURNS]},
        {"system": "Be brief.", "conversations": [{"from": one["role"], "value": one["content"]} for one in TURNS[1:]]},
        {"messages": [{**one, "content": [{"type": "text", "text": one["content"]}], "name": None} for one in TURNS]},
    ],
    ids=["messages", "ShareGPT", "ShareGPT with a system prompt of its own", "content in parts"],
)
def test_conversations_of_any_format_are_the_tokens_of_transformers(
    record: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    prefix = made(folder, write_lines(tmp_path / "a.jsonl", [record]))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(TURNS, return_dict=False)
    assert IndexedDataset(prefix)[0].tolist() == expected
    assert answers(prefix) == [[f"Servus{END}", f"Hello{END}"]]


def test_prompt_and_completion_are_texts_or_messages_of_which_the_completion_is_learned(
    folder: Path, tmp_path: Path
) -> None:
    records = [
        {"prompt": "3+4=", "completion": "7"},
        {"prompt": TURNS[:4], "completion": TURNS[4:]},
        {"prompt": TURNS[:2], "completion": "Servus"},
    ]
    prefix = made(folder, write_lines(tmp_path / "a.jsonl", records))
    assert answers(prefix) == [[f"7{END}"], [f"Hello{END}"], [f"Servus{END}"]]
    assert texts(prefix)[0] == f"{BEGIN}user\n3+4={END}\n{BEGIN}assistant\n7{END}\n"
    assert texts(prefix)[1].startswith(f"{BEGIN}system\nBe brief.")


def test_text_needs_no_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "plain", None)
    prefix = made(tmp_path / "plain", write_lines(tmp_path / "a.jsonl", [{"prompt": "3+4=", "completion": "7"}]))
    assert (texts(prefix), answers(prefix)) == ([f"3+4=7{END}"], [[f"7{END}"]])
    with pytest.raises(DataPrepError, match=r"b\.jsonl:1: messages need a chat template.*--template FILE"):
        made(tmp_path / "plain", write_lines(tmp_path / "b.jsonl", [{"messages": TURNS}]), "--force")


def test_an_answer_of_weight_0_is_read_but_not_learned(folder: Path, tmp_path: Path) -> None:
    turns = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]]
    prefix = made(folder, write_lines(tmp_path / "a.jsonl", [{"messages": turns}]))
    assert answers(prefix) == [[f"Hello{END}"]]


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING], ids=["ChatML", "marks", "thoughts left out"])
def test_a_template_may_mark_the_answers_or_show_them(template: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "given.jinja").write_text(template)
    source = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    prefix = made(folder, source, "--template", str(tmp_path / "given.jinja"))
    assert answers(prefix) == [[f"Servus{END}", f"Hello{END}"]]


def test_columns_of_parquet_are_the_same_as_lines(folder: Path, tmp_path: Path) -> None:
    records = [{"messages": one, "id": number} for number, one in enumerate(sums(3))]
    lines = made(folder, write_lines(tmp_path / "a.jsonl", records))
    (tmp_path / "other").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "other" / "a.parquet", row_group_size=4)
    columns = made(folder, tmp_path / "other" / "a.parquet")
    for suffix in (".bin", ".idx", ANSWERS):
        assert data_file(lines, suffix).read_bytes() == data_file(columns, suffix).read_bytes()


def test_the_number_of_workers_changes_no_byte(folder: Path, tmp_path: Path) -> None:
    found = []
    for workers in ("1", "3"):
        (tmp_path / workers).mkdir()
        records = [{"messages": one} for one in sums() * 4]
        prefix = made(folder, write_lines(tmp_path / workers / "a.jsonl", records), "--workers", workers)
        found.append([data_file(prefix, suffix).read_bytes() for suffix in (".bin", ".idx", ANSWERS)])
    assert found[0] == found[1]


def test_what_is_left_out_is_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [*TURNS[:2], {"role": "assistant", "content": "x" * 200}]
    records = [{"messages": one} for one in (TURNS, TURNS, TURNS[:2], long)]
    records.append({"messages": [TURNS[1], {"role": "assistant", "content": f"no{END}more"}]})
    prefix = made(folder, write_lines(tmp_path / "a.jsonl", records), "--unique", "--max-tokens", "150")
    said = "left out: 1 unanswered, 1 special, 1 long, 1 duplicate"
    manifest = json.loads(data_file(prefix, ".json").read_text())
    assert manifest["conversations"] == 1
    assert manifest["left_out"] == {"unanswered": 1, "special": 1, "long": 1, "duplicate": 1}
    err = capsys.readouterr().err
    assert all(part in err for part in said[10:].split(", ")), err


NEEDED = "needed are messages (role, content), prompt and completion, or conversations (from, value)"
BAD = {
    "not JSON": ("{", "not JSON ("),
    "no object": ("[1]", "not a JSON object with a conversation, but [1]"),
    "no conversation": ('{"text": "a"}', f"no conversation: its keys are 'text'; {NEEDED}"),
    "no role": ('{"messages": [{"content": "a"}]}', "message 0 has no role ('role' or 'from')"),
    "no text": ('{"messages": [{"role": "user"}]}', "message 0 has no text ('content' or 'value'), but null"),
    "no message": ('{"messages": ["a"]}', 'messages[0] is not an object, but "a"'),
    "an image": (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "message 0 has content of type image, but only text can be learned",
    ),
    "half a character": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "has half a character (\\ud800)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_with_its_place_and_nothing_is_written(kind: str, folder: Path, tmp_path: Path) -> None:
    line, told = BAD[kind]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}] * 2)
    source.write_text(f"{source.read_text()}{line}\n")
    with pytest.raises(DataPrepError, match=re.escape(f"{source}:3: ") + ".*" + re.escape(told)):
        made(folder, source)
    assert not data_file(tmp_path / "data" / "chats", ".bin").exists()


def test_a_template_that_refuses_says_why(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no system prompts here') }}")
    source = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(DataPrepError, match=r"a\.jsonl:1: the chat template refuses .*: no system prompts here"):
        made(folder, source, "--template", str(tmp_path / "strict.jinja"))
    (tmp_path / "divides.jinja").write_text("{{ 1 // 0 }}")
    with pytest.raises(DataPrepError, match=r"a\.jsonl:1: the chat template refuses these messages: integer division"):
        made(folder, source, "--template", str(tmp_path / "divides.jinja"))
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(
        DataPrepError, match=r"--template .*broken\.jinja: the chat template is not one of Jinja \(line 1"
    ):
        made(folder, source, "--template", str(tmp_path / "broken.jinja"))


def test_a_template_cannot_run_programs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    source = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(DataPrepError, match="the chat template refuses these messages: access to attribute"):
        made(folder, source, "--template", str(tmp_path / "evil.jinja"))


def test_data_are_inspected_and_checked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = made(folder, write_lines(tmp_path / "a.jsonl", [{"messages": one} for one in sums(2)]))
    capsys.readouterr()
    assert main(["inspect", str(prefix), "--document", "3"]) == 0
    assert f"assistant\n▌2{END}▌" in capsys.readouterr().out
    assert main(["inspect", str(prefix)]) == 0
    assert "kind: chats\nconversations: 4\n" in capsys.readouterr().out
    assert main(["check", str(prefix)]) == 0
    assert "4 conversations, " in capsys.readouterr().out
    mask = data_file(prefix, ANSWERS)
    mask.write_bytes(bytes(len(mask.read_bytes())))
    with pytest.raises(DataPrepError, match="the files are not those that the manifest describes"):
        main(["check", str(prefix)])


def test_templates_need_jinja(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    source = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(
        DataPrepError, match=r"jinja2 is needed for chat templates, but missing: pip install 'tdpp\[data\]'"
    ):
        made(folder, source)
