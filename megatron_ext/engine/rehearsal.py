"""A rehearsal: the ranks, the schedule, the messages, the events and the log of a run, but time passes instead of
computing.

Every rank has a logical clock. What it would compute takes the time that plan.json gives; each message and each
collective carries the sender's logical time, so that the receiver's clock cannot be earlier than it. A message waits
until the link that it leaves by has sent the one before. With the clock `virtual` nothing sleeps: exact at any load.
With `anchored` every rank also waits until its logical time has really come, so that the run lasts as long as the real
one would; sleeping too long once does not add up, for the logical clock goes on from where it should be. Events are
logical times in both.
"""

from __future__ import annotations

import time
from typing import Dict, List, Optional, Sequence

import torch
import torch.distributed as dist

from megatron_ext.contract.adaptive.noise import Noise
from megatron_ext.contract.adaptive.noise import halves as expected_halves
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place, RankTimes
from megatron_ext.contract.schedule.check import actions_of
from megatron_ext.contract.schedule.iteration import SampleDivision
from megatron_ext.contract.schedule.replay import AnyAction
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.data.samples import BEGINNING
from megatron_ext.engine.adaptation import adaptation_of
from megatron_ext.engine.batches import BatchAssignment, ReplicaBatches
from megatron_ext.engine.executor.messages import RECEIVES, actions_by_channel, channels
from megatron_ext.engine.log import TrainingLog
from megatron_ext.engine.optimizer.learning_rate import rate_of
from megatron_ext.engine.results import Progress, StepResult, Stopwatch
from megatron_ext.engine.streams.executor import StreamSteps
from megatron_ext.parallel.comm import Inbox, Outbox, annotate_errors
from megatron_ext.parallel.groups import Groups
from megatron_ext.timeline.progress import iterates
from megatron_ext.timeline.recorder import NOTHING, Recorder

NOTHING_LEARNED = StepResult(loss=None, grad_norm=None, loss_scale=1.0, skipped=False)


def computing_ns(times: RankTimes, kind: Kind, chunk: int) -> Optional[int]:
    """How long an action computes; None for messages.

    The two parts of a split backward pass multiply matrices of the same sizes: each gets half.
    """
    if kind is Kind.FORWARD:
        return times.forward_ns[chunk]
    if kind is Kind.BACKWARD:
        return times.backward_ns[chunk]
    if kind is Kind.BACKWARD_WEIGHT:
        return times.backward_ns[chunk] // 2
    if kind is Kind.BACKWARD_INPUT:
        return times.backward_ns[chunk] - times.backward_ns[chunk] // 2
    return None


