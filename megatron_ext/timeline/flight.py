"""What torch's flight recorder knows of a message that did not end: which operation, the how manieth, of which ranks.

The recorder notes each message in a ring in memory. NCCL's watchdog, which ends a rank without another word, writes it
to a file before it does.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List

import torch

from megatron_ext.contract.files import read_regular

ENTRIES = "2000"


def record(prefix: Path) -> None:
    """Has the ranks that this process will fork record, and NCCL's watchdog write to `prefix` with the rank's number
    behind it. What the user has set stays."""
    recent = hasattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace")  # it warns of the earlier names
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE" if recent else "TORCH_NCCL_TRACE_BUFFER_SIZE", ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE" if recent else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(prefix))


def of_file(path: Path) -> str:
    """The first message that had not ended by what the watchdog has written, in words; empty where that is not known.

    Nothing runs that the file names.
    """
    with suppress(Exception):  # a file cut short, or of another torch: the rank's end is reported without it
        return _told(_Plain(io.BytesIO(read_regular(path))).load())
    return ""


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts, of which a recording consists."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a recording")


def _told(content: Dict[str, Any]) -> str:
    entries: List[Dict[str, Any]] = content.get("entries", [])
    waits = next((one for one in entries if not one["retired"] and one["state"] != "completed"), None)
    if waits is None:
        return ""
    name, *described = waits["process_group"]
    ranks = content.get("pg_config", {}).get(name, {}).get("ranks", "")
    group = f"ranks {ranks}" if ranks else f"group {' '.join([name, *described])}"
    number = waits["p2p_seq_id" if waits["is_p2p"] else "collective_seq_id"]
    return f"{waits['profiling_name']} number {number} of {group}, {waits['state']}, has not ended"
