"""The search's innermost loops, compiled; None where there was no C compiler when tdpp was installed."""

try:
    from fasop.simulation import compiled as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]
