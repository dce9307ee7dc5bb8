"""Changes the batch, or its shares, while a run trains: all ranks measure, rank 0 decides, all follow."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Mapping, Optional, Sequence

import torch

from megatron_ext.contract.adaptive.config import Adapted, lr_factor
from megatron_ext.contract.adaptive.controller import Controller, Decision
from megatron_ext.contract.adaptive.noise import Halves, Measurement
from megatron_ext.contract.adaptive.shares import Times, Way, known_of, nodes_of, ways_of, weights_of
from megatron_ext.contract.goal import SAMPLES
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.iteration import SampleDivision, several
from megatron_ext.contract.worker import start_of_run
from megatron_ext.engine.batches import ReplicaBatches
from megatron_ext.engine.goal import record
from megatron_ext.engine.log import keep_lines
from megatron_ext.engine.results import Seconds, StepResult
from megatron_ext.parallel.comm import exchange


class FixedBatch:
    """What is asked of a run's batch, where it stays as it is. All ranks call these methods together."""

    @property
    def state(self) -> Optional[Adapted]:
        """What a checkpoint keeps; rank 0 has all of it."""
        return None

    def measures(self, iteration: int) -> bool:
        """Whether the gradients of the halves are to be looked at in this iteration."""
        return False

    def over(self, iteration: int) -> bool:
        """Whether fewer samples are left after this iteration, the last one so far, than a batch has at least."""
        return False

    def after(self, iteration: int, result: StepResult) -> None:
        """Decides, if it is time to, about the iterations after this one. Raises PeerLost: another rank is gone."""

    def record(self, iteration: int) -> None:
        """Writes down that the run ends here, for its samples have been trained."""


