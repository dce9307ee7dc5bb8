"""`tdpp data`: prepare text, chats, pairs, images and videos, look into them, check, merge and split them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.reading.files import check_writable, write_whole
from conf.reading.parser import Parser, option
from conf.reading.values import from_0, prefix_path
from conf.visible import plural
from data_prep.chats import check as chats_check
from data_prep.chats import prepare as chats
from data_prep.errors import DataPrepError
from data_prep.images import check as images_check
from data_prep.images import prepare as images
from data_prep.indexed.check import check, open_checked
from data_prep.indexed.inspect import Sample, described, document_text, figures, sample_text
from data_prep.indexed.reshape import merge, split
from data_prep.kinds import MADE_BY, kind_of
from data_prep.making import add_number, make_unless_there
from data_prep.pairs import check as pairs_check
from data_prep.pairs import prepare as pairs
from data_prep.preparation import options
from data_prep.tokenizers.vocabulary import unknown_doubt, warn
from data_prep.videos import check as videos_check
from data_prep.videos import prepare as videos
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import CHATS, IMAGES, PAIRS, TEXT, VIDEOS, family_named, family_names

PREFIX = "path without .bin or .idx"
FAMILIES = (DEFAULT, *(name for name in family_names() if family_named(name).masks))
MAKERS: dict[str, tuple[Any, str]] = {
    CHATS: (chats, "write conversations by a tokenizer's chat template, with a mask of the answers"),
    PAIRS: (pairs, "write aligned sentences in two languages"),
    IMAGES: (images, "pack images and their classes into arrays"),
    VIDEOS: (videos, "write frame features and captions of videos"),
}
"""For each kind but text, which is also its command, the module that makes such data, and what `--help` says of it."""
CHECKS: dict[str, Any] = {CHATS: chats_check, PAIRS: pairs_check, IMAGES: images_check, VIDEOS: videos_check}
"""For each kind but text, the module that knows what such data hold."""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp data <argv>`; returns its exit code."""
    arguments = parser().parse_args(argv)
    command: str = arguments.command
    if command in MAKERS:
        maker, _ = MAKERS[command]
        request = maker.request_of(arguments)
        make_unless_there(arguments.output, arguments.force, command, request, maker.prepare, maker.summary)
    elif command == "prepare":
        options.run(arguments)
    elif command == "inspect":
        _inspect(arguments)
    elif command == "check":
        print(f"{arguments.prefix}: sound, {_checked(arguments.prefix, arguments.vocab_size)}")
    elif command == "merge":
        for prefix in arguments.prefix:
            _require_text(prefix, command)
        print(merge(arguments.prefix, arguments.output))
    else:
        _require_text(arguments.prefix, command)
        print("\n".join(map(str, split(arguments.prefix, arguments.weights, arguments.output))))
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="tdpp data", description="Turn text, chats, pairs, images and videos into training data.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options.add_options(commands.add_parser("prepare", help="write indexed data from a source of text"))
    for name, (maker, purpose) in MAKERS.items():
        maker.add_options(commands.add_parser(name, help=purpose))
    look = commands.add_parser("inspect", help="describe a data set")
    look.add_argument("prefix", type=Path, help=PREFIX)
    one = look.add_mutually_exclusive_group()
    one.add_argument("--document", type=int, metavar="N", help="print one document, pair, image or video")
    sample = "print the text of one training sample of a run, counted from 0"
    one.add_argument("--sample", type=option(from_0), metavar="N", help=sample)
    add_number(look, "--sequence-length", "the run's sequence length (default: 1024)", 1024)
    look.add_argument("--seed", type=_seed, default=1234, metavar="N", help="the run's seed (default: 1234)")
    look.add_argument("--split", default="969,30,1", metavar="W,W,W", help="the run's data.split (default: 969,30,1)")
    add_number(look, "--samples", "the number of samples of the whole run, if it takes several epochs")
    of_family = "the family of the run's model (default: gpt)"
    look.add_argument("--family", choices=FAMILIES, default=DEFAULT, help=of_family)
    look.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further key of the run, with bert or t5 only, such as data.mask_prob=0.2 or "
        "model.bert_binary_head=false",
    )
    look.add_argument("--page", type=Path, metavar="FILE", help="write a page with statistics of documents and tokens")
    sound = commands.add_parser("check", help="check a data set completely")
    sound.add_argument("prefix", type=Path, help=PREFIX)
    add_number(sound, "--vocab-size", "check that token ids are below N (default: the manifest's vocabulary size)")
    join = commands.add_parser("merge", help="join several indexed data sets into one, in the order given")
    join.add_argument("prefix", type=Path, nargs="+", help=PREFIX)
    part = commands.add_parser("split", help="split an indexed data set into several, by weights of documents")
    part.add_argument("prefix", type=Path, help=PREFIX)
    weights = "the weight of each part, by documents, such as 969,31"
    part.add_argument("--weights", type=_weights, required=True, metavar="W,W", help=weights)
    for command, names in ((join, "<output>_text_document"), (part, "<output>-0_text_document and so on")):
        output = f"the prefix of the output: {names}"
        command.add_argument("--output", type=option(prefix_path), required=True, help=output)
    return made


