"""python -m benchmarks.engine [--results FILE]: our engine beside torch.distributed.pipelining and Megatron-Core.

All train the same GPT-2, or the same Llama, on the same data over four ranks of this machine's CPU, one thread each,
forked from this process, gloo between them; each contender has four ranks of its own. They take turns in blocks of
iterations, in an order that changes from round to round, so that whatever else the machine does hits all of them alike;
a ratio is of the same statistic over the rounds. CPU time, of all ranks together, depends less on the load than wall
time. Our engine takes two turns in a round, in the same processes: recording, as it normally runs, and not recording.

torch.distributed.pipelining is there twice: in a plain program with ordinary modules and torch's own optimizer, which
is what a user would write, and with our stages and optimizer, which leaves nothing but who runs the schedule.

Before anything is timed the losses of the first iterations must agree, also with those of one process that holds the
whole model: its CPU time is what the work costs without any pipeline. Megatron-Core is left out where it cannot be
imported, and trains no Llama here. benchmarks/README.md tells how to install it, and what was measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # torch.optim needs it at the first step: once here, not in every rank
import torch.distributed as dist

from benchmarks.contenders import Contender, Pipelining, Switch, Tdpp
from benchmarks.megatron_core import MegatronCore
from benchmarks.plain_pipelining import PlainPipelining
from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from megatron_ext.contract.events import RECORD
from megatron_ext.contract.models.keys import LAYER_NORM
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.groups import Groups, Tied
from megatron_ext.tasks.cut import ties
from megatron_ext.timeline.event_files import EventBuffer, EventFile
from megatron_ext.timeline.recorder import begin_events


class Case(NamedTuple):
    """A model and its layout, and how many iterations each contender does in a turn."""

    overrides: str
    block: int = 8


LAYOUT = (
    "parallel.data=1 parallel.pipeline=4 parallel.partition=1-3-3-1 parallel.micro_batch_size=1 "
    "parallel.global_batch_size=8"
)
UNEVEN = f"model.layers=8 model.heads=4 {LAYOUT}"
SMALL, LARGER = "model.hidden=64 model.sequence_length=32", "model.hidden=128 model.sequence_length=128"
LLAMA = f"model=llama-tiny model.layers=8 model.ffn_hidden=344 {LARGER} {LAYOUT}"
CASES = {
    "1-3-3-1 layers, hidden 64, 32 tokens": Case(f"{UNEVEN} {SMALL} model.vocab_size=512"),
    "1-3-3-1 layers, hidden 128, 128 tokens": Case(f"{UNEVEN} {LARGER} model.vocab_size=512"),
    "the same with GPT-2's vocabulary": Case(f"{UNEVEN} {LARGER} model.vocab_size=50257", block=2),
    "the demo: 1-3 layers, hidden 64, 128 tokens, two replicas": Case("experiment=demo"),
    "a Llama: 1-3-3-1 layers, hidden 128, 128 tokens": Case(f"{LLAMA} model.vocab_size=512"),
    "the same Llama with GPT-2's vocabulary": Case(f"{LLAMA} model.vocab_size=50257", block=2),
}
PROOF = 10
"""First iterations, whose losses must agree."""
TOLERANCE = 1e-5
ROUNDS = 12
OURS, UNRECORDED, ALONE = "tdpp", "tdpp, not recording", "tdpp, one process"
OTHERS = PIPELINING, SAME_STAGES, MEGATRON = "pipelining", "pipelining, our stages", "megatron-core"


Summary = dict[str, dict[str, float]]
"""Statistics for each kind of time."""


@dataclass
class Times:
    """Collects milliseconds per iteration of one contender, an entry per round."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """CPU milliseconds of all ranks together."""

    def summary(self) -> Summary:
        return {name: _statistics(values) for name, values in vars(self).items()}


def _statistics(values: Sequence[float]) -> dict[str, float]:
    least, quarter, median = np.quantile(values, [0.0, 0.25, 0.5]).tolist()
    return {"min": least, "quarter": quarter, "median": median}


@dataclass(frozen=True)
class Turn:
    """What a rank is told to do."""

    iterations: int
    recording: bool


@dataclass(frozen=True)
class Done:
    """What a rank tells of its turn. Times are the machine's monotonic clock."""

    start_ns: int
    end_ns: int
    cpu_s: float
    losses: list[float]
    recorded_bytes: int


