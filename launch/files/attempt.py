"""Which start of a run something belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Start:
    """Later ones are greater. As text, in files and in the environment: `<submission>.<restarts>`."""

    submission: int
    """How often the run had been submitted before."""
    restarts: int
    """How often Slurm has started the job again since."""

    def __str__(self) -> str:
        return f"{self.submission}.{self.restarts}"

    @classmethod
    def parse(cls, text: str) -> Start:
        submission, restarts = text.split(".")
        return cls(int(submission), int(restarts))
