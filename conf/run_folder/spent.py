"""How long a run has trained when it logs a line of metrics.jsonl."""

from __future__ import annotations


class Spent:
    """Adds up iterations and evaluations, line by line."""

    def __init__(self, log_interval: int) -> None:
        """A run that goes on from another one's checkpoint begins with a later iteration than the first; its first line
        is of at most `log_interval` iterations."""
        self._log_interval = log_interval
        self._iteration: int | None = None
        self.hours = 0.0

    def add(self, iteration: int, elapsed_ms: float, evaluation_s: float) -> float:
        """Hours up to a line.

        Args:
            elapsed_ms: mean of the iterations since the line before.
            evaluation_s: of the evaluation after them; 0 without one.
        """
        first = (iteration - 1) % self._log_interval + 1
        count = first if self._iteration is None else iteration - self._iteration
        self._iteration = iteration
        self.hours += (count * elapsed_ms / 1e3 + evaluation_s) / 3600
        return self.hours