class Crew:
    """The ranks of one contender; they sleep until told to take a turn."""

    def __init__(self, kind: Callable[..., Contender], plan: Plan) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        gc.freeze()  # as megatron_ext.worker does, for the good of all contenders
        for place in plan.ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(kind, plan, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def take(self, turn: Turn) -> list[Done]:
        """All ranks' turn. A rank that fails has told why on stderr."""
        for pipe in self._pipes:
            pipe.send(turn)
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise SystemExit("a rank failed") from None

    def dismiss(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _rank(kind: Callable[..., Contender], plan: Plan, place: Place, orders: Connection) -> None:
    """One rank of a contender, until it is dismissed."""
    torch.set_num_threads(1)
    store = f"file://{plan.folder}/{kind.__name__}.store"
    timeout = timedelta(seconds=plan.train.comm_timeout_s)
    dist.init_process_group("gloo", store, rank=place.rank, world_size=plan.world_size, timeout=timeout)
    task = task_of(plan)
    tied = [Tied(stages, sharded=True) for _, stages in ties(task, plan.partition, plan.pipeline)]
    groups = Groups.make(plan.layout, plan.chunks, tied, timeout, plan.sharded_optimizer, plan.by_node)
    count = plan.train.iterations * plan.global_batch_size
    samples = task.samples("train", count)
    events = plan.folder / "events" / f"{kind.__name__}-{place.rank}.bin"
    begin_events(events, plan, place)
    buffer = EventBuffer()
    file = EventFile(events, buffer)
    contender = kind(plan, place, groups, samples, Switch(buffer))
    iteration = 0
    while (turn := orders.recv()) is not None:
        contender.recorder.on = turn.recording
        size = events.stat().st_size
        losses = []
        dist.barrier()
        cpu_s, start_ns = _cpu_s(), time.monotonic_ns()
        for _ in range(turn.iterations):
            iteration += 1
            losses.append(contender.step(iteration))
        file.write(last=True)
        end_ns = time.monotonic_ns()
        orders.send(Done(start_ns, end_ns, _cpu_s() - cpu_s, losses, events.stat().st_size - size))
    dist.destroy_process_group()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def race(plan: Plan, alone: Plan, block: int) -> dict[str, Any]:
    """One case: the statistics of every contender, how far losses differ, what recording costs."""
    crews = {OURS: Crew(Tdpp, plan), ALONE: Crew(Tdpp, alone)}
    crews |= {PIPELINING: Crew(PlainPipelining, plan), SAME_STAGES: Crew(Pipelining, plan)}
    if megatron_core() and plan.model.normalization == LAYER_NORM:
        crews[MEGATRON] = Crew(MegatronCore, plan)
    proof = {name: crew.take(Turn(PROOF, recording=False))[-1].losses for name, crew in crews.items()}
    differences = {name: _difference(losses, proof[OURS]) for name, losses in proof.items() if name != OURS}
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"not the same work: losses differ from ours by {differences}, more than {TOLERANCE}")
    turns = [(OURS, crews[OURS]), (UNRECORDED, crews[OURS]), *list(crews.items())[1:]]
    times = {label: Times() for label, _ in turns}
    recorded = 0
    for round_ in range(ROUNDS):
        for label, crew in turns if round_ % 2 == 0 else reversed(turns):
            done = crew.take(Turn(block, recording=label == OURS))
            seconds = (max(rank.end_ns for rank in done) - min(rank.start_ns for rank in done)) / 1e9
            times[label].wall_ms.append(seconds / block * 1e3)
            times[label].cpu_ms.append(sum(rank.cpu_s for rank in done) / block * 1e3)
            recorded += sum(rank.recorded_bytes for rank in done)
    for crew in crews.values():
        crew.dismiss()
    ms = {label: its.summary() for label, its in times.items()}
    return {
        "largest_relative_difference_of_losses": differences,
        "ms": ms,
        "ours_to": {
            label: _ratios(ms[OURS], ms[label]) for label in (PIPELINING, SAME_STAGES, MEGATRON) if label in ms
        },
        "recording": _recording(times[OURS], times[UNRECORDED], recorded // RECORD.size // (ROUNDS * block)),
    }


def _ratios(ours: Summary, theirs: Summary) -> Summary:
    return {kind: {name: ours[kind][name] / value for name, value in its.items()} for kind, its in theirs.items()}


def _difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative one."""
    return float(np.max(np.abs(np.array(losses) / np.array(wanted) - 1.0)))


def _recording(on: Times, off: Times, records: int) -> dict[str, Any]:
    """What recording adds to an iteration, measured in two ways; `records` are of all ranks in an iteration."""
    cost_ns = _record_ns()
    added = np.array(on.cpu_ms) / np.array(off.cpu_ms) - 1.0
    return {
        "records": records,
        "ns_per_record": cost_ns,
        "of_cpu": records * cost_ns / 1e6 / float(np.median(off.cpu_ms)),
        "of_cpu_by_turns_quartiles": np.quantile(added, [0.25, 0.5, 0.75]).tolist(),
    }


def _record_ns(blocks: int = 50, size: int = 500) -> float:
    """What one span costs over none, flushed as often as a run does: the least of several blocks."""
    with tempfile.NamedTemporaryFile() as events:
        buffer = EventBuffer()
        file, recorder = EventFile(Path(events.name), buffer), Switch(buffer)

        def block(on: bool) -> int:
            recorder.on = on
            start = time.perf_counter_ns()
            for number in range(size):
                with recorder.span("forward-compute", number):
                    pass
            file.write(last=True)
            return time.perf_counter_ns() - start

        return (min(block(True) for _ in range(blocks)) - min(block(False) for _ in range(blocks))) / size


def make_case(folder: Path, overrides: Sequence[str]) -> Plan:
    """A run folder with a plan and data of its own."""
    run = RunDir(folder)
    run.events.mkdir(parents=True)
    iterations = PROOF + 2 * ROUNDS * max(case.block for case in CASES.values())
    common = ["model.vocab_multiple=1", f"train.iterations={iterations}", f"data.prefix={folder / 'data'}"]
    experiment = compose([*overrides, *common])
    run.write_json(run.plan, make_plan(experiment, "benchmark/engine").as_json())
    plan = Plan.read(run.plan)
    walks = np.random.default_rng(0).integers(1, 4, (64, 64 * plan.model.sequence_length)).cumsum(axis=1)
    write_indexed(folder / "data", (walks % plan.model.vocab_size).astype(np.uint16), np.dtype(np.uint16))
    return plan


def show(case: str, result: dict[str, Any]) -> None:
    """Prints the table of one case."""
    statistics = f"{'quarter':>9}{'median':>9}"
    print(f"\n{case}\n{'':24}{'wall ms: min':>14}{statistics}{'CPU ms: min':>14}{statistics}")
    for label, times in result["ms"].items():
        print(f"{label:24}" + "".join(f"{value:{width}.1f}" for value, width in _cells(times)))
        if label in result["ours_to"]:
            ratios = _cells(result["ours_to"][label])
            print(f"{'  tdpp to it':24}" + "".join(f"{value:{width}.2f}" for value, width in ratios))
    for name, difference in result["largest_relative_difference_of_losses"].items():
        print(f"losses of {PROOF} iterations against {name}: {difference:.0e} apart")
    recording = result["recording"]
    turns = ", ".join(f"{value:+.1%}" for value in recording["of_cpu_by_turns_quartiles"])
    print(
        f"recording: {recording['records']} records x {recording['ns_per_record']:.0f} ns = {recording['of_cpu']:.2%} "
        f"of the CPU time; by turns on and off, quartiles of {ROUNDS} rounds: {turns}"
    )


def _cells(times: Summary) -> list[tuple[float, int]]:
    return [(value, width) for kind in times.values() for value, width in zip(kind.values(), (14, 9, 9), strict=True)]


def megatron_core() -> bool:
    """Whether Megatron-Core can be imported."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def _circumstances() -> dict[str, Any]:
    names = ["torch", "numpy", *(["megatron-core"] if megatron_core() else [])]
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        "machine": f"{os.cpu_count()} x {model[0].split(':')[1].strip() if model else platform.machine()}",
        "load_average_before": list(os.getloadavg()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="write the figures as JSON, too")
    results = parser.parse_args().results
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not megatron_core():
        print("Megatron-Core cannot be imported and is left out (benchmarks/README.md)", file=sys.stderr)
    found: dict[str, Any] = {**_circumstances(), "rounds": ROUNDS, "cases": {}}
    for name, case in CASES.items():
        overrides = case.overrides.split()
        with tempfile.TemporaryDirectory() as folder:
            plan = make_case(Path(folder) / "ranks", overrides)
            alone = "parallel.data=1 parallel.pipeline=1 parallel.partition=null"
            one = make_case(Path(folder) / "alone", [*overrides, *alone.split()])
            found["cases"][name] = {"iterations_per_turn": case.block, **race(plan, one, case.block)}
        show(name, found["cases"][name])
    found["load_average_after"] = list(os.getloadavg())
    if results:
        results.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
