"""What a node's agent and the worker that it starts agree on: environment variables and exit codes."""

from __future__ import annotations

TOKEN = "TDPP_RUN_TOKEN"
"""By which a run's processes are found."""
START = "TDPP_START"
"""Which start of the run this is. What an earlier one left is not for this one."""
NODE_RANK = "NODE_RANK"
PROFILE = "TDPP_PROFILE"
"""Of `tdpp profile`: JSON with `padded_vocab_sizes` (by tensor size, as text), `micro_batch_sizes` and `seconds`."""

SAVED = 75
"""Exit code of a rank, and of its worker, that ended before the last iteration because it was asked to (SIGUSR2), and
has saved. EX_TEMPFAIL of sysexits.h: try again."""
