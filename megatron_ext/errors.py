"""What a rank tells in one message. This package imports nothing else of the project."""

from __future__ import annotations


class EngineError(Exception):
    """A problem that the user can understand and mend: printed without a traceback."""


class DataError(EngineError):
    """Indexed data or index maps that cannot be used."""


class PeerLost(EngineError):
    """Another rank went away or did not answer in time: a symptom, the cause is with that rank."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for a GPU's memory only since 2.1, and none for the host's or for what NCCL cannot get."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def reason_of(error: BaseException) -> str:
    """One line of torch's message: the first, or what NCCL says under its `Last error:`, which tells more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = "Last error:"
    return f"NCCL: {lines[lines.index(told) + 1]}" if told in lines[:-1] else lines[0]
