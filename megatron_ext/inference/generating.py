"""What a causal model says next, a token after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.checkpoints.meta import Checkpoint, require_model
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import task_of
from megatron_ext.inference.held_out import whole_model


class Generator:
    """A run's model, whole and in one process, whatever its layout was."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, kind: str, device: str) -> None:
        """With the weights of this kind. Raises EngineError: the run's model does not predict the next token, or the
        checkpoint cannot be used."""
        if not plan.model.traits.running_text:
            raise EngineError(
                f"model.family={plan.model.family} does not predict the next token of a text; 'tdpp translate' is for "
                "models that translate"
            )
        require_model(checkpoint, plan.model.identity())
        self._task = task_of(replace(plan, recompute=Recompute.none))
        self._device = torch.device(device)
        self._stage = whole_model(self._task, checkpoint, self._device, kind)
        self._length, self._vocab_size = plan.model.sequence_length, plan.model.vocab_size

    def tokens(self, prompt: Sequence[int], count: int, temperature: float, seed: int, end: int) -> Iterator[int]:
        """At most `count` tokens that follow those of `prompt`, which is not empty, up to `end`.

        With the temperature 0 each is the likeliest one; else it is drawn, from the seed. The model sees as many of the
        last tokens as its sequences have.
        """
        source = torch.Generator().manual_seed(seed)
        known = [*prompt]
        for _ in range(count):
            logits = self._logits(known[-self._length :])
            if temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=source))
            if token == end:
                return
            known.append(token)
            yield token

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits of the token after these [vocabulary], in fp32 on the CPU. No token looks at the padding
        behind it."""
        padded = torch.zeros(1, self._length + 1, dtype=torch.int64)
        padded[0, : len(tokens)] = torch.tensor(tokens)
        micro = self._task.micro({"tokens": padded, "number": torch.zeros(1, dtype=torch.int64)}).to(self._device)
        self._stage.begin(0)
        with torch.no_grad():
            left = self._stage({name: micro.inputs[name] for name in self._stage.inputs})
        found: Tensor = left["logits"][0, len(tokens) - 1, : self._vocab_size]
        return found.float().cpu()


def data_of(plan: Plan) -> Path:
    """The data whose tokenizer is the model's: the first of a blend."""
    return Path(plan.data_blend[0].prefix if plan.data_blend else plan.data_prefix)
