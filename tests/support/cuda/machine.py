"""A machine with GPUs that compute nothing: processes under the stand-in, and what their logs tell.

torch, its dispatcher, autograd, caching allocator, streams and process groups are the real ones of its CUDA build. A
kernel is only counted. What the host writes, and what messages bring, is true; all else in a GPU's memory is what was
there before, mostly zeros.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple

from tests.support import ROOT
from tests.support.cuda.build import build
from tests.support.cuda.forked import Forks

PYTHON = Path(os.environ.get("CUDA_VENV", "none")).absolute() / "bin" / "python"
"""With the CUDA build of torch, which `make test-cuda` installs."""
WORKER = Path(__file__).with_name("worker.py")
DEFAULT = "(nil)"
"""The default stream."""


class Message(NamedTuple):
    """A call of NCCL's."""

    call: str
    bytes: int
    """Of this rank's part: of an all-gather or reduce-scatter what one rank gives or gets."""
    ranks: int
    rank: int
    peer: int
    """Of a broadcast the rank that gives, of other collectives -1."""
    stream: str


@dataclass
class Counts:
    """What a process did in a span of its log."""

    kernels: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    """On which streams its kernels ran."""
    waits: Counter[str] = field(default_factory=Counter)
    """Of the host for a GPU."""
    by_micro_batch: Counter[str] = field(default_factory=Counter)
    """Its kernels by the number of the micro-batch, where the program marks them, and others' under ""."""
    messages: list[Message] = field(default_factory=list)
    copies: Counter[str] = field(default_factory=Counter)
    """By their way, such as `host-gpu`."""
    copied: Counter[str] = field(default_factory=Counter)
    """Bytes of the copies that streams other than the default one made, by their way."""
    pageable: int = 0
    """Copies to a GPU from memory that is not pinned, for which the host waits."""
    stream_waits: list[tuple[str, str]] = field(default_factory=list)
    """A stream that waits for an event, and the stream that the event was last recorded on."""
    priorities: dict[str, int] = field(default_factory=dict)
    """Of streams that were made until the span's end; high ones are below 0."""
    peaks: list[int] = field(default_factory=list)
    """Bytes that torch had given out at most when kernels were loaded, and before and after each iteration, until the
    span's end."""
    traffic: int = 0
    """Bytes that kernels read and wrote, where the log has it (`tests.support.cuda.accesses`)."""
    mallocs: int = 0
    unmade: Counter[str] = field(default_factory=Counter)
    """Calls without a body in the stand-in."""

    def sent(self, call: str) -> int:
        """Bytes of all calls with this name."""
        return sum(message.bytes for message in self.messages if message.call == call)


@dataclass(frozen=True)
class Machine:
    gpus: int
    folder: Path
    """For logs and messages."""

    def run(self, *words: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the CUDA build's Python with these words."""
        messages = self.folder / "messages"
        messages.mkdir(parents=True, exist_ok=True)
        own = {
            "STANDIN_GPUS": str(self.gpus),
            "STANDIN_LOG": str(self.folder / "log"),
            "STANDIN_MESSAGES": str(messages),
        }
        return _forks().run([*map(str, words)], {**_environment(), **own, **(environment or {})})

    def train(self, plan: Path, nodes: int, *job: str) -> None:
        """Starts what the agents of a plan's nodes start; all must end well."""

        def of_node(number: int) -> subprocess.CompletedProcess[str]:
            return self.run(WORKER, plan, str(number), *job, environment={"STANDIN_LOG": f"{self.folder}/log.{number}"})

        with ThreadPoolExecutor() as together:
            for ended in together.map(of_node, range(nodes)):
                assert ended.returncode == 0, ended.stdout + ended.stderr

    def logs(self) -> list[Path]:
        """Of processes that used a GPU."""
        return [path for path in sorted(self.folder.glob("log.*")) if path.stat().st_size]


def _environment() -> dict[str, str]:
    library = build(PYTHON, ROOT / "build" / "cuda-standin")
    own = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "PYTHONPATH": str(ROOT),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TRITON_CACHE_DIR": f"{_COMPILED.name}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{_COMPILED.name}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts processes that import torch
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **own}


_COMPILED = TemporaryDirectory(prefix="compiled-")
"""What Triton compiles for one program is there for the next."""
_started: list[Forks] = []
_starting = Lock()


def _forks() -> Forks:
    """One for this process."""
    with _starting:
        if not _started:
            _started.append(Forks(PYTHON, _environment()))
    return _started[0]


def counts(log: Path, iteration: int | None = None) -> Counts:
    """Of one iteration, or of the whole process."""
    found = Counts()
    recorded: dict[str, str] = {}
    inside = iteration is None
    micro_batch = ""
    with log.open(errors="replace") as lines:
        for line in lines:
            kind, _, rest = line.rstrip("\n").partition(" ")
            if kind == "#":
                if rest == f"begin {iteration}":
                    inside, micro_batch = True, ""
                elif rest == f"end {iteration}":
                    break
                elif rest.startswith(("r ", "w ")):
                    found.traffic += int(rest.split()[3]) if inside else 0
                elif rest.startswith("peak "):
                    found.peaks.append(int(rest.partition(" ")[2]))
                elif rest.startswith(("micro ", "rest")):
                    micro_batch = rest.partition(" ")[2]
            elif kind == "T":
                _, stream, _, priority = rest.split()
                found.priorities[stream] = int(priority)
            elif kind == "R":
                _, stream, event = rest.split()
                recorded[event] = stream
            elif inside:
                found.by_micro_batch[micro_batch] += kind == "K"
                _count(found, kind, rest, recorded)
    return found


def _count(found: Counts, kind: str, rest: str, recorded: Mapping[str, str]) -> None:
    if kind == "K":
        _, stream, name = rest.split(" ", 2)
        found.kernels[name] += 1
        found.streams[stream] += 1
    elif kind == "S":
        found.waits[rest.split()[1]] += 1
    elif kind == "C":
        _, stream, size, way, *_ = rest.split()
        found.copies[way] += 1
        found.copied[way] += int(size) if stream != DEFAULT else 0
        found.pageable += rest.endswith("host-gpu pageable")
    elif kind == "M":
        found.mallocs += 1
    elif kind == "W":
        _, stream, event = rest.split()
        found.stream_waits.append((stream, recorded.get(event, "")))
    elif kind == "?":
        found.unmade[rest] += 1
    elif kind == "N":
        words = rest.split()
        found.messages.append(Message(words[2], int(words[4]), int(words[6]), int(words[8]), int(words[10]), words[1]))
