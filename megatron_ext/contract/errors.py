"""Errors that a rank reports in one message, and the file that says why it ended. It imports nothing of the project."""

from __future__ import annotations

import errno
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Optional


class EngineError(Exception):
    """A problem that the user can understand and mend: printed without a traceback."""


class DataError(EngineError):
    """Indexed data or index maps that cannot be used."""


class PeerLost(EngineError):
    """Another rank went away or did not answer in time: a symptom, the cause is with that rank."""


NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""How torch, NCCL and the C++ library say it, in lower case."""
_NO_THREAD = ("Resource temporarily unavailable", "can't start new thread")
"""How the C++ library and Python say, with no other word, that the system gave them no thread."""
_THREAD_BYTES = 64 * 2**20
"""Bytes of address space, which a thread's stack and its heap take."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for a GPU's memory only since 2.1, and none for the host's or for what NCCL cannot get."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    room = address_space_left()
    return any(words in str(error).lower() for words in NO_MEMORY) or (
        _is_without_thread(error) and room is not None and room < _THREAD_BYTES
    )


def shortage(error: BaseException) -> Optional[str]:
    """What this process ran out of or a GPU refused, and the way out; None if the error says nothing of the kind."""
    if is_out_of_memory(error):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        allowed = "" if limit == resource.RLIM_INFINITY else f" (ulimit -v allows {limit // 2**10} KiB)"
        return (
            f"out of memory{allowed}: {reason_of(error)}. A smaller parallel.micro_batch_size, "
            "parallel.recompute=full, fewer layers on this stage or parallel.sharded_optimizer=true takes less"
        )
    if _is_without_thread(error):
        return (
            f"no more threads: {reason_of(error)}. The limit of processes (ulimit -u), or that of the control group "
            "(pids.max), allows no more; every rank needs some dozens"
        )
    way_out = next((text for words, text in _REFUSALS.items() if words in str(error)), None)
    return None if way_out is None else f"{reason_of(error)}: {way_out}"


_NOT_SHARED = (
    "the GPU takes no further process: its compute mode is prohibited, or exclusive while another process is on it "
    "(nvidia-smi -q -d COMPUTE); end that process, or let every process use the GPU with nvidia-smi -c 0, as root"
)
_REFUSALS = {
    "busy or unavailable": _NOT_SHARED,
    "exclusive-thread device already in use": _NOT_SHARED,
    "uncorrectable ECC error": (
        "the GPU's memory is damaged; exclude the node, and have the GPU reset (nvidia-smi --gpu-reset) or replaced"
    ),
    "driver version is insufficient": (
        "the node's driver is older than this torch's CUDA; use a torch of an older CUDA, or have the driver updated"
    ),
    "unsupported display driver / cuda driver combination": (
        "the driver was updated while its old kernel module is loaded, or a container brings another libcuda; restart "
        "the node, or leave CUDA's compat folder out of LD_LIBRARY_PATH"
    ),
    "system not yet initialized": (
        "GPUs behind NVSwitch need NVIDIA's fabric manager; have the service nvidia-fabricmanager started"
    ),
}
"""What to do, by words of CUDA's message (cudaGetErrorString)."""


def _is_without_thread(error: BaseException) -> bool:
    return str(error).strip() in _NO_THREAD


def address_space_left() -> Optional[int]:
    """Bytes until `ulimit -v` ends it; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return limit - pages * resource.getpagesize()


_SOURCE = re.compile(r"^\[[^\]\s]+:\d+\]\s*")
"""The line of torch's own sources with which gloo begins its messages."""
_ADVICE = re.compile(r"\.?\s*(This is typically caused by|Check the logs of the remote).*")
"""With which it ends them: advice for another reader, with pictures."""


def reason_of(error: BaseException) -> str:
    """One line of torch's message: the first, or what NCCL says under its `Last error:`, which tells more. Of gloo's
    messages what happened alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    last = "Last error:"
    if last in lines[:-1]:
        return f"NCCL: {lines[lines.index(last) + 1]}"
    return _ADVICE.sub("", _SOURCE.sub("", lines[0])) or lines[0]


@dataclass(frozen=True)
class RankPlace:
    """A rank with its stage, its numbers among the replicas and in its tensor group, and the name of its node."""

    rank: int
    stage: int
    dp: int
    tp: int
    node: str

    @property
    def place(self) -> str:
        """The rank as messages name it."""
        return f"rank {self.rank} (stage {self.stage}, dp {self.dp}, tp {self.tp}, node {self.node})"


KILLED = "Killed"
"""The `type` of a failure of a rank that a signal ended."""


@dataclass(frozen=True)
class RankFailure(RankPlace):
    """The failure of a rank."""

    start: str
    """Which start of the run it was; empty for a worker that was started by hand."""
    unix: float
    type: str
    """Name of the exception, or `KILLED`."""
    message: str
    traceback: str = ""
    symptom: bool = False
    """Whether the rank only lost another one."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that cannot be."""
        for key in ("rank", "stage", "dp", "tp"):
            if getattr(self, key) < 0:
                raise ValueError("{}={} must be 0 or more".format(key, getattr(self, key)))
        if not 0 <= self.unix < 1e11:
            raise ValueError(f"unix={self.unix} must be seconds since 1970")
