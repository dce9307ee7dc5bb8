"""Makes the text log that the modified Megatron-LM of the FASOP authors prints, and knows what it tells.

What is timed, in which order it is called and how it is printed is as in `megatron/schedules.py`, `megatron/timers.py`
and `megatron/training.py` of https://github.com/AvatarHwang/FASOP at commit 93cb38b (`--timing-log-level 2
--timing-log-option all`); the durations are made up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

BEGIN = 1_686_726_492.25
LATENCY = 150e-6
ORDER = (
    "forward-backward",
    "forward-compute",
    "post-process",
    "loss-compute",
    "backward-compute",
    "batch-generator",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-all-reduce",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "optimizer",
)
"""Timers in the order in which they are printed; those that this job never starts are left out."""
STEPS = ORDER[15:21]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training of `pipeline` stages and `data` replicas, whose last rank prints the log."""

    pipeline: int = 2
    data: int = 1
    micro_batches: int = 3
    iterations: int = 4
    before: int = 0
    """The iteration of the checkpoint that it goes on from."""
    interval: int = 2
    """Iterations between two log lines."""
    skipped: frozenset[int] = frozenset()
    """Iterations whose gradients overflowed, so that the optimizer gave up half-way."""
    seed: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data


class Call(NamedTuple):
    """One call of a timer; times in seconds since 1970, as printed. `micro_batch` is -1 where it has none."""

    rank: int
    name: str
    iteration: int
    micro_batch: int
    start: float
    end: float


class _Clock:
    """Times of one run as the ranks pass them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = random.Random(job.seed)
        self.now = [BEGIN] * job.ranks
        self.calls: list[Call] = []

    def spend(self, rank: int, name: str, iteration: int, seconds: float, micro_batch: int = -1) -> None:
        start = self.now[rank]
        self.now[rank] = start + seconds * self.random.lognormvariate(0, 0.05)
        self.calls.append(Call(rank, name, iteration, micro_batch, start, self.now[rank]))
        self.now[rank] += self.random.uniform(3e-6, 2e-5)

    def until(self, rank: int, name: str, iteration: int, end: float, micro_batch: int = -1) -> None:
        start = self.now[rank]
        self.now[rank] = max(start + 2e-5, end) + self.random.uniform(1e-6, 4e-5)
        self.calls.append(Call(rank, name, iteration, micro_batch, start, self.now[rank]))
        self.now[rank] += self.random.uniform(3e-6, 2e-5)

    def forward(self, rank: int, iteration: int, i: int) -> None:
        """A forward pass with the timers inside it."""
        start = self.now[rank]
        self.now[rank] += 1e-5
        self.spend(rank, "batch-generator", iteration, 3e-4, i)
        self.now[rank] += 0.02 * self.random.lognormvariate(0, 0.05)
        last = rank >= self.job.ranks - self.job.data
        self.spend(rank, "post-process", iteration, 6e-3 if last else 2e-5, i)
        self.spend(rank, "loss-compute", iteration, 1e-3 if last else 1e-5, i)
        self.calls.append(Call(rank, "forward-compute", iteration, i, start, self.now[rank]))
        self.now[rank] += 1e-5

    def iterate(self, iteration: int) -> None:
        job = self.job
        began = list(self.now)
        for dp in range(job.data):
            self.replica(dp, iteration)
        for rank in range(job.ranks):
            self.calls.append(Call(rank, "forward-backward", iteration, -1, began[rank], self.now[rank]))
            self.now[rank] += 1e-5
        for name, seconds in zip(ORDER[12:15], (2e-5, 4e-3, 9e-3), strict=True):
            met = max(self.now) + seconds
            for rank in range(job.ranks):
                self.until(rank, name, iteration, self.now[rank] + 1e-5 if seconds < 1e-4 else met)
        steps = STEPS[:2] if iteration in job.skipped else STEPS
        for rank in range(job.ranks):
            start = self.now[rank]
            for name in steps:
                self.spend(rank, name, iteration, 1e-3)
            self.calls.append(Call(rank, "optimizer", iteration, -1, start, self.now[rank]))
            self.now[rank] += 1e-5

    def replica(self, dp: int, iteration: int) -> None:
        """1F1B of one replica: every stage goes on as soon as what it receives has been sent."""
        todo = [one_f_one_b(stage, self.job.pipeline, self.job.micro_batches) for stage in range(self.job.pipeline)]
        sent: dict[Message, float] = {}
        while any(todo):
            for stage, steps in enumerate(todo):
                rank = stage * self.job.data + dp
                while steps:
                    step = steps[0]
                    if step.sends is not None:  # also while the receive of the same call is waited for
                        sent.setdefault(step.sends, self.now[rank])
                    if step.receives is not None and step.receives not in sent:
                        break
                    steps.pop(0)
                    if step.name == "forward-compute":
                        self.forward(rank, iteration, step.micro_batch)
                    elif step.name == "backward-compute":
                        self.spend(rank, step.name, iteration, 0.045, step.micro_batch)
                    else:
                        arrival = self.now[rank] if step.receives is None else sent[step.receives] + LATENCY
                        self.until(rank, step.name, iteration, arrival, step.micro_batch)


class Message(NamedTuple):
    """An activation or its gradient on its way; `to` is a stage."""

    direction: str
    to: int
    micro_batch: int


class Step(NamedTuple):
    """One call of a stage's schedule; of a pair, `micro_batch` is the one that is received."""

    name: str
    micro_batch: int
    sends: Message | None = None
    receives: Message | None = None


