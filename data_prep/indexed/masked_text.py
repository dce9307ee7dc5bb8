"""A training sample of BERT or T5 as text: what the model reads, and what it is to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.compose import compose
from conf.errors import ConfigError
from conf.reading.scratch import Scratch
from conf.schema.experiment import Experiment
from data_prep.errors import DataPrepError
from data_prep.indexed.inspect import MOST_SAMPLES, Sample
from data_prep.indexed.manifest import tokenizer_of
from data_prep.tokenizers.tokenizer import Tokenizer
from megatron_ext.contract.errors import DataError
from megatron_ext.contract.models.model import BERT
from megatron_ext.data.masked.bert_samples import BertSamples
from megatron_ext.data.masked.t5_samples import T5Samples
from megatron_ext.data.masked.vocabulary import Vocabulary
from megatron_ext.data.samples import Samples, Split


def masked_text(prefix: Path, sample: Sample, family: str, settings: Sequence[str]) -> str:
    """What a run of `family` with these `settings` is given as this sample; special tokens in brackets.

    Raises:
        DataPrepError: there is no such sample, a setting is wrong, or nobody knows the tokeniser.
    """
    if not 0 <= sample.number < sample.samples <= MOST_SAMPLES:
        raise DataPrepError(
            f"--sample {sample.number}: the run has the samples 0 to {sample.samples - 1} (--samples); both take up to "
            f"{MOST_SAMPLES}"
        )
    try:
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
    except (ConfigError, DataError, DataPrepError) as error:
        raise DataPrepError(f"--sample {sample.number}: {error}") from error
    return _bert(text, content) if family == BERT else _t5(text, content)


def _samples(prefix: Path, sample: Sample, run: Experiment, vocabulary: Vocabulary, cache: str) -> Samples:
    weights = [float(weight) for weight in sample.split.split(",")]
    split = Split(sample.samples, sample.seed, (weights[0], weights[1], weights[2]), "train", cache)
    model, masking = run.model, run.data.masking(str(run.model.family))
    assert masking is not None
    if str(model.family) == BERT:
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
