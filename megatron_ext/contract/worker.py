"""What a node's agent and the worker that it starts have in common: environment variables, exit codes, and that no
process outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

TOKEN = "TDPP_RUN_TOKEN"
"""The variable by which a run's processes are found."""
START = "TDPP_START"
"""Which start of the run this is. What an earlier one left is not for this one."""
NODE_RANK = "NODE_RANK"
PROFILE = "TDPP_PROFILE"
"""The variable of `tdpp profile`: JSON with `padded_vocab_sizes` (by tensor size, as text), `micro_batch_sizes` and
`seconds`."""

AGENT = "TDPP_AGENT"
"""The variable with the agent's process id, where SIGTERM is the agent's to judge: Slurm sends it to every process of a
job, and before a preemption there may be time to save. Such an agent asks its worker to end with SIGINT."""

SAVED = 75
"""Exit code of a rank, and of its worker, that ended before the last iteration because it was asked to (SIGUSR2), and
has saved. EX_TEMPFAIL of sysexits.h: try again."""

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def left_to_agent() -> bool:
    """Whether an agent lives that judges what a SIGTERM means, so that this process need not end."""
    agent = os.environ.get(AGENT)
    if not agent:
        return False
    try:
        stat = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, or it is not to be seen from inside a container
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def start_of_run() -> str:
    """The start of the run that this process belongs to; empty for a worker that was started by hand."""
    return os.environ.get(START, "")


def die_with_parent(signum: signal.Signals) -> None:
    """Asks the kernel to send this process a signal when its parent ends, however it ends. It is kept across exec."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def keep_freed_memory() -> None:
    """Has this process keep the memory that it frees, for the next pass to use again.

    By default glibc hands what a pass frees back to the kernel, which clears each page again when the next pass first
    touches it: a tenth of the time of small convolutions on a CPU. Blocks of more than 32 MiB, the most that older
    versions take for a threshold (mallopt(3)), are still handed back. Other C libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**25)
