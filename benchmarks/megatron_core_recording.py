"""python -m benchmarks.megatron_core_recording: what recording the timeline of engine=megatron_core costs.

Trains a small model on two CPU ranks, with 1F1B and with interleaved stages. In each rank, the CPU time of its thread
within the timers and the recorder is added up, without that of reading the clock, and compared with the CPU time of the
whole iteration. On a GPU the CPU's time for recording is about the same, and most of the iteration is the GPU's.

  --iterations N   after the first, which is not counted (8)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import sleeping
from benchmarks.accuracy_cases import Case
from megatron_ext.core.engine import CoreEngine
from megatron_ext.core.timeline import Timers
from megatron_ext.timeline import recorder

MODEL = ("engine=megatron_core", "model=tiny", "model.layers=8", "model.hidden=256", "model.sequence_length=128")
TRAIN = ("train=demo", "train.checkpoint=false", "train.log_interval=1", "train.lr_warmup_iterations=1")
SIZES = ("parallel=single", "parallel.pipeline=2", "parallel.micro_batch_size=1", "parallel.global_batch_size=8")
SCHEDULES = {
    "1F1B": ("parallel.partition=4-4",),
    "interleaved": ("parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=2-2-2-2"),
}
RECORDING = ((Timers, "start"), (Timers, "stop"), (Timers, "loss"), (recorder.Recorder, "span"))
SPANS = ((recorder._Span, "__enter__"), (recorder._Span, "__exit__"), (recorder._Pass, "__enter__"))


class Counter:
    """Nanoseconds of this rank's thread within what records, and how many events that were."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._depth = folder, 0
        self.ns = self.events = 0

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if self._depth:
                return call(*given, **named)
            self._depth, begin = 1, time.thread_time_ns()
            try:
                return call(*given, **named)
            finally:
                self._depth = 0
                end = time.thread_time_ns()
                self.ns += 2 * end - begin - time.thread_time_ns()  # without one reading of the clock

        return timed

    def event(self, exits: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.events += 1
            return exits(*given)

        return counted

    def iteration(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            self.ns = self.events = 0
            begin = time.process_time_ns()
            found = step(*given, **named)
            line = {"recording": self.ns, "events": self.events, "all": time.process_time_ns() - begin}
            with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return found

        return timed


def measured(schedule: str, iterations: int) -> list[dict[str, int]]:
    """The iterations of all ranks but each one's first."""
    case = Case(
        name=schedule, overrides=(*MODEL, *TRAIN, *SIZES, *SCHEDULES[schedule], f"train.iterations={iterations + 1}")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counter = Counter(folder)
        own = [(owner, name, getattr(owner, name)) for owner, name in (*RECORDING, *SPANS)]
        step = CoreEngine.step
        recorder._Span.__exit__ = counter.event(recorder._Span.__exit__)  # type: ignore[method-assign]
        for owner, method, _ in own:
            setattr(owner, method, counter.counted(getattr(owner, method)))
        CoreEngine.step = counter.iteration(step)  # type: ignore[method-assign]
        try:
            sleeping.run(folder / "run", case.experiment, None)
        finally:
            CoreEngine.step = step  # type: ignore[method-assign]
            for owner, method, call in own:
                setattr(owner, method, call)
        files = sorted(folder.glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()[1:]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_core_recording")
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args(argv)
    print("schedule     events  us each  ms of recording  ms of the iteration  share")
    for schedule in SCHEDULES:
        every = measured(schedule, given.iterations)
        events, recording, whole = (
            statistics.median(one[key] for one in every) for key in ("events", "recording", "all")
        )
        share = statistics.median(one["recording"] / one["all"] for one in every)
        print(
            f"{schedule:12} {events:6.0f} {recording / events / 1e3:8.1f} {recording / 1e6:16.2f} {whole / 1e6:20.1f} "
            f"{share:6.2%}"
        )
    print(f"medians of CPU time, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
