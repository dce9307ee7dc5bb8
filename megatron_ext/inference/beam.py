"""Beam search with the length normalization and the coverage penalty of GNMT (Wu et al. 2016, section 7)."""

from __future__ import annotations

import math
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from megatron_ext.data.pairs import BEGIN, END, PAD
from megatron_ext.inference.scoring import Scoring

Step = Callable[[Tensor, Tensor, Tensor], Tuple[Tensor, Optional[Tensor]]]
"""From prefixes [n, tokens], the numbers [n] of their sentences, and the rows [n] that they had before their last token
(at first, their own) to the log probabilities of the next token [n, vocabulary], and how much the last token attends to
the source's [n, source tokens], if that is asked for."""
LEAST_ATTENTION = 1e-10
"""A source token counts as attended to so much at least: of nothing there is no logarithm."""


class Hypothesis(NamedTuple):
    """A finished translation."""

    tokens: Tuple[int, ...]
    """Without marks."""
    score: float


class _Live(NamedTuple):
    """A hypothesis that goes on."""

    sentence: int
    tokens: Tuple[int, ...]
    """With `BEGIN`."""
    log_probability: float
    parent: int
    """Its row before this step."""


def search(step: Step, source_mask: Tensor, limits: Sequence[int], scoring: Scoring) -> List[Hypothesis]:
    """The best translation found of each sentence.

    source_mask [sentences, source tokens] is 0 where there is padding. By sentence, a translation has so many tokens at
    most as `limits` says, its end mark among them. A sentence is done when no hypothesis could still become the best.
    """
    device, padding = source_mask.device, source_mask == 0
    best: List[Optional[Hypothesis]] = [None] * len(source_mask)
    live = [_Live(sentence, (BEGIN,), 0.0, sentence) for sentence in range(len(source_mask))]
    covered: Optional[Tensor] = None
    for length in range(1, max(limits) + 1):
        rows = torch.tensor([one.sentence for one in live], device=device)
        prefixes = torch.tensor([one.tokens for one in live], device=device)
        parents = torch.tensor([one.parent for one in live], device=device)
        log_probabilities, attention = step(prefixes, rows, parents)
        log_probabilities[:, [PAD, BEGIN]] = -math.inf
        over = torch.tensor([limits[one.sentence] == length for one in live], device=device)
        log_probabilities[:, :END].masked_fill_(over.unsqueeze(-1), -math.inf)
        log_probabilities[:, END + 1 :].masked_fill_(over.unsqueeze(-1), -math.inf)
        penalties = [0.0] * len(live)
        if attention is not None and scoring.coverage:
            covered = attention if covered is None else covered + attention
            logarithms = covered.clamp(LEAST_ATTENTION, 1.0).log().masked_fill(padding[rows], 0.0)
            penalties = (scoring.coverage * logarithms.sum(-1)).tolist()
        following: List[_Live] = []
        ways = _best_of_each(log_probabilities, live, scoring.beam)
        for first, last in _by_sentence(live):
            sentence = live[first].sentence
            going_on: List[_Live] = []
            for parent, token, value in _best_of(ways[first:last], scoring.beam):
                if token != END:
                    tokens = (*live[first + parent].tokens, token)
                    going_on.append(_Live(sentence, tokens, value, first + parent))
                    continue
                score = scoring.normalized(value, length) + penalties[first + parent]
                known = best[sentence]
                if known is None or score > known.score:
                    best[sentence] = Hypothesis(live[first + parent].tokens[1:], score)
            if going_on:
                hope = scoring.normalized(going_on[0].log_probability, limits[sentence])
                known = best[sentence]
                following += going_on if known is None or hope > known.score else []
        live = following
        if not live:
            break
        if covered is not None:
            covered = covered[torch.tensor([one.parent for one in live], device=device)]
    return [Hypothesis((), -math.inf) if one is None else one for one in best]


def _by_sentence(live: List[_Live]) -> Iterable[Tuple[int, int]]:
    """Returns from where to where the hypotheses of each sentence lie."""
    first = 0
    for place in range(1, len(live) + 1):
        if place == len(live) or live[place].sentence != live[first].sentence:
            yield first, place
            first = place


def _best_of_each(log_probabilities: Tensor, live: List[_Live], beam: int) -> List[List[Tuple[float, int]]]:
    """The best ways in which each hypothesis goes on, best first: the log probability, and with which token."""
    before = torch.tensor([one.log_probability for one in live], device=log_probabilities.device)
    values, tokens = (before.unsqueeze(-1) + log_probabilities).topk(min(beam, log_probabilities.shape[-1]))
    return [list(zip(*one)) for one in zip(values.tolist(), tokens.tolist())]


def _best_of(ways: List[List[Tuple[float, int]]], beam: int) -> List[Tuple[int, int, float]]:
    """Returns the best ways to go on with a sentence: which hypothesis, with which token, and the log probability."""
    every = [(parent, token, value) for parent, own in enumerate(ways) for value, token in own if value > -math.inf]
    return sorted(every, key=lambda way: -way[2])[:beam]