def _weights(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 9,1") from error
    if len(weights) < 2 or not all(0 < weight < float("inf") for weight in weights):
        raise argparse.ArgumentTypeError(f"{text!r} must be two or more numbers above 0, such as 9,1")
    return weights


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {(1 << 32) - 1}")
    return int(text)


def _checked(prefix: Path, vocab_size: int | None) -> str:
    """Checks data of any kind in full; returns how many there are."""
    kind = kind_of(prefix)
    if kind == CHATS:
        made = chats_check.check_in_full(prefix, vocab_size)
        return f"{plural(made.conversations, 'conversation')}, {made.tokens} tokens, {made.answers} of them in answers"
    if kind == PAIRS:
        splits = pairs_check.check_in_full(prefix, vocab_size).splits.items()
        return f"{', '.join(f'{split.pairs} {name}' for name, split in splits)} pairs"
    if kind == IMAGES:
        if vocab_size is not None:
            raise DataPrepError(
                f"--vocab-size {vocab_size}: {prefix} holds images, which have no tokens; leave --vocab-size out"
            )
        found = images_check.check_in_full(prefix)
        splits_ = ", ".join(f"{split.images} {name}" for name, split in found.splits.items())
        return f"{splits_} images of {plural(len(found.classes), 'class', 'es')}"
    if kind == VIDEOS:
        if vocab_size is not None:
            raise DataPrepError(
                f"--vocab-size {vocab_size}: the manifest of {prefix} gives the vocabulary size; leave --vocab-size out"
            )
        return (
            ", ".join(f"{one.videos} {name}" for name, one in videos_check.check_in_full(prefix).splits.items())
            + " videos"
        )
    data = check(prefix, vocab_size)
    warn(unknown_doubt(data, prefix, str(prefix), in_full=True))
    sequences = f"{plural(len(data), 'sentence')}, " if len(data) != data.documents else ""
    return f"{plural(data.documents, 'document')}, {sequences}{plural(len(data.tokens), 'token')}"


def _require_text(prefix: Path, command: str) -> None:
    kind = kind_of(prefix)
    if kind is not None and kind != TEXT:
        raise DataPrepError(
            f"{prefix} holds {kind}, but {command} is for text; give {MADE_BY[kind]!r} another --source"
        )


def _inspect_other(arguments: argparse.Namespace, kind: str) -> None:
    """Shows pairs, images or videos."""
    prefix: Path = arguments.prefix
    of_text = {"--page": arguments.page, "--set": arguments.set, "--family": arguments.family != DEFAULT}
    if kind != PAIRS:
        of_text["--sample"] = arguments.sample is not None
    for name, given in of_text.items():
        if given:
            raise DataPrepError(f"{name}: {prefix} holds {kind}, which have none; --document N shows one of them")
    if arguments.sample is not None:
        samples = arguments.samples or arguments.sample + 1
        print(pairs_check.sample_text(prefix, arguments.sample, samples, arguments.seed, arguments.sequence_length))
    elif arguments.document is not None:
        print(CHECKS[kind].document_text(prefix, arguments.document))
    else:
        print("\n".join(f"{key}: {value}" for key, value in CHECKS[kind].described(prefix).items()))


def _inspect(arguments: argparse.Namespace) -> None:
    prefix: Path = arguments.prefix
    page: Path | None = arguments.page
    check_writable(page)
    kind = kind_of(prefix)
    if kind is not None and kind != TEXT:
        _inspect_other(arguments, kind)
        return
    data = open_checked(prefix)
    if arguments.document is not None:
        print(document_text(data, prefix, arguments.document))
        return
    if arguments.sample is not None:
        sample = Sample(
            number=arguments.sample,
            samples=arguments.samples or arguments.sample + 1,
            sequence_length=arguments.sequence_length,
            seed=arguments.seed,
            split=arguments.split,
        )
        masks = family_named(arguments.family).masks
        if arguments.set and not masks:
            raise DataPrepError(f"--set {arguments.set[0]}: applies only to --family bert and t5; leave it out")
        if not masks:
            print(sample_text(data, prefix, sample))
            return
        from data_prep.indexed.inspect import masked_text  # it composes a run's configuration

        print(masked_text(prefix, sample, arguments.family, arguments.set))
        return
    facts = described(data, prefix)
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    if page is not None:
        from reports.pages.command_pages import figures_page  # few ask for a page, and it is slow to import

        write_whole(page, figures_page(str(prefix), facts, figures(data, prefix)))
        print(f"page: {page}")