class Adaptation(FixedBatch):
    """Changes the batch of a run, or its shares, from what its ranks measure."""

    def __init__(
        self, plan: Plan, place: Place, engine: ReplicaBatches, start: int, before: Optional[Adapted], own: bool
    ) -> None:
        """`before` is what the checkpoint of iteration `start` has, which the run goes on from; `own`: it is this
        run's. Of another run's, a batch that adapts goes on, and how replicas divided it does not."""
        assert plan.adapt is not None
        self._plan = plan
        self._config = plan.adapt
        self._place = place
        self._engine = engine
        window = [] if before is None else [Measurement(*values) for values in before.window]
        self._controller = Controller(
            self._config,
            plan.micro_batch_size,
            plan.global_batch_size,
            weights_of(plan),
            window,
            plan.streams or (),
            known_of(plan),
        )
        if before is not None and (own or self._config.measures):
            engine.divide(start, self._fitted(before, own))
        if place.rank == 0:
            keep_lines(plan.files.decisions, start)
        self._fit_to_end(start)

    @property
    def state(self) -> Adapted:
        window = [list(measured) for measured in self._controller.window]
        shares, sizes, streams = self._engine.division
        size = self._plan.micro_batch_size
        return Adapted(
            size,
            list(shares),
            window,
            None if {*sizes} == {size} else list(sizes),
            list(streams) or None,
            nodes_of(self._plan),
        )

    def measures(self, iteration: int) -> bool:
        return self._config.measures and self._config.due(iteration)

    def over(self, iteration: int) -> bool:
        return self._left(iteration) < self._controller.least_samples

    def after(self, iteration: int, result: StepResult) -> None:
        if self._config.due(iteration):
            self._follow(iteration, self._decided(iteration, result))
        self._fit_to_end(iteration)

    def record(self, iteration: int) -> None:
        record(self._plan, iteration, SAMPLES, str(self._plan.train.samples), self._engine.consumed(iteration))

    def _fitted(self, before: Adapted, own: bool) -> SampleDivision:
        """How an earlier start divided its batch or, on other nodes, in another layout or with other micro-batches, the
        same batch. Another run's batch is kept within the bounds of this one's."""
        plan = self._plan
        sizes = before.sizes or [before.micro_batch_size] * len(before.shares)
        division = SampleDivision(tuple(before.shares), tuple(sizes), tuple(before.streams or ()))
        batches = self._controller.batches
        if not own and batches is not None:
            size = plan.micro_batch_size
            return self._controller.divided(batches.clamped(round(division.samples / size)) * size)
        may_have = ways_of(self._config, plan.micro_batch_size, plan.streams or [1] * plan.data)
        ways = list(map(Way, division.sizes, division.copies))
        same = before.nodes == nodes_of(plan) and len(may_have) == len(ways)
        if same and all(way in of_replica for way, of_replica in zip(ways, may_have)):
            return division
        return self._controller.divided(division.samples)

    def _in_micro_batches(
        self, shares: Sequence[int], sizes: Sequence[int] = (), streams: Sequence[int] = ()
    ) -> SampleDivision:
        """Returns the division with these shares, in micro-batches and streams of the plan where none are given."""
        size = self._plan.micro_batch_size
        return SampleDivision(
            tuple(shares), tuple(sizes) or (size,) * len(shares), several(streams or self._plan.streams or ())
        )

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
        found = exchange(own, self._plan.world_size, device, "sending measurements")
        decision: Optional[Decision] = None
        if self._place.rank == 0:
            halves = found[-1]["halves"]  # of the last stage
            times = self._times(found)
            measured = None if halves is None else Halves(*halves)
            division = self._engine.division
            decision = self._controller.decide(division.shares, measured, times, division.sizes, division.copies)
            self._note(iteration, decision, times)
        told = exchange(decision, self._plan.world_size, device, "sending decisions")[0]
        shares, reason, similarity, noise_scale, sizes, streams = told
        return Decision(tuple(shares), reason, similarity, noise_scale, tuple(sizes), tuple(streams))

    def _times(self, found: Sequence[Mapping[str, Any]]) -> Times:
        """Returns times by replica, from what all ranks measured: its slowest stage sets the pace of a pipeline, and
        what its ranks wait beside that is the time in which it fills and empties."""
        shares = self._engine.division.shares
        of_replicas = [[Seconds(*one["seconds"]) for one in found if one["dp"] == dp] for dp in range(len(shares))]
        work = [max(seconds.work for seconds in ranks) for ranks in of_replicas]
        passes = [max(seconds.passes for seconds in ranks) for ranks in of_replicas]
        return Times(
            [seconds / count for seconds, count in zip(work, shares)],
            max(seconds.whole for ranks in of_replicas for seconds in ranks),
            [whole - own for whole, own in zip(passes, work)] if self._plan.pipeline > 1 else (),
        )

    def _follow(self, iteration: int, decision: Decision) -> None:
        engine, before = self._engine, self._engine.division
        division = self._in_micro_batches(decision.shares, decision.sizes, decision.streams)
        if division == before:
            return
        engine.divide(iteration, division)
        if self._place.rank == self._plan.world_size - 1:  # whose lines are the log
            shares, sizes, streams = (
                " -> ".join("-".join(map(str, one)) for one in both)
                for both in zip((*before[:2], before.copies), (*division[:2], division.copies))
            )
            factor = lr_factor(self._config, division.samples, self._plan.global_batch_size)
            print(
                f" after iteration {iteration}: global batch size {before.samples} -> {division.samples}, "
                f"shares {shares}, "
                + (f"micro-batches of {sizes}, " if division.sizes != before.sizes else "")
                + (f"streams {streams}, " if division.streams != before.streams else "")
                + f"learning rate times {factor:.4g} ({self._config.lr_scaling}); {decision.reason}",
                flush=True,
            )

    def _note(self, iteration: int, decision: Decision, times: Optional[Times]) -> None:
        """A line of decisions.jsonl (docs/formats.md), by rank 0."""
        if self._place.rank != 0:
            return
        before = self._engine.division
        after = self._in_micro_batches(decision.shares, decision.sizes, decision.streams)
        line = {
            "iteration": iteration,
            "unix": time.time(),
            "start": start_of_run(),
            "consumed_samples": self._engine.consumed(iteration),
            "before": before.samples,
            "global_batch_size": after.samples,
            "shares_before": list(before.shares),
            "shares": list(after.shares),
            "micro_batch_sizes_before": list(before.sizes),
            "micro_batch_sizes": list(after.sizes),
            "streams_before": list(before.copies),
            "streams": list(after.copies),
            "learning_rate_factor": lr_factor(self._config, after.samples, self._plan.global_batch_size),
            "similarity": decision.similarity,
            "noise_scale": decision.noise_scale,
            "micro_batch_ms": None if times is None else [seconds * 1e3 for seconds in times.micro_batch_s],
            "iteration_ms": None if times is None else times.iteration_s * 1e3,
            "reason": decision.reason,
        }
        with self._plan.files.decisions.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def adaptation_of(
    plan: Plan, place: Place, engine: ReplicaBatches, start: int, before: Optional[Adapted] = None, own: bool = True
) -> FixedBatch:
    """Returns what a plan asks for; the arguments are those of `Adaptation`."""
    return FixedBatch() if plan.adapt is None else Adaptation(plan, place, engine, start, before, own)