def one_f_one_b(stage: int, pipeline: int, micro_batches: int) -> list[Step]:
    """The calls of a stage in one iteration."""
    first, last, warm_up = stage == 0, stage == pipeline - 1, min(pipeline - stage - 1, micro_batches)

    def forward(i: int) -> Message:
        return Message("forward", stage + 1, i)

    def backward(i: int) -> Message:
        return Message("backward", stage - 1, i)

    def activation(i: int) -> Message:
        return Message("forward", stage, i)

    def gradient(i: int) -> Message:
        return Message("backward", stage, i)

    steps = []
    for i in range(warm_up):
        steps += [] if first else [Step("forward-recv", i, receives=activation(i))]
        steps += [Step("forward-compute", i)]
        steps += [] if last else [Step("forward-send", i, sends=forward(i))]
    steady = micro_batches - warm_up
    if steady and not first:
        steps.append(Step("forward-recv", warm_up, receives=activation(warm_up)))
    for i in range(steady):
        steps.append(Step("forward-compute", warm_up + i))
        if not last:
            steps.append(Step("forward-send-backward-recv", i, forward(warm_up + i), gradient(i)))
        steps.append(Step("backward-compute", i))
        if i == steady - 1:
            steps += [] if first else [Step("backward-send", i, sends=backward(i))]
        elif not first:
            following = warm_up + i + 1
            steps.append(Step("backward-send-forward-recv", following, backward(i), activation(following)))
    for i in range(steady, micro_batches):
        steps.append(Step("backward-recv", i, receives=gradient(i)))
        steps.append(Step("backward-compute", i))
        steps += [] if first else [Step("backward-send", i, sends=backward(i))]
    return steps


def calls(job: Job) -> list[Call]:
    """Every call of every timer, by iteration."""
    clock = _Clock(job)
    for iteration in range(job.before + 1, job.before + job.iterations + 1):
        clock.iterate(iteration)
    return clock.calls


def job_info(job: Job, node_rank: int) -> str:
    """What `_01_run_inter.sh` prints on every node."""
    return f"""n{60 + node_rank:03d}
MODEL : gpt2
Profiling
ZERO OFF
NODE_RANK: {node_rank}
MASTER_ADDR: 192.168.120.70
NNODES: {-(-job.ranks // 4)}
WORLD_SIZE: {job.ranks}
GLOBAL_BATCH_SIZE: {job.micro_batches * job.data}
MICRO_BATCH_SIZE: 1
TENSOR_MP_SIZE: 1
DP_SIZE: {job.data}
PIPELINE_MP_SIZE: {job.pipeline}
PARTITION: {"-".join(["6"] * job.pipeline)}
MODEL: gpt2
HIDDEN_SIZE: 1600
NUM_LAYERS: {6 * job.pipeline}
PROFILE: true
PROFILE_ARGS: --timing-log-level 2 --timing-log-option all
Run torch
"""


def log(job: Job, known: list[Call]) -> str:
    """What the last rank prints."""
    return "".join(_blocks(job, known))


def _blocks(job: Job, known: list[Call]) -> Iterator[str]:
    lists: dict[tuple[int, str, int], tuple[list[float], list[float]]] = {}
    for call in sorted(known, key=lambda call: call.start):
        starts, ends = lists.setdefault((block_of(job, call.iteration), call.name, call.rank), ([], []))
        starts.append(call.start)
        ends.append(call.end)
    last = job.before + job.iterations
    for at in range(job.before + 1, last + 1):
        if at % job.interval:
            continue
        skipped = sum(at - job.interval < number <= at for number in job.skipped)
        yield (
            f" iteration {at:8d}/{last:8d} | consumed samples: {at * job.micro_batches * job.data:12d} |"
            f" elapsed time per iteration (ms): {400 + at:.1f} | learning rate: 7.031E-07 |"
            f" global batch size: {job.micro_batches * job.data:5d} | lm loss: {11 - at / 10:.6E} |"
            f" loss scale: 262144.0 | grad norm: 5.335 | number of skipped iterations: {skipped:3d} |"
            f" number of nan iterations: {0:3d} |\ntimes across ranks (ms):\n"
        )
        for name in ORDER:
            ranks = [rank for rank in range(job.ranks) if (at, name, rank) in lists]
            if ranks:
                yield f"  {name}:\n"
            for rank in ranks:
                starts, ends = lists[at, name, rank]
                spent = sum(end - start for start, end in zip(starts, ends, strict=True)) * 1000 / job.interval
                yield (
                    f"     rank {rank:2d}: {spent:.2f}\n"
                    f" {name} start time lst:  {' '.join(map(str, starts))}\n"
                    f" {name} end time lst:  {' '.join(map(str, ends))}\n"
                )


def block_of(job: Job, iteration: int) -> int:
    """The iteration whose log line comes before the block with this one."""
    return -(-iteration // job.interval) * job.interval


def memory_line(rank: int, iteration: int) -> str:
    """What the first replica's ranks print after the first log line; it lands inside the last rank's block."""
    return (
        f"[Rank {rank}] (after {iteration} iterations) memory (MB) | allocated: {1570.77 + rank} | "
        f"max allocated: {3869.25 + rank} | reserved: 4020.0 | max reserved: {4020.0 + rank}\n"
    )
