"""A trained translation model as one module, and the sentences that it translates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.checkpoints.header import part_name
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.model import ModelConfig, family_named, family_names
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.data.pairs import BEGIN, END, PAD
from megatron_ext.families.tasks import task_of
from megatron_ext.inference.scoring import Scoring
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Block, Task

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


TOGETHER = 32
"""Sentences of like length that are translated at once."""


def require_translation(family: str) -> None:
    """Raises EngineError for a family that does not translate."""
    translating = [name for name in family_names() if family_named(name).translates]
    if family not in translating:
        raise EngineError(
            f"the model is of model.family={family}, which does not translate; {' and '.join(translating)} do"
        )


def task_of_model(model: Mapping[str, object]) -> Task:
    """The task of a model with these sizes and options (`ModelConfig.identity`), without padding of its vocabulary.
    Raises EngineError: it does not translate."""
    require_translation(str(model.get("family", "gpt")))
    sizes = {**model, "padded_vocab_size": model["vocab_size"]}
    return task_of(Plan.of({"model": sizes, "train": {"seed": 0, "precision": "fp32"}, "recompute": "none"}, Path()))


def weights_of(checkpoint: Checkpoint, kind: str = WEIGHTS) -> Dict[str, Tensor]:
    """All weights of this kind in a translation model's checkpoint, by their names in the model; tied ones have their
    owner's. Raises EngineError: a part is missing or damaged, or the model does not translate."""
    found: Dict[str, Tensor] = {}
    for block in task_of_model(checkpoint.meta.model).blocks:
        for name, tensor in read_part(checkpoint, part_name(block.name)).items():
            found_kind, _, inner = name.partition("/")
            if found_kind == kind:
                found[f"{block.name}.{inner}"] = tensor
    return found


def together(sentences: Sequence[Sequence[int]]) -> List[List[int]]:
    """The numbers of those that are translated at once, which have like lengths; empty ones are left out."""
    order = sorted((number for number, one in enumerate(sentences) if one), key=lambda number: len(sentences[number]))
    return [order[first : first + TOGETHER] for first in range(0, len(order), TOGETHER)]


class Translator:
    """A model with its weights on a device, in fp32.

    Raises:
        EngineError: the model does not translate, or a weight is missing or of another shape.
    """

    def __init__(self, model: Mapping[str, object], weights: Mapping[str, Tensor], device: str = "cpu") -> None:
        task = task_of_model(model)
        self._model: ModelConfig = task._model  # type: ignore[attr-defined]
        self._device = torch.device(device)
        blocks = list(task.blocks)
        second = next(number for number, block in enumerate(blocks) if block.kind == "decoder_embedding")
        held: List[List[Block]] = [blocks[:second], blocks[second:-1], blocks[-1:]]
        owned: Dict[str, nn.Parameter] = {}
        self._encoder, self._decoder, self._head = (
            Stage(task, part, TensorGroup(), owned) for part in cut_between(task, held)
        )
        for name, parameter in owned.items():
            given = weights.get(name)
            if given is None or given.shape != parameter.shape:
                shape = "none" if given is None else str(list(given.shape))
                raise EngineError(f"expected a weight {name} of shape {list(parameter.shape)}, found {shape}")
            parameter.data = given.to(self._device, torch.float32)
        for stage in (self._encoder, self._decoder, self._head):
            stage.eval().requires_grad_(False)
            for module in stage.modules():
                if isinstance(module, nn.LSTM):
                    module.flatten_parameters()
        self._embedding: Any = self._decoder.blocks[0]
        self._keeping: List[Any] = list(self._decoder.blocks)[1:]
        self._watched: Any = [block for block in self._decoder.blocks if hasattr(block, "watch")][-1]
        """The layer whose attention counts as that of the model: of several, the last."""

    def translate(self, sentences: Sequence[Sequence[int]], scoring: Scoring = Scoring()) -> List[List[int]]:  # noqa: B008
        """Token ids of the source to those of the target, without marks; an empty sentence stays empty. Raises
        EngineError: a token is not in the vocabulary."""
        vocabulary = self._model.vocab_size
        for tokens in sentences:
            if any(not 0 <= token < vocabulary for token in tokens):
                raise EngineError(
                    f"token ids {min(tokens)} to {max(tokens)} are not all in the vocabulary of {vocabulary}"
                )
        found: List[List[int]] = [[] for _ in sentences]
        for numbers in together(sentences):
            for number, tokens in zip(numbers, self._together([sentences[number] for number in numbers], scoring)):
                found[number] = tokens
        return found

    @torch.no_grad()
    def _together(self, sentences: Sequence[Sequence[int]], scoring: Scoring) -> List[List[int]]:
        longest = max(map(len, sentences)) + 1
        text = torch.full((len(sentences), longest), PAD)
        for row, tokens in enumerate(sentences):
            text[row, : len(tokens) + 1] = torch.tensor([*tokens, END])
        text = text.to(self._device)
        mask = (torch.arange(longest) <= torch.tensor([[len(one)] for one in sentences])).long().to(self._device)
        encoded = self._encoder({"text_enc": text, "enc_mask": mask, "number": torch.zeros_like(text[:, 0])})

        def step(prefixes: Tensor, rows: Tensor, parents: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
            """Computes the last token alone: the layers keep what they need of those before it."""
            self._embedding.begins_at = prefixes.shape[1] - 1
            for layer in self._keeping:
                for name, kept in layer.kept.items():
                    layer.kept[name] = kept[parents]
            inputs = {"text_dec": prefixes[:, -1:], "enc_mask": mask[rows], "number": torch.zeros_like(rows)}
            attention: List[Tensor] = []
            self._watched.watch = attention.append if scoring.coverage else None
            left = self._decoder({**encoded, **inputs})
            logits = self._head(left)["logits"][:, 0, : self._model.vocab_size]
            return F.log_softmax(logits.float(), -1), attention[-1][:, -1] if attention else None

        # Longer than the training's only for a source that is.
        limits = [max(self._model.decoder_tokens, 2 * (len(one) + 1)) for one in sentences]
        for layer in self._keeping:
            layer.kept = {}
        try:
            return [list(one.tokens) for one in search(step, mask, limits, scoring)]
        finally:
            for layer in self._keeping:
                layer.kept = None
