"""`tdpp data chats`: its options, and what they mean together."""

from __future__ import annotations

import argparse
from pathlib import Path

from conf.reading.values import option, whole
from conf.visible import plural
from data_prep.chats.encode import Encoder, special_tokens
from data_prep.chats.prepare import ChatsRequest, prepare
from data_prep.chats.template import template_of
from data_prep.errors import of_option
from data_prep.kinds import ChatsManifest
from data_prep.making import add_common_options, add_output, make_unless_there, workers_of
from data_prep.text.corpus import corpus_of
from data_prep.tokenizers.tokenizer import content_of, eos_token_of, loaded
from megatron_ext.contract.models.model import CHATS


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data chats` takes."""
    make.add_argument(
        "--source",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="files and folders of JSON lines (.jsonl, .json; also .gz, .bz2, .zst) or Parquet, a conversation each: "
        "messages with role and content, prompt and completion, or ShareGPT's conversations with from and value",
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
    make.add_argument("--max-tokens", type=option(whole), metavar="N", help="leave out longer conversations")
    make.add_argument("--unique", action="store_true", help="leave out conversations that occurred before")
    add_common_options(make)


def run(arguments: argparse.Namespace) -> None:
    """Prepares conversations, or says that they are there; prints their prefix."""
    make_unless_there(arguments.output, arguments.force, CHATS, _request(arguments), prepare, summary)


def summary(made: ChatsManifest) -> str:
    """What was prepared, in a line."""
    left_out = "".join(f", {count} {reason}" for reason, count in made.left_out.items())
    return (
        f"{plural(made.conversations, 'conversation')} of up to {made.longest} tokens, {made.tokens} tokens, "
        f"{made.answers} of them in answers, of {made.corpus}; {f'left out:{left_out[1:]}; ' if left_out else ''}"
        f"model.vocab_size={made.vocab_size}"
    )


def _request(arguments: argparse.Namespace) -> ChatsRequest:
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
