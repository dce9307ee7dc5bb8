"""Changes the batch, or its shares, while a run trains: all ranks measure, rank 0 decides, all follow."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Mapping, Optional, Sequence, Tuple

import torch

from megatron_ext.contract.adaptive.config import Adapted, lr_factor
from megatron_ext.contract.adaptive.controller import Controller, Decision
from megatron_ext.contract.adaptive.noise import Halves, Measurement
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.goal import SAMPLES
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.engine.course import record
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.log import keep_lines
from megatron_ext.engine.results import StepResult
from megatron_ext.parallel.comm import exchange


class Adaptation:
    """Of one rank; all ranks call its methods together."""

    def __init__(self, plan: Plan, place: Place, engine: Engine, start: int, before: Optional[Adapted]) -> None:
        """`before` is what the checkpoint of iteration `start` has, which the run goes on from."""
        assert plan.adapt is not None
        self._plan = plan
        self._config = plan.adapt
        self._place = place
        self._engine = engine
        window = [] if before is None else [Measurement(*values) for values in before.window]
        self._controller = Controller(
            self._config, plan.micro_batch_size, plan.global_batch_size, list(plan.micro_batches), window
        )
        if before is not None:
            engine.divide(start, self._fitted(before))
        if place.rank == 0:
            keep_lines(plan.files.decisions, start)
        self._fit_to_end(start)

    @property
    def state(self) -> Adapted:
        """For a checkpoint; rank 0 has all of it."""
        window = [list(measured) for measured in self._controller.window]
        return Adapted(self._plan.micro_batch_size, list(self._engine.shares), window)

    def measures(self, iteration: int) -> bool:
        """Whether the gradients of the halves are to be looked at in this iteration."""
        return self._config.measures and self._config.due(iteration)

    def over(self, iteration: int) -> bool:
        """Whether fewer samples are left after this iteration, the last one so far, than a batch has at least."""
        return self._left(iteration) < self._controller.least_samples

    def after(self, iteration: int, result: StepResult) -> None:
        """Decides, if it is time to, about the iterations after this one.

        Raises:
            PeerLost: another rank is gone.
        """
        if self._config.due(iteration):
            self._follow(iteration, self._decided(iteration, result))
        self._fit_to_end(iteration)

    def record(self, iteration: int) -> None:
        """Writes down that the run ends here, for its samples have been trained."""
        record(self._plan, iteration, SAMPLES, str(self._plan.train.samples), self._engine.consumed(iteration))

    def _fitted(self, before: Adapted) -> Tuple[int, ...]:
        """The shares that an earlier start had or, in another layout, others of the same batch."""
        plan = self._plan
        if before.micro_batch_size == plan.micro_batch_size and len(before.shares) == plan.data:
            return tuple(before.shares)
        return self._controller.fitted(sum(before.shares) * before.micro_batch_size)

    def _left(self, iteration: int) -> float:
        """Samples; without end where the length of the training is in iterations."""
        samples = self._plan.train.samples
        if samples is None or not self._config.measures:
            return math.inf
        return samples - self._engine.consumed(iteration)

    def _fit_to_end(self, iteration: int) -> None:
        """The last batch has no more samples than are left."""
        left = self._left(iteration)
        if self._controller.least_samples <= left < self._engine.global_batch_size:
            size = self._plan.micro_batch_size
            decision = Decision(self._controller.fitted(int(left) // size * size), f"{left:.0f} samples are left")
            self._note(iteration, decision, None)
            self._follow(iteration, decision)

    def _decided(self, iteration: int, result: StepResult) -> Decision:
        """What rank 0 decides, on all ranks."""
        watch, device = self._engine.stopwatch, torch.device(self._plan.device)
        assert watch is not None
        own = {"halves": result.halves, "seconds": watch.take(), "dp": self._place.dp}
        found = exchange(own, self._plan.world_size, device, "telling what was measured")
        decision: Optional[Decision] = None
        if self._place.rank == 0:
            halves = found[-1]["halves"]  # of the last stage
            times = self._times(found)
            decision = self._controller.decide(self._engine.shares, None if halves is None else Halves(*halves), times)
            self._note(iteration, decision, times)
        shares, *why = exchange(decision, self._plan.world_size, device, "telling what was decided")[0]
        return Decision(tuple(shares), *why)

    def _times(self, found: Sequence[Mapping[str, Any]]) -> Optional[Times]:
        """By replica, from what all ranks measured; None where stages wait for each other."""
        if self._plan.pipeline > 1:
            return None
        shares = self._engine.shares
        work = [max(one["seconds"][0] for one in found if one["dp"] == dp) for dp in range(len(shares))]
        return Times([w / n for w, n in zip(work, shares)], max(one["seconds"][1] for one in found))

    def _follow(self, iteration: int, decision: Decision) -> None:
        engine = self._engine
        if decision.shares == engine.shares:
            return
        before, shares = engine.global_batch_size, engine.shares
        engine.divide(iteration, decision.shares)
        if self._place.rank == self._plan.world_size - 1:  # whose lines are the log
            print(
                f" after iteration {iteration}: global batch size {before} -> {engine.global_batch_size}, shares "
                f"{_dashed(shares)} -> {_dashed(decision.shares)}, learning rate times {self._factor():.4g} "
                f"({self._config.lr_scaling}); {decision.reason}",
                flush=True,
            )

    def _factor(self) -> float:
        """Of the learning rate, with the batch that there is now."""
        return lr_factor(self._config, self._engine.global_batch_size, self._plan.global_batch_size)

    def _note(self, iteration: int, decision: Decision, times: Optional[Times]) -> None:
        """A line of decisions.jsonl (docs/formats.md), by rank 0."""
        if self._place.rank != 0:
            return
        size = sum(decision.shares) * self._plan.micro_batch_size
        line = {
            "iteration": iteration,
            "unix": time.time(),
            "consumed_samples": self._engine.consumed(iteration),
            "before": self._engine.global_batch_size,
            "global_batch_size": size,
            "shares_before": list(self._engine.shares),
            "shares": list(decision.shares),
            "learning_rate_factor": lr_factor(self._config, size, self._plan.global_batch_size),
            "similarity": decision.similarity,
            "noise_scale": decision.noise_scale,
            "micro_batch_ms": None if times is None else [seconds * 1e3 for seconds in times.micro_batch_s],
            "iteration_ms": None if times is None else times.iteration_s * 1e3,
            "reason": decision.reason,
        }
        with self._plan.files.decisions.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _dashed(shares: Sequence[int]) -> str:
    return "-".join(map(str, shares))
