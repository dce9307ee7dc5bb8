"""Beam search against every translation that there is."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_ext.data.pairs import BEGIN, END, PAD
from megatron_ext.inference.scoring import Scoring
from megatron_ext.inference.translator import search

VOCABULARY, LIMIT, SOURCE = 7, 4, 5
WORDS = [token for token in range(VOCABULARY) if token not in (PAD, BEGIN, END)]


class Model:
    """A distribution and attention that follow from the whole prefix and the sentence."""

    def __init__(self, seed: int, sentences: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, SOURCE + 1, (sentences,), generator=source)
        self.mask = (torch.arange(SOURCE) < self.lengths.unsqueeze(1)).long()
        self._seed = seed

    def of(self, prefix: tuple[int, ...], sentence: int) -> tuple[Tensor, Tensor]:
        """Log probabilities [vocabulary] and attention [source]."""
        source = torch.Generator().manual_seed(hash((self._seed, sentence, *prefix)) % 2**31)
        logits = 2 * torch.randn(VOCABULARY, generator=source)
        scores = torch.randn(SOURCE, generator=source).masked_fill(self.mask[sentence] == 0, -math.inf)
        return logits.log_softmax(-1), scores.softmax(-1)

    def step(self, prefixes: Tensor, rows: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        found = [self.of(tuple(prefix), row) for prefix, row in zip(prefixes.tolist(), rows.tolist(), strict=True)]
        return torch.stack([one for one, _ in found]), torch.stack([one for _, one in found])


def score(model: Model, sentence: int, tokens: tuple[int, ...], scoring: Scoring) -> float:
    """s(Y, X) as Wu et al. 2016 write it."""
    total, covered, prefix = 0.0, torch.zeros(SOURCE), (BEGIN,)
    for token in (*tokens, END):
        log_probabilities, attention = model.of(prefix, sentence)
        total += float(log_probabilities[token])
        covered = covered + attention
        prefix = (*prefix, token)
    norm = (5 + len(prefix) - 1) ** scoring.length_norm / 6**scoring.length_norm
    coverage = sum(math.log(min(float(covered[place]), 1.0)) for place in range(int(model.lengths[sentence])))
    return total / norm + scoring.coverage * coverage


@pytest.mark.parametrize("scoring", [(0.6, 0.1), (0.0, 0.0), (1.0, 0.0), (0.6, 2.0)], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_all_translations_finds_the_best_of_them(seed: int, scoring: tuple[float, float]) -> None:
    of_all = Scoring(VOCABULARY**LIMIT, *scoring)
    model = Model(seed, 3)
    every = [words for length in range(LIMIT) for words in product(WORDS, repeat=length)]
    for sentence, found in enumerate(search(model.step, model.mask, [LIMIT] * len(model.mask), of_all)):
        scores = {words: score(model, sentence, words, of_all) for words in every}
        best = max(scores, key=scores.__getitem__)
        assert found.tokens == best
        assert found.score == pytest.approx(scores[best], abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_takes_the_best_token_each_time(seed: int) -> None:
    model = Model(seed, 4)
    for sentence, found in enumerate(search(model.step, model.mask, [LIMIT] * len(model.mask), Scoring(1, 0.0, 0.0))):
        prefix: tuple[int, ...] = (BEGIN,)
        while len(prefix) < LIMIT:
            log_probabilities, _ = model.of(prefix, sentence)
            token = max((*WORDS, END), key=lambda token: float(log_probabilities[token]))
            if token == END:
                break
            prefix = (*prefix, token)
        assert found.tokens == prefix[1:]


def test_sentences_do_not_change_each_other() -> None:
    together = Model(3, 4)
    found = search(together.step, together.mask, [4, 3, 1, 2], Scoring(3))
    for sentence in range(4):
        (alone,) = search(
            lambda prefixes, rows, parents, s=sentence: together.step(prefixes, rows + s, parents),
            together.mask[sentence : sentence + 1],
            [[4, 3, 1, 2][sentence]],
            Scoring(3),
        )
        assert alone == found[sentence]
