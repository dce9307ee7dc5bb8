"""What indexed data hold: counts, figures, the text of a document or of a training sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.compose import compose
from conf.reading.files import Scratch
from conf.schema.experiment import Experiment
from data_prep.errors import DataPrepError, named
from data_prep.indexed.manifest import read_manifest, tokenizer_of
from data_prep.kinds import weights_of
from data_prep.tokenizers.tokenizer import Tokenizer
from data_prep.tokenizers.vocabulary import BLOCK
from megatron_ext.data.index_maps import compute, require_one_sample, sample_tokens, split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.masked.bert_samples import BertSamples
from megatron_ext.data.masked.t5_samples import T5Samples
from megatron_ext.data.masked.vocabulary import Vocabulary
from megatron_ext.data.samples import Samples, Split

Figure = Mapping[str, Any]
"""A figure of Plotly, of plain values: `data` and `layout`."""
MOST_SAMPLES = 2**27
"""The most samples of a run whose order is laid out in memory: 1.6 GB."""
LARGEST_ID = 2**27
"""The largest id of a token that is counted: no vocabulary is as large (conf/schema/values/ranges.py)."""
VOCAB_MULTIPLE = 128
"""What Megatron pads vocabularies to, times the tensor size; the default of `model.vocab_multiple`."""
COMMONEST = 40
BINS = 60


def described(data: IndexedDataset, prefix: Path) -> dict[str, str]:
    """Counts, and what the manifest tells, if there is one."""
    lengths = data.lengths
    facts = {
        "documents": str(data.documents),
        "sequences": str(len(data)),
        "tokens": str(len(data.tokens)),
        "number format": data.dtype.name,
    }
    if len(lengths):
        low, middle, high = np.percentile(lengths, [0, 50, 100], method="lower").tolist()
        facts["tokens per sequence"] = f"{low} to {high}, median {middle}"
    manifest = read_manifest(prefix)
    if manifest is not None:
        multiples = [VOCAB_MULTIPLE * tensor for tensor in (1, 2, 4, 8)]
        sizes = [-(-manifest.vocab_size // multiple) * multiple for multiple in multiples]
        facts |= {
            "source": manifest.source,
            "tokenizer": manifest.tokenizer,
            "vocabulary": str(manifest.vocab_size),
            "padded vocabulary": f"{', '.join(map(str, sizes))} for parallel.tensor=1, 2, 4, 8",
        }
    return facts


def document_text(data: IndexedDataset, prefix: Path, document: int) -> str:
    """The text of a document. Raises DataPrepError: there is no such document, or nobody knows the tokeniser."""
    if not 0 <= document < data.documents:
        raise DataPrepError(f"--document {document}: {prefix} has the documents 0 to {data.documents - 1}")
    with named(f"--document {document}"):
        tokenizer = tokenizer_of(prefix)
    first, last = data.boundaries[document : document + 2].tolist()
    return "".join(tokenizer.decode(data[sequence]) for sequence in range(first, last))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Which training sample of a run: its number, and what the order of the samples follows from."""

    number: int
    samples: int
    """That the run takes in all; it matters where they take several epochs."""
    sequence_length: int
    seed: int
    split: str


def sample_text(data: IndexedDataset, prefix: Path, sample: Sample) -> str:
    """The text that a run is given as this sample. Raises DataPrepError: there is no such sample, or nobody knows the
    tokeniser."""
    if not 0 <= sample.number < sample.samples:
        raise DataPrepError(f"--sample {sample.number}: the run has the samples 0 to {sample.samples - 1} (--samples)")
    with named(f"--sample {sample.number}"):
        documents = split_documents(weights_of(sample.split), len(data))[0]
        require_one_sample(data, documents, "train", sample.sequence_length)
        tokenizer = tokenizer_of(prefix)
    if sample.samples > MOST_SAMPLES:
        raise DataPrepError(
            f"a run of {sample.samples} samples is too large to be laid out here; --samples and --sample take up to "
            f"{MOST_SAMPLES}"
        )
    maps = compute(data.lengths, documents, sample.samples, sample.sequence_length, sample.seed)
    return tokenizer.decode(sample_tokens(data, maps, sample.number))


