"""A trained translation model as one module, and the sentences that it translates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.checkpoints.meta import Checkpoint, part_name
from megatron_ext.checkpoints.safetensors import read_part
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.model import TRANSLATION, ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.data.pairs import END, PAD
from megatron_ext.inference.beam import search
from megatron_ext.inference.scoring import Scoring
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.families import task_of
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Block, Task

TOGETHER = 32
"""Sentences of like length that are translated at once."""


def require_translation(family: str) -> None:
    """Raises EngineError for a family that does not translate."""
    if family not in TRANSLATION:
        raise EngineError(
            f"the model is of model.family={family}, which does not translate; {' and '.join(TRANSLATION)} do"
        )


def task_of_model(model: Mapping[str, object]) -> Task:
    """The task of a model with these sizes and options (`ModelConfig.identity`), without padding of its vocabulary.

    Raises:
        EngineError: it does not translate.
    """
    require_translation(str(model.get("family", "gpt")))
    sizes = {**model, "padded_vocab_size": model["vocab_size"]}
    return task_of(Plan.of({"model": sizes, "train": {"seed": 0, "precision": "fp32"}, "recompute": "none"}, Path()))


def weights_of(checkpoint: Checkpoint, kind: str = WEIGHTS) -> Dict[str, Tensor]:
    """All weights of this kind in a translation model's checkpoint, by their names in the model; tied ones have their
    owner's.

    Raises:
        EngineError: a part is missing or damaged, or the model does not translate.
    """
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
        """Token ids of the source to those of the target, without marks; an empty sentence stays empty.

        Raises:
            EngineError: a token is not in the vocabulary.
        """
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
