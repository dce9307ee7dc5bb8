"""The binary format of events/rank-*.bin: what ranks record and reports read (docs/formats.md)."""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Tuple

MAGIC = b"TDPPEVT1"
VERSION = 1
FIELDS = (
    ("name", "<u2"),
    ("chunk", "<u2"),
    ("iteration", "<u4"),
    ("micro_batch", "<i4"),
    ("peer", "<i4"),
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
)
"""The fields of a record, with their types as numpy writes them."""
RECORD = struct.Struct("<" + "".join({"<u2": "H", "<u4": "I", "<i4": "i", "<i8": "q"}[kind] for _, kind in FIELDS))
CLOCK = "clock"
"""Name of records that compare clocks: the rank's own time is their start, that of rank 0 their end."""
CORE_WAIT, CORE_WAIT_IN_PASSES = "core-wait", "core-wait-in-passes"
"""Names of records of how long a rank waited for a CPU core in an iteration, and in its passes. They end after it."""
ACTIVATIONS = "activations"
"""To the stage after."""
GRADIENTS = "gradients"
"""Those of activations, to the stage before."""
ALL_REDUCE = "all_reduce"
"""Gradients of weights, summed over replicas and over ranks that share a parameter."""
WEIGHTS = "weights"
"""Weights that replicas hand out: of a sharded optimizer, or averaged ones within an island."""
TENSOR = "tensor"
"""Within tensor groups, in the passes."""
ISLANDS = "islands"
"""Weights that islands send each other to average them."""
TRAFFIC = (ACTIVATIONS, GRADIENTS, ALL_REDUCE, WEIGHTS, TENSOR, ISLANDS)
"""What ranks send each other while they train, by what it is for."""
NAMES = (
    CLOCK,
    "forward-compute",
    "backward-compute",
    "backward-input-compute",
    "backward-weight-compute",
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "grads-all-reduce",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer",
    "optimizer-clip-main-grad",
    "batch-generator",
    "loss-compute",
    "tensor-all-reduce",
    "tensor-all-gather",
    "tensor-reduce-scatter",
    "overlapped-grads-all-reduce",
    "grad-norm-all-reduce",
    "params-all-gather",
    "islands-all-reduce",
    CORE_WAIT,
    CORE_WAIT_IN_PASSES,
)
"""Names of the events that this engine records. A file lists its own in its header."""
_LENGTH = struct.Struct("<I")


def head(values: Dict[str, Any]) -> bytes:
    """A file up to its first record; `values` are those of its header beside the version."""
    header = json.dumps({"version": VERSION, **values}).encode()
    return MAGIC + _LENGTH.pack(len(header)) + header


def header_of(content: bytes) -> Tuple[bytes, int]:
    """The header's JSON in a file that begins with MAGIC, and where the first record begins.

    Raises:
        struct.error: the file ends before.
    """
    (length,) = _LENGTH.unpack_from(content, len(MAGIC))
    start = len(MAGIC) + _LENGTH.size
    return content[start : start + length], start + length
