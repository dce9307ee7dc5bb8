"""The steps from pairs to tokens, each of which goes on where it was interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial as bound
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError
from data_prep.files.journal import Journal
from data_prep.files.progress import shown
from data_prep.files.workers import batched, in_order
from data_prep.pairs.lines import Finished, lines, side_by_side
from data_prep.pairs.pair import (
    KEPT,
    Cleaner,
    HeldOut,
    Pair,
    Reader,
    Rules,
    counted,
    groups,
    kept_line,
    kept_pairs,
    splits_of,
)
from data_prep.tokenizers.special import SPECIAL, train_both
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.indexed_dataset import IndexedWriter, token_dtype
from megatron_ext.data.pairs import SIDES
from megatron_ext.data.samples import SPLITS

CHUNK = 2048
"""Pairs or sentences that are handled, and noted, together."""
NEAR = "near-duplicate"
"""Why a pair is left out that is nearly one that is held out."""
UNKNOWN = SPECIAL.index("<unk>")


def file_of(split: str, side: str, suffix: str) -> str:
    """What the name of a file ends in, behind the prefix; in the work folder it is the whole name."""
    return f"-{split}.{side}{suffix}"


TEXTS = tuple(file_of(split, side, ".txt") for split in SPLITS for side in SIDES)


def read_pairs(journal: Journal, readers: Sequence[Reader], rules: Rules, corpus: str) -> Counter[str]:
    """Writes the pairs that are fit to one file. Returns how many were `kept`, or left out for what reason. Raises
    DataPrepError: the pairs cannot be read, or none is fit."""
    if (found := journal.finished("read")) is not None:
        return found
    with shown("reading pairs", None) as show, journal.step("read", [KEPT]) as step:
        cleaner = Cleaner(rules, kept_pairs(journal.folder))
        pairs = chain.from_iterable(reader.pairs() for reader in readers)
        for chunk in batched(cleaner.cleaned(islice(pairs, step.items, None)), CHUNK):
            for pair, why in chunk:
                if why is None:
                    step.files[KEPT].write(kept_line(pair))
                step.counts[why or "kept"] += 1
            step.done(len(chunk))
            show.note(f"{step.items:,} pairs")
        if not step.counts["kept"]:
            journal.delete()  # the same command would find none again
            why = ", ".join(f"{count} {reason}" for reason, count in (+step.counts).items())
            raise DataPrepError(
                f"--source {corpus}: no pair is left{why and f' ({why})'}; correct the files or the languages, or "
                "loosen --min-words, --max-words or --max-ratio"
            )
    return step.counts


def split_pairs(journal: Journal, weights: Sequence[float], seed: int, corpus: str, workers: int) -> Counter[str]:
    """Writes one text for each side of each split, without training pairs that are nearly held out. Returns counts.
    Raises DataPrepError: there are too few pairs."""
    if (found := journal.finished("split")) is not None:
        return found
    placed = _Placed(journal.folder, weights, seed)
    held_out = HeldOut.of(pair for split, pair in placed if split != "train")
    with shown("splitting pairs", None) as show, journal.step("split", TEXTS) as step:
        parts = batched(islice(placed, step.items, None), CHUNK)
        with closing(in_order(bound(_without_near, held_out=held_out), parts, workers)) as results:
            for chunk in results:
                for split, pair in chunk:
                    step.counts[split] += 1
                    if split in SPLITS:
                        step.files[file_of(split, "source", ".txt")].write(f"{pair.source}\n".encode())
                        step.files[file_of(split, "target", ".txt")].write(f"{pair.target}\n".encode())
                step.done(len(chunk))
                show.note(f"{step.items:,} pairs")
        if not step.counts["train"]:
            journal.delete()
            if not step.counts[NEAR]:
                raise DataPrepError(
                    f"--source {corpus}: every pair is held out, by the name of its file (dev, valid, test) or by "
                    "--split; give pairs for training, too"
                )
            raise DataPrepError(
                f"--source {corpus}: no pair is left for training: {step.counts[NEAR]} are nearly the same as held-out "
                "ones; give more text, or hold out less with --split"
            )
    return step.counts


def learned(journal: Journal, size: int, all_ids: bool) -> JsonTokenizer:
    """The tokenizer of so many ids that the training pairs give, learned only once. Raises DataPrepError: they give
    fewer, but it is to have `all_ids`."""
    path = journal.folder / TOKENIZER
    if path.exists():
        return JsonTokenizer.from_file(path, SPECIAL[3])
    with shown("learning the tokenizer", None) as show:
        texts = [lines(journal.folder / file_of("train", side, ".txt")) for side in SIDES]
        tokenizer = train_both(_noted(chain(*texts), show.note), size)
    if tokenizer.vocab_size < size and all_ids:
        journal.delete()
        raise DataPrepError(
            f"--train-bpe {size}: the training pairs give only {tokenizer.vocab_size} ids; take --train-bpe "
            f"{tokenizer.vocab_size} or less, or give more text"
        )
    write_atomic(path, tokenizer.content)
    return tokenizer


def encode_texts(journal: Journal, place: tuple[str, str], tokenizer: JsonTokenizer, workers: int) -> Counter[str]:
    """Writes the tokens of one side of one split, whose text is written already.

    Returns:
        `sentences`, `tokens`, `longest` (tokens of a sentence) and `unknown` (tokens).
    """
    texts = ((text, "") for text in lines(journal.folder / file_of(*place, ".txt")))
    return _encode(journal, place, texts, tokenizer, workers, with_text=False)


def encode_finished(
    journal: Journal, place: tuple[str, str], given: Finished, language: str, tokenizer: JsonTokenizer, workers: int
) -> Counter[str]:
    """Writes tokens and text of one side of one split whose sentences are cut into tokens; returns as `encode_texts`.

    The text is that beside the tokens, where there is one, or else what the tokenizer makes of them.

    Raises:
        DataPrepError: a text has not as many lines as its tokens.
    """
    split = place[0]
    tokens, plain = given.tokens.get((split, language)), given.plain.get((split, language))
    texts: Iterator[tuple[str, str]] = iter(())
    if tokens is not None and plain is not None:
        texts = side_by_side(tokens, plain, "line k of the other, in tokens")
    elif tokens is not None:
        texts = ((line, "") for line in lines(tokens))
    return _encode(journal, place, texts, tokenizer, workers, with_text=True)


def _encode(
    journal: Journal,
    place: tuple[str, str],
    texts: Iterator[tuple[str, str]],
    tokenizer: JsonTokenizer,
    workers: int,
    *,
    with_text: bool,
) -> Counter[str]:
    name = file_of(*place, "").lstrip("-")
    if (found := journal.finished(f"encode {name}")) is not None:
        return found
    bin_, idx, txt = (file_of(*place, suffix) for suffix in (".bin", ".idx", ".txt"))
    work = bound(_encoded, tokenizer=tokenizer, with_text=with_text)
    with (
        shown(f"tokenizing {name}", None) as show,
        journal.step(f"encode {name}", [bin_, idx, *([txt] if with_text else [])]) as step,
    ):
        dtype = token_dtype(tokenizer.vocab_size)
        writer = IndexedWriter(step.files[bin_], step.files[idx], dtype, step.items, step.counts["tokens"])
        with closing(in_order(work, batched(islice(texts, step.items, None), CHUNK), workers)) as results:
            for lengths, tokens, text in results:
                writer.extend(lengths, tokens)
                if with_text:
                    step.files[txt].write(text)
                step.counts["sentences"] = writer.documents
                step.counts["tokens"] = writer.tokens
                step.counts["longest"] = max(step.counts["longest"], int(lengths.max(initial=0)))
                step.counts["unknown"] += int((tokens == UNKNOWN).sum())
                step.done(len(lengths))
                show.tokens(writer.tokens)
        writer.finish()
    return step.counts


class _Encoded(NamedTuple):
    lengths: NDArray[np.int32]
    tokens: NDArray[Any]
    """Tokens of all sentences, laid end to end."""
    text: bytes
    """Their lines."""


def _encoded(chunk: list[tuple[str, str]], tokenizer: JsonTokenizer, with_text: bool) -> _Encoded:
    ids = tokenizer.encode([text for text, _ in chunk])
    tokens = np.concatenate([np.asarray(found, np.int64) for found in ids]) if ids else np.zeros(0, np.int64)
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    if not with_text:
        return _Encoded(lengths, tokens, b"")
    texts = (plain or tokenizer.text_of(line.split()) for line, plain in chunk)
    return _Encoded(lengths, tokens, "".join(f"{' '.join(text.split())}\n" for text in texts).encode())


class _Placed:
    """The fit pairs with their splits, as often as they are gone through."""

    def __init__(self, folder: Path, weights: Sequence[float], seed: int) -> None:
        self._folder = folder
        self._without_page, named = counted(kept_pairs(folder))
        sizes = Counter(group for group in groups(kept_pairs(folder), self._without_page) if group)
        self._splits = splits_of(sizes, weights, seed, named)

    def __iter__(self) -> Iterator[tuple[str, Pair]]:
        grouped = groups(kept_pairs(self._folder), self._without_page)
        for pair, group in zip(kept_pairs(self._folder), grouped, strict=True):
            yield pair.split or self._splits[group], pair


def _without_near(chunk: list[tuple[str, Pair]], held_out: HeldOut) -> list[tuple[str, Pair]]:
    """The same, with `NEAR` as the split of training pairs that are nearly held out."""
    return [(NEAR if split == "train" and held_out.nearly_has(pair) else split, pair) for split, pair in chunk]


def _noted(texts: Iterable[str], note: Callable[[str], None]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        yield text
        if number % CHUNK == 0:
            note(f"{number:,} sentences")