def token_counts(data: IndexedDataset) -> NDArray[np.int64]:
    """[largest id + 1]: how often each id is there. The memory it takes does not grow with the data. Raises
    DataPrepError: an id is below 0, or no id of a vocabulary."""
    if not np.issubdtype(data.dtype, np.integer):
        raise DataPrepError(f"{data.idx}: the tokens are {data.dtype.name}, but token ids are whole numbers")
    counts = np.zeros(0, np.int64)
    for first in range(0, len(data.tokens), BLOCK):
        block = data.tokens[first : first + BLOCK]
        if block.min() < 0:
            raise DataPrepError(f"{data.bin}: token {first + int(np.argmin(block))} has the id {block.min()}, below 0")
        if block.max() > LARGEST_ID:
            place = first + int(np.argmax(block))
            raise DataPrepError(
                f"{data.bin}: token {place} has the id {block.max()}, more than the {LARGEST_ID} of any vocabulary; "
                "the data are damaged"
            )
        found = np.bincount(block, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def figures(data: IndexedDataset, prefix: Path) -> list[Figure]:
    """How long documents are, how often tokens are there by rank, and the commonest by name."""
    counts = token_counts(data)
    order = np.argsort(-counts, kind="stable")
    used = counts[order][: int((counts > 0).sum())]
    ranks = np.unique(np.geomspace(1, len(used), 400).astype(np.int64)) if len(used) else np.zeros(0, np.int64)
    top = order[: min(COMMONEST, len(used))].tolist()
    return [
        _bars("Tokens per sequence", *_length_bins(data.lengths), axis={"type": "log", "title": {"text": "tokens"}}),
        {
            "data": [{"type": "scatter", "mode": "lines", "x": ranks.tolist(), "y": used[ranks - 1].tolist()}],
            "layout": {
                "title": {"text": f"How often each of the {len(used)} different tokens occurs"},
                "xaxis": {"type": "log", "title": {"text": "rank"}},
                "yaxis": {"type": "log", "title": {"text": "times"}},
            },
        },
        _bars(
            f"The {len(top)} most common tokens",
            _names(top, prefix),
            counts[top].tolist(),
            axis={"type": "category", "tickangle": -60},
        ),
    ]


def _bars(title: str, x: Sequence[object], y: Sequence[int], axis: Mapping[str, Any]) -> Figure:
    return {"data": [{"type": "bar", "x": x, "y": y}], "layout": {"title": {"text": title}, "xaxis": axis}}


def _length_bins(lengths: NDArray[np.int32]) -> tuple[list[float], list[int]]:
    """Middles of bins that grow by a factor, and how many sequences fall into each."""
    full = lengths[lengths > 0]
    if not len(full):
        return [], []
    edges = np.unique(np.geomspace(1, int(full.max()) + 1, BINS).astype(np.int64))
    counts, _ = np.histogram(full, edges)
    return np.sqrt(edges[:-1] * edges[1:].astype(np.float64)).round(1).tolist(), counts.tolist()


def _names(ids: Sequence[int], prefix: Path) -> list[str]:
    """Returns names of tokens, as text where the tokeniser is known; the id keeps the same texts apart."""
    if read_manifest(prefix) is None:
        return [str(token) for token in ids]
    tokenizer = tokenizer_of(prefix)
    ends = {tokenizer.end_of_document: "end of document"}
    return [ends.get(token) or f"{tokenizer.decode(np.array([token]))!r} {token}" for token in ids]


def masked_text(prefix: Path, sample: Sample, family: str, settings: Sequence[str]) -> str:
    """What a run of `family` with these `settings` is given as this sample; special tokens in brackets. Raises
    DataPrepError: there is no such sample, a setting is wrong, or nobody knows the tokeniser."""
    if not 0 <= sample.number < sample.samples <= MOST_SAMPLES:
        raise DataPrepError(
            f"--sample {sample.number}: the run has the samples 0 to {sample.samples - 1} (--samples); both take up to "
            f"{MOST_SAMPLES}"
        )
    with named(f"--sample {sample.number}"):
        vocabulary = Vocabulary.read(prefix)
        run = compose(
            [
                *(f"model={family}-tiny", f"data.prefix='{prefix}'", f"data.split='{sample.split}'"),
                *(f"model.sequence_length={sample.sequence_length}", f"model.vocab_size={vocabulary.size}"),
                *(f"train.seed={sample.seed}", *settings),
            ]
        )
        text = _Text(tokenizer_of(prefix), vocabulary)
        with Scratch() as cache:
            content = _samples(prefix, sample, run, vocabulary, str(cache.path)).sample(sample.number)
    return _t5(text, content) if run.model.traits.decoder else _bert(text, content)


def _samples(prefix: Path, sample: Sample, run: Experiment, vocabulary: Vocabulary, cache: str) -> Samples:
    split = Split(sample.samples, sample.seed, tuple(weights_of(sample.split)), "train", cache)
    model, masking = run.model, run.data.masking(str(run.model.family))
    assert masking is not None
    if not model.traits.decoder:
        return BertSamples(prefix, split, model.sequence_length, vocabulary.size, masking, model.bert_binary_head)
    decoder = model.sized(1).decoder_tokens
    return T5Samples(prefix, split, model.sequence_length, decoder, vocabulary.size, masking)


class _Text:
    """Turns tokens into text, special ones into their names."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        special = {"[CLS]": vocabulary.cls, "[SEP]": vocabulary.sep, "[MASK]": vocabulary.mask}
        ends = {"[BOS]": vocabulary.bos, "[EOS]": vocabulary.eos}
        names = {token: name for name, token in {**ends, **special}.items() if token is not None}
        self._names = names | {token: f"[{number}]" for number, token in enumerate(vocabulary.sentinels)}

    def of(self, tokens: NDArray[np.int64]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token in [*tokens.tolist(), None]:
            if token is not None and token not in self._names:
                run.append(token)
                continue
            if run:
                parts.append(self._tokenizer.decode(np.array(run)).strip())
                run = []
            if token is not None:
                parts.append(self._names[token])
        return " ".join(parts)


def _bert(text: _Text, content: Mapping[str, NDArray[Any]]) -> str:
    asked = np.flatnonzero(content["loss_mask"])
    hidden = ", ".join(f"{place} {text.of(content['labels'][place : place + 1])!r}" for place in asked.tolist())
    lines = [f"text: {text.of(content['text'][content['padding_mask'] == 1])}", f"to predict: {hidden or 'nothing'}"]
    if content["types"].any():
        order = "preceded the first in the text" if content["is_random"] else "follows the first in the text"
        lines.append(f"the second part {order}")
    return "\n".join(lines)


def _t5(text: _Text, content: Mapping[str, NDArray[Any]]) -> str:
    return (
        f"encoder: {text.of(content['text_enc'][content['enc_mask'] == 1])}\n"
        f"decoder: {text.of(content['labels'][content['loss_mask'] == 1])}"
    )