class Rehearsal(ReplicaBatches):
    """One rank of a rehearsal; `step` is what `Engine.step` is to a run."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, recorder: Recorder) -> None:
        assert plan.rehearsal is not None
        self._plan = plan
        self._place = place
        self.assignment = BatchAssignment(plan, place, BEGINNING)
        others, in_streams = plan.rehearsal.other_sizes or (), plan.rehearsal.in_streams or ()
        self._times_of = {
            plan.micro_batch_size: plan.rehearsal.ranks[place.rank],
            **{one.size: one.ranks[place.rank] for one in others},
        }
        self._in_streams = {one.size: one for one in in_streams}
        self._times = self._own_times()
        points = plan.rehearsal.noise or ()
        self._noise = Noise([point.samples for point in points], [point.scale for point in points])
        """What the gradient's is taken to be, where the batch follows it."""
        if plan.adapt is not None:
            self.stopwatch = Stopwatch(torch.device("cpu"), lambda: (self.now_ns - self._began_ns) / 1e9)
        self._groups = groups
        self._recorder = recorder
        self._stream = None if plan.stream is None else StreamSteps(plan, place, 0)
        self._actions = [] if plan.stream else actions_of(plan, place.stage, place.dp)
        self._stamp = torch.zeros(1, dtype=torch.int64)
        self._inboxes: Dict[Kind, List[List[Inbox]]] = {}
        self._outboxes: Dict[Kind, List[List[Outbox]]] = {}
        for kind, ways in channels(plan.layout, place, plan.chunks, groups).items():
            if kind in RECEIVES:
                self._inboxes[kind] = [[Inbox(peer, "time", True) for peer in way] for way in ways]
            else:
                self._outboxes[kind] = [[Outbox(peer, "time") for peer in way] for way in ways]
        self._free: Dict[Optional[Kind], int] = {}
        """For each link, when it has sent all that it was given."""
        self.clock: str = plan.rehearsal.clock
        self.now_ns = self._began_ns = _common_start()

    def divide(self, iteration: int, division: SampleDivision) -> None:
        super().divide(iteration, division)
        self._times = self._own_times()

    def progress(self, iteration: int) -> Progress:
        """Returns where the run stands after the last iteration, with the shares that it had."""
        consumed, size = self.consumed(iteration), self.global_batch_size
        return Progress(consumed, size, rate_of(self._plan, iteration, consumed, size))

    def step(self, iteration: int, halves: bool = False) -> StepResult:
        """Lets the time of one iteration pass, with a measurement of its `halves` if asked to."""
        self._recorder.iteration = iteration
        iterates(iteration)
        if self.stopwatch is not None:
            return self._timed_step(self.stopwatch, iteration, halves)
        if self._stream is not None:
            self._stream.begins(iteration)
            self._run_actions(self._stream.of(iteration))
            if iteration == self._stream.until:
                self._flush()
        else:
            self._run_micro_batches(len(self.assignment.taken), self._actions)
            self._update_together()
        return NOTHING_LEARNED

    def _timed_step(self, watch: Stopwatch, iteration: int, halves: bool) -> StepResult:
        """What a run does whose batch adapts. If it is to measure `halves`, it takes the even micro-batches of the
        iteration first, and sums a copy of their gradient, too."""
        watch.begin()
        with watch.working():
            for count in self._counts_of_halves() if halves else [len(self.assignment.taken)]:
                self._run_micro_batches(count, self._scheduled(count) if halves else self._actions)
        if halves:
            self._collective("grads-all-reduce", self._groups.data, self._times.grads_all_reduce_ns)
        self._update_together()
        watch.end()
        if not halves:
            return NOTHING_LEARNED
        scale = self._noise.at(self.consumed(iteration))
        return NOTHING_LEARNED._replace(halves=expected_halves(scale, *self.assignment.samples_of_halves()))

    def _counts_of_halves(self) -> List[int]:
        """How many even and odd micro-batches this rank has, if it has any."""
        odd = int((self.assignment.taken % 2).sum())
        return [count for count in (len(self.assignment.taken) - odd, odd) if count]

    def _own_times(self) -> RankTimes:
        """Returns this rank's times with the division of the iterations to come."""
        size = self.assignment.size
        return self._in_streams[size].ranks[self._place.rank] if self.division.streams else self._times_of[size]

    def _run_micro_batches(self, count: int, actions: Sequence[AnyAction]) -> None:
        """Takes so many micro-batches, for which the actions are, to the end of all messages."""
        if self.division.streams:
            self._run_rounds(count)
        else:
            self._run_actions(actions)
        self._flush()

    def _run_rounds(self, count: int) -> None:
        """Takes micro-batches as a rank's streams do, beside each other; the last round may have fewer. Events
        are those of the first stream, as in a run."""
        known, rank = self._in_streams[self.assignment.size], self._place.rank
        streams = self.division.copies[self._place.dp]
        for kind, m, chunk in (action[:3] for action in self._scheduled(-(-count // streams))):
            alone = computing_ns(self._times, kind, chunk)
            assert alone is not None, "one stage has no messages"
            beside = min(streams, count - m * streams)
            self._compute(kind.value, round(alone * beside / known.rates[rank][beside - 1]), m, chunk)
        self._advance((streams - 1) * known.copy_ns[rank])

    def _run_actions(self, actions: Sequence[AnyAction]) -> None:
        for kind, ways in self._inboxes.items():
            for way, own in zip(ways, actions_by_channel(actions, kind, len(ways))):
                for inbox in way:
                    inbox.expect([self._stamp] * len(own))
        for kind, m, chunk in (action[:3] for action in actions):
            computes = computing_ns(self._times, kind, chunk)
            if computes is not None:
                self._compute(kind.value, computes, m, chunk)
            elif kind in self._inboxes:
                self._receive(kind, m, chunk)
            elif kind is Kind.UPDATE:
                self._collective("grads-all-reduce", self._groups.data, self._times.grads_all_reduce_ns)
                self._compute("optimizer", self._times.optimizer_ns, -1, chunk)
            else:
                self._send(kind, m, chunk)

    def _flush(self) -> None:
        """Waits until all was sent."""
        for outbox in (outbox for ways in self._outboxes.values() for way in ways for outbox in way):
            outbox.flush()

    def _update_together(self) -> None:
        """What ends an iteration of a schedule that flushes."""
        self._collective("grads-all-reduce", self._groups.data, self._times.grads_all_reduce_ns)
        left = self._times.embedding_all_reduce_ns  # of all tied parameters together: a rank's first takes it
        for parts in self._groups.tied:
            for part in parts:
                self._collective("embedding-grads-all-reduce", part.group, left // len(parts))
            left = 0 if parts else left
        start = self.now_ns
        self._collective("grad-norm-all-reduce", self._groups.model, 0)
        self._advance(self._times.optimizer_ns)
        if self._times.params_all_gather_ns:
            self._collective("params-all-gather", self._groups.data, self._times.params_all_gather_ns)
        self._recorder.record("optimizer", start, self.now_ns)

    def seconds(self) -> float:
        """What the log's clock shows: with `anchored` the time that really passed since the common start."""
        return max(time.monotonic(), self.now_ns / 1e9) if self.clock == "anchored" else self.now_ns / 1e9

    def _compute(self, name: str, duration: int, micro_batch: int, chunk: int) -> None:
        start = self.now_ns
        self._advance(duration)
        self._recorder.record(name, start, self.now_ns, micro_batch, chunk=chunk)

    def _receive(self, kind: Kind, micro_batch: int, chunk: int) -> None:
        ways = self._inboxes[kind]
        (inbox,) = ways[micro_batch % len(ways)]
        start = self.now_ns
        with NOTHING if self.stopwatch is None else self.stopwatch.waiting():
            self._advance_to(int(inbox.take().item()))
        self._recorder.record(kind.value, start, self.now_ns, micro_batch, inbox.peer.rank, chunk)

    def _send(self, kind: Kind, micro_batch: int, chunk: int) -> None:
        ways = self._outboxes[kind]
        forward = kind is Kind.SEND_FORWARD
        takes = self._times.send_forward_ns if forward else self._times.send_backward_ns
        link = None if self._times.one_way_out else kind
        for outbox in ways[micro_batch % len(ways)]:
            begin = max(self.now_ns, self._free.get(link, 0))
            self._free[link] = begin + (self._times.busy_forward_ns if forward else self._times.busy_backward_ns)
            outbox.put(torch.tensor([begin + takes]))
            self._recorder.record(kind.value, self.now_ns, self.now_ns, micro_batch, outbox.peer.rank, chunk)

    def _collective(self, name: str, group: Optional[dist.ProcessGroup], duration: int) -> None:
        """A collective: it ends for all ranks of the group when it ends for the last of them. With micro-batches of
        other sizes a rank's passes hide another part of it, so that durations differ."""
        if group is None:
            return
        start = self.now_ns
        latest = torch.tensor([start + duration])
        with annotate_errors(name):
            dist.all_reduce(latest, dist.ReduceOp.MAX, group)
        self._advance_to(int(latest.item()))
        self._recorder.record(name, start, self.now_ns)

    def _advance_to(self, moment: int) -> None:
        self._advance(max(0, moment - self.now_ns))

    def _advance(self, duration: int) -> None:
        self.now_ns += duration
        if self.clock == "anchored":
            time.sleep(max(0, self.now_ns - time.monotonic_ns()) / 1e9)


def _common_start() -> int:
    """A moment shortly after the last rank has come here, the same on all: they share this machine's clock."""
    start = torch.tensor([time.monotonic_ns() + 50_000_000])
    with annotate_errors("agreeing on a start"):
        dist.all_reduce(start, dist.ReduceOp.MAX)
    return int(start.item())


def rehearse(plan: Plan, place: Place, groups: Groups, recorder: Recorder) -> int:
    """The loop of a rehearsal, in place of training; the last iteration."""
    now = time.monotonic_ns()
    recorder.clock(now, now, 0)  # all ranks share this machine's
    rehearsal = Rehearsal(plan, place, groups, recorder)
    log = None
    if place.rank == plan.world_size - 1:
        print(f"REHEARSAL: emulated times, clock {rehearsal.clock}; there is no loss, and no data are read", flush=True)
        log = TrainingLog(plan, plan.files.metrics, clock=rehearsal.seconds)
    adaptation = adaptation_of(plan, place, rehearsal, 0)
    iteration, over = 0, adaptation.over(0)
    while iteration < plan.train.iterations and not over:
        iteration += 1
        result = rehearsal.step(iteration, adaptation.measures(iteration))
        over = adaptation.over(iteration)
        if log is not None:
            log.add(iteration, result, rehearsal.progress(iteration), last=over or iteration == plan.train.iterations)
        adaptation.after(iteration, result)
    if over and place.rank == 0:
        adaptation.record(iteration)
    recorder.close()
    return iteration
