"""BLEU while a model trains: all ranks get its weights, whatever the layout, and each translates some sentences.

It is the figure that 'tdpp evaluate --split valid --greedy --samples N' gives of the checkpoint with these weights.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.checkpoints.header import part_name
from megatron_ext.checkpoints.tensors import parts
from megatron_ext.contract.goal import BLEU, SPLIT
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.run_files import EMA, WEIGHTS
from megatron_ext.engine.evaluation import Evaluation
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.inference import bleu
from megatron_ext.inference.lines import AT_ONCE
from megatron_ext.inference.scoring import GREEDY
from megatron_ext.inference.sentences import held_out, tokenizer_file
from megatron_ext.inference.text import tokenizer_of
from megatron_ext.inference.translator import Translator, together
from megatron_ext.parallel.comm import Barrier, annotate_errors, exchange


class Translations:
    """All ranks call it together."""

    def __init__(self, plan: Plan, place: Place, engine: AnyEngine, barrier: Barrier) -> None:
        """It takes the first sentences of the split: as many as an evaluation has samples. Raises EngineError: their
        text or the tokenizer cannot be read."""
        self._plan, self._place, self._engine, self._barrier = plan, place, engine, barrier
        found = held_out(plan.data_prefix, SPLIT)
        wanted = plan.train.eval_iterations
        count = len(found.source) if wanted is None else wanted * plan.global_batch_size
        self._target = found.target[:count]
        self._tokenizer = tokenizer_of(tokenizer_file(plan.data_prefix).read_text(encoding="utf-8"))
        texts = [line.strip() for line in found.source[:count]]
        self._source = [self._tokenizer.encode(text) if text else [] for text in texts]
        self._times = 0

    def added(self, evaluation: Evaluation) -> Evaluation:
        """The same with the BLEU of the weights that it was of; the same on all ranks. Raises PeerLost: another rank is
        gone."""
        began = time.monotonic()
        with self._engine.evaluating():
            own = self._counts()
        self._times += 1
        self._barrier.wait(f"translated/{self._times}", "waiting for the translations of all ranks")
        every = exchange(own, self._plan.world_size, self._device, "putting the translations together")
        metrics = {**evaluation.metrics, BLEU: bleu.score(bleu.added(every))}
        return Evaluation(metrics, evaluation.seconds + time.monotonic() - began)

    @property
    def _device(self) -> torch.device:
        return torch.device(self._plan.device)

    def _counts(self) -> List[int]:
        """Counts this rank's share of the sentences, which go together as they do in 'tdpp translate'."""
        plan, rank = self._plan, self._place.rank
        translator = Translator(plan.model.identity(), self._weights(), plan.device)
        groups = [
            [first + number for number in numbers]
            for first in range(0, len(self._source), AT_ONCE)
            for numbers in together(self._source[first : first + AT_ONCE])
        ]
        found = [] if rank else [bleu.counts("", line) for line, ids in zip(self._target, self._source) if not ids]
        for group in groups[rank :: plan.world_size]:
            for number, tokens in zip(group, translator.translate([self._source[one] for one in group], GREEDY)):
                text = " ".join(self._tokenizer.decode(tokens).split("\n"))
                found.append(bleu.counts(text, self._target[number]))
        return bleu.added(found)

    def _weights(self) -> Dict[str, Tensor]:
        """Returns the whole model's in fp32, or their average, where there is one: a stage's first replica gives its
        own."""
        plan, engine = self._plan, self._engine
        kind = WEIGHTS if plan.train.ema is None else EMA
        state = engine.optimizer.state((kind,))
        own: Dict[str, Tensor] = {}
        if self._place.dp == 0:
            names = {part_name(block.name): block.name for block in engine.task.blocks}
            for part, content in parts(engine, state):
                own.update({f"{names[part]}.{name[len(kind) + 1 :]}": one for name, one in content.items()})
        shapes: List[Tuple[str, Any]] = [(name, list(tensor.shape)) for name, tensor in own.items()]
        found: Dict[str, Tensor] = {}
        what = "handing the weights to all ranks"
        for rank, given in enumerate(exchange(shapes, plan.world_size, self._device, what)):
            for name, shape in given:
                tensor = own[name].to(self._device) if name in own else torch.empty(shape, device=self._device)
                with annotate_errors(what):
                    dist.broadcast(tensor, rank)
                found[name] = tensor
        return found
